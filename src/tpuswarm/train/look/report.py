"""Write the report of a run, loss.png and a self-contained HTML page; a swarm's report uses the same parts."""

import base64
import html
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tpuswarm.config.formatting import format_figure, token_unit
from tpuswarm.train.diagnose.phases import summary_rows
from tpuswarm.train.look.pictures import read_pictures
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import EVENTS, METRICS, SAMPLE_EVENT, read_config, read_rows
from tpuswarm.train.run.listing import missing_rows

STYLE = (
    ":root{color-scheme:light dark;--ink:#1c2733;--back:#fff;--block:#f3f5f7;--line:#e3e7eb}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6ebf0;--back:#10151b;--block:#19212a;--line:#2c3742}}"
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:var(--ink);"
    "background:var(--back);overflow-wrap:anywhere}"
    "pre{background:var(--block);padding:1rem}img{max-width:100%;height:auto}"
    "pre,.scroll{overflow-x:auto}pre,td,th{overflow-wrap:normal}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem 1.5rem .2rem 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}"
    "tr+tr>*,thead+tbody>tr>*{border-top:1px solid var(--line)}"
    ".n{text-align:right}.n,.w{white-space:nowrap}th{font-weight:600}"
)
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
NUMBER_CELL = re.compile(r"–|-?[\d,.]*\d( ?[%s]| [KMGT]iB)?")
MAX_UNBROKEN_LETTERS = 20
SMOOTHING_PARTS = 50
"""A curve is smoothed over 1 / SMOOTHING_PARTS of its length."""
MAX_PICTURES = 6
MAX_POINTS = 20_000
"""A longer curve is thinned out."""


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html from the files of a run; return the page's path."""
    metrics = list(read_rows(folder / METRICS))
    updates = [row for row in metrics if row.keys() >= {"loss", "tokens", "tokens_per_s", "wall_s"}]  # may be damaged
    evaluations = [row for row in metrics if row.keys() >= {"eval_loss", "tokens"}]
    config, events = read_config(folder), list(read_rows(folder / EVENTS))
    picture = draw_loss_picture(updates, evaluations, token_unit(config["chosen"]["tokens_per_row"]))
    write_atomically(folder / "loss.png", picture)
    gaps = [("missing", missing)] if (missing := missing_rows(folder)) else []
    sections = [
        ("", facts_table("Facts", [*history_facts(events), *_facts(config, updates, evaluations), *gaps])),
        ("Loss", html_image("loss against tokens", picture)),
        *pictures_section(folder),
        *samples_section(events),
        *_time_and_findings(events),
        configuration_section(config),
    ]
    path = folder / "report.html"
    write_atomically(path, html_page(f"{config['recipe']['name']} · {folder.name}", sections))
    return path


def draw_loss_picture(updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], unit: str) -> bytes:
    """Return a PNG file of the loss of each update and evaluation against tokens or rows."""
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    draw_losses(axes, [row["tokens"] for row in updates], [row["loss"] for row in updates], "training", "tab:blue")
    if evaluations:
        tokens = [row["tokens"] for row in evaluations]
        losses = [math.nan if row["eval_loss"] is None else row["eval_loss"] for row in evaluations]
        axes.plot(tokens, losses, "o-", color="tab:orange", label="held out")
    axes.set(xlabel=unit, ylabel="loss")
    show_thousands(axes)
    axes.legend()
    return to_png(figure)


def draw_losses(
    axes: Axes, tokens: Sequence[int], losses: Sequence[float | None], label: str, color: Any, raw: bool = True
) -> None:
    """Draw the smoothed losses and, if `raw`, a pale line of all losses."""
    step = max(1, len(losses) // MAX_POINTS)
    if raw:
        values = [math.nan if value is None else value for value in losses[::step]]
        axes.plot(tokens[::step], values, lw=0.6, alpha=0.3, color=color)
    axes.plot(tokens[::step], smooth(losses)[::step], lw=1.5, color=color, label=label)


def smooth(values: Sequence[float | None]) -> np.ndarray:
    """Return the centered moving average, float64[n]; ignores None, and is NaN without a finite neighbour."""
    found = np.array([math.nan if value is None else value for value in values], float)
    half = len(found) // SMOOTHING_PARTS // 2
    counts = np.concatenate([[0], np.cumsum(~np.isnan(found))])
    totals = np.concatenate([[0.0], np.cumsum(np.nan_to_num(found))])
    low = np.clip(np.arange(len(found)) - half, 0, None)
    high = np.clip(np.arange(len(found)) + half + 1, None, len(found))
    count = counts[high] - counts[low]
    return np.divide(totals[high] - totals[low], count, out=np.full(len(found), math.nan), where=count > 0)


def show_thousands(axes: Axes) -> None:
    """Label tokens as 500K or 1.2M, and draw a grid."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def to_png(figure: Figure) -> bytes:
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def html_image(description: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{_escape(description)}" src="data:image/png;base64,{data}">'


def _escape(text: str) -> str:
    """Escape HTML, and show control characters, which HTML forbids, as \\x1b."""
    return html.escape(text.translate(CONTROL_CHARACTERS))


def _html_pre(text: str) -> str:
    return f'<pre tabindex="0">{_escape(text)}</pre>'


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table of names and values. title: what screen readers say."""
    facts = list(facts)
    style = _cell_class([value for _, value in facts])
    rows = (f'<tr><th scope="row">{_escape(name)}</th><td{style}>{_escape(value)}</td></tr>' for name, value in facts)
    return _scrolling(title, f"<table><tbody>{''.join(rows)}</tbody></table>")


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table with a header, numbers aligned to the right, and without empty columns."""
    rows = list(rows)
    shown = [number for number in range(len(columns)) if not rows or any(row[number] for row in rows)]
    styles = {number: _cell_class([row[number] for row in rows]) for number in shown}
    head = "".join(f'<th scope="col"{styles[number]}>{_escape(columns[number])}</th>' for number in shown)
    body = ("".join(f"<td{styles[number]}>{_escape(row[number])}</td>" for number in shown) for row in rows)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return _scrolling(title, f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")


def _scrolling(title: str, table: str) -> str:
    """Let a table wider than the screen scroll by itself, also with keys."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{_escape(title)}">{table}</div>'


def _cell_class(cells: Sequence[str]) -> str:
    if any(cells) and all(NUMBER_CELL.fullmatch(cell) for cell in cells if cell):
        return ' class="n"'
    return ' class="w"' if max(map(len, cells), default=0) <= MAX_UNBROKEN_LETTERS else ""


def history_facts(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the command that began a run, the last one that resumed it, and its times of start and end."""
    starts = [event for event in events if event["event"] == "started"]
    commands = [str(event["command"]) for event in starts if event.get("command")]
    times = [event["time"] for event in [*starts[:1], *events[-1:]]]
    dates = [time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time)) for unix_time in times]
    facts = {"command": commands[0], "resumed with": commands[-1]} if commands else {}
    if len(commands) < 2:
        facts.pop("resumed with", None)
    return [*facts.items(), *([("when", " to ".join(dates))] if dates else [])]


def samples_section(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the section of texts that the model wrote, if any."""
    parts = "".join(
        f"<h3>step {event['step']:,}</h3>{_html_pre(str(event['text']).strip())}"
        for event in events
        if event["event"] == SAMPLE_EVENT
    )
    return [("What it writes", parts)] if parts else []


def pictures_section(folder: Path, unit: str = "step") -> list[tuple[str, str]]:
    """Return the section of pictures that the model generated, if any; unit: of their numbers."""
    parts = "".join(
        f"<h3>{unit} {number:,}</h3>{html_image(f'made at {unit} {number}', png)}"
        for number, png in read_pictures(folder, MAX_PICTURES)
    )
    return [("What it makes", parts)] if parts else []


def html_page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """sections: heading (may be empty) and HTML."""
    parts = (f"<h2>{_escape(heading)}</h2>{part}" if heading else part for heading, part in sections)
    name = _escape(title)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="description" content="The report of a training run."><link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{name}</h1>{''.join(parts)}</main></body></html>\n"
    )


def configuration_section(config: dict[str, Any]) -> tuple[str, str]:
    return "Configuration", _html_pre(tomli_w.dumps(config))


def _time_and_findings(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Show where the time of the newest process went, and the newest version of each finding."""
    summaries = [event for event in events if event["event"] == "summary"]
    findings = [event for event in events if event["event"] == "diagnostic"]
    findings += [finding for summary in summaries for finding in summary["findings"]]
    newest = {(finding["kind"], finding.get("place", finding["message"])): finding["message"] for finding in findings}
    items = "".join(f"<li>{_escape(message)}</li>" for message in newest.values())
    heading, columns = "Where the time went", ("what", "value", "share")
    return [
        *[(heading, html_table(heading, columns, summary_rows(summary))) for summary in summaries[-1:]],
        *([("Diagnostics", f"<ul>{items}</ul>")] if items else []),
    ]


def _facts(
    config: dict[str, Any], updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    chosen = config["chosen"]
    unit = token_unit(chosen["tokens_per_row"])
    facts = [("devices", f"{chosen['devices']} x {chosen['device']}"), ("sharding", chosen["reason"])]
    if updates:
        last = updates[-1]
        speeds = sorted(row["tokens_per_s"] for row in updates)
        facts += [
            ("steps", f"{last['step']:,} of {config['train']['steps']:,}"),
            (unit, f"{last['tokens']:,}"),
            ("training time", f"{last['wall_s']:.1f} s"),
            (f"{unit}/s, median", f"{speeds[len(speeds) // 2]:,.0f}"),
            ("loss", format_figure(last["loss"])),
        ]
    if evaluations:
        facts.append(("held-out loss", format_figure(evaluations[-1]["eval_loss"])))
    return facts

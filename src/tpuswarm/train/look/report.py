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
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "pre{background:#f3f5f7;padding:1rem;overflow-x:auto}img{max-width:100%}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem 1.5rem .2rem 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}"
    "tr+tr>*{border-top:1px solid #e3e7eb}.n{text-align:right}.n,.w{white-space:nowrap}th{font-weight:600}"
)
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
        ("", facts_table([*history_facts(events), *_facts(config, updates, evaluations), *gaps])),
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
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def facts_table(facts: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table of names and values."""
    facts = list(facts)
    style = _cell_class([value for _, value in facts])
    rows = (f"<tr><th>{html.escape(name)}</th><td{style}>{html.escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{''.join(rows)}</table>"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table with a header, numbers aligned to the right, and without empty columns."""
    rows = list(rows)
    shown = [number for number in range(len(columns)) if not rows or any(row[number] for row in rows)]
    styles = {number: _cell_class([row[number] for row in rows]) for number in shown}
    lines = ["".join(f"<th{styles[number]}>{html.escape(columns[number])}</th>" for number in shown)]
    lines += ("".join(f"<td{styles[number]}>{html.escape(row[number])}</td>" for number in shown) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell_class(cells: Sequence[str]) -> str:
    if any(cells) and all(NUMBER_CELL.fullmatch(cell) for cell in cells if cell):
        return ' class="n"'
    return ' class="w"' if max(map(len, cells), default=0) <= MAX_UNBROKEN_LETTERS else ""


def history_facts(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the last command of a run, and its times of start and end."""
    starts = [event for event in events if event["event"] == "started"]
    commands = [str(event["command"]) for event in starts if event.get("command")]
    times = [event["time"] for event in [*starts[:1], *events[-1:]]]
    dates = [time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time)) for unix_time in times]
    return [*(("command", command) for command in commands[-1:]), *([("when", " to ".join(dates))] if dates else [])]


def samples_section(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the section of texts that the model wrote, if any."""
    parts = "".join(
        f"<h3>step {event['step']:,}</h3><pre>{html.escape(str(event['text']).strip())}</pre>"
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
    parts = (f"<h2>{html.escape(heading)}</h2>{part}" if heading else part for heading, part in sections)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<h1>{name}</h1>{''.join(parts)}</html>\n"
    )


def configuration_section(config: dict[str, Any]) -> tuple[str, str]:
    return "Configuration", f"<pre>{html.escape(tomli_w.dumps(config))}</pre>"


def _time_and_findings(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Show where the time of the newest process went, and the newest version of each finding."""
    summaries = [event for event in events if event["event"] == "summary"]
    findings = [event for event in events if event["event"] == "diagnostic"]
    findings += [finding for summary in summaries for finding in summary["findings"]]
    newest = {(finding["kind"], finding.get("place", finding["message"])): finding["message"] for finding in findings}
    items = "".join(f"<li>{html.escape(message)}</li>" for message in newest.values())
    return [
        *[("Where the time went", html_table(("", "", "share"), summary_rows(summary))) for summary in summaries[-1:]],
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

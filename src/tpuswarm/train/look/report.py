"""The report of a run: loss.png and one HTML page that needs nothing else. A swarm's is made of the same pieces."""

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
from tpuswarm.train.look.pictures import made
from tpuswarm.train.run.directory import EVENTS, METRICS, SAMPLE_EVENT, read_config, read_rows

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "pre{background:#f3f5f7;padding:1rem;overflow-x:auto}img{max-width:100%}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem 1.5rem .2rem 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}"
    "tr+tr>*{border-top:1px solid #e3e7eb}.n{text-align:right}.n,.w{white-space:nowrap}th{font-weight:600}"
)
NUMBER = re.compile(r"–|-?[\d,.]*\d( ?[%s]| [KMGT]iB)?")
"""A cell that stands at the right of its column where all others do."""
WHOLE = 20
"""Letters of a cell that are not broken into lines."""
PARTS = 50
"""A curve is smoothed over so many parts of it."""
MOST = 6
"""Pictures that the model made."""
POINTS = 20_000
"""Of a line in a picture: of more only some are drawn."""


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html of the run in `folder` from its own files; the page's path."""
    metrics = list(read_rows(folder / METRICS))
    updates = [row for row in metrics if "loss" in row]
    evaluations = [row for row in metrics if "eval_loss" in row]
    picture = loss_picture(updates, evaluations, token_unit(read_config(folder)["chosen"]["tokens_per_row"]))
    (folder / "loss.png").write_bytes(picture)
    made = folder / "report.html"
    made.write_text(_page(folder, updates, evaluations, picture), encoding="utf-8")
    return made


def loss_picture(updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], what: str) -> bytes:
    """PNG: loss against tokens, or whatever a run counts, every update and every evaluation."""
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    draw_losses(axes, [row["tokens"] for row in updates], [row["loss"] for row in updates], "training", "tab:blue")
    if evaluations:
        tokens = [row["tokens"] for row in evaluations]
        losses = [math.nan if row["eval_loss"] is None else row["eval_loss"] for row in evaluations]
        axes.plot(tokens, losses, "o-", color="tab:orange", label="held out")
    axes.set(xlabel=what, ylabel="loss")
    show_thousands(axes)
    axes.legend()
    return png(figure)


def draw_losses(
    axes: Axes, tokens: Sequence[int], losses: Sequence[float | None], label: str, color: Any, raw: bool = True
) -> None:
    """A line for the smoothed losses and, if `raw`, a pale one for all of them."""
    step = max(1, len(losses) // POINTS)
    if raw:
        every = [math.nan if value is None else value for value in losses[::step]]
        axes.plot(tokens[::step], every, lw=0.6, alpha=0.3, color=color)
    axes.plot(tokens[::step], smoothed(losses)[::step], lw=1.5, color=color, label=label)


def smoothed(values: Sequence[float | None]) -> np.ndarray:
    """float64[n]: the mean of each value with its neighbours in 1/PARTS of all of them; NaN where none is finite."""
    found = np.array([math.nan if value is None else value for value in values], float)
    half = len(found) // PARTS // 2
    there = np.concatenate([[0], np.cumsum(~np.isnan(found))])
    total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(found))])
    low = np.clip(np.arange(len(found)) - half, 0, None)
    high = np.clip(np.arange(len(found)) + half + 1, None, len(found))
    count = there[high] - there[low]
    return np.divide(total[high] - total[low], count, out=np.full(len(found), math.nan), where=count > 0)


def show_thousands(axes: Axes) -> None:
    """Tokens as 500K or 1.2M, and a grid."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def image(what: str, picture: bytes) -> str:
    """A PNG file inside the page; what: said to those who do not see it."""
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'


def facts_table(facts: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    known = list(facts)
    kind = _class([value for _, value in known])
    rows = (f"<tr><th>{html.escape(name)}</th><td{kind}>{html.escape(value)}</td></tr>" for name, value in known)
    return f"<table>{''.join(rows)}</table>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a head; numbers stand at the right, and a column in which nothing stands is left out."""
    cells = list(rows)
    shown = [number for number in range(len(columns)) if not cells or any(row[number] for row in cells)]
    kinds = {number: _class([row[number] for row in cells]) for number in shown}
    head = "".join(f"<th{kinds[each]}>{html.escape(columns[each])}</th>" for each in shown)
    body = ("".join(f"<td{kinds[each]}>{html.escape(row[each])}</td>" for each in shown) for row in cells)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _class(cells: Sequence[str]) -> str:
    if any(cells) and all(NUMBER.fullmatch(cell) for cell in cells if cell):
        return ' class="n"'
    return ' class="w"' if max(map(len, cells), default=0) <= WHOLE else ""


def history(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The command that was given last, and when the run began and ended."""
    starts = [event for event in events if event["event"] == "started"]
    commands = [str(event["command"]) for event in starts if event.get("command")]
    times = [event["time"] for event in [*starts[:1], *events[-1:]]]
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(each)) for each in times]
    return [*(("command", each) for each in commands[-1:]), *([("when", " to ".join(days))] if days else [])]


def samples(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The section of texts that the model made, where there is one."""
    found = "".join(
        f"<h3>step {event['step']:,}</h3><pre>{html.escape(str(event['text']).strip())}</pre>"
        for event in events
        if event["event"] == SAMPLE_EVENT
    )
    return [("What it writes", found)] if found else []


def pictures(folder: Path, when: str = "step") -> list[tuple[str, str]]:
    """The section of pictures that the model made as it learnt, where there is one; when: what their number counts."""
    found = "".join(f"<h3>{when} {at:,}</h3>{image(f'made at {when} {at}', png)}" for at, png in made(folder, MOST))
    return [("What it makes", found)] if found else []


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """A page of sections, each a heading (the first has none) and its HTML."""
    parts = (f"<h2>{html.escape(name)}</h2>{part}" if name else part for name, part in sections)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<h1>{name}</h1>{''.join(parts)}</html>\n"
    )


def configuration(config: dict[str, Any]) -> tuple[str, str]:
    """The section that ends every report."""
    return "Configuration", f"<pre>{html.escape(tomli_w.dumps(config))}</pre>"


def _page(
    folder: Path, updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], picture: bytes
) -> str:
    config, events = read_config(folder), list(read_rows(folder / EVENTS))
    sections = [
        ("", facts_table(history(events) + _facts(config, updates, evaluations))),
        ("Loss", image("loss against tokens", picture)),
        *pictures(folder),
        *samples(events),
        *_time_and_findings(events),
        configuration(config),
    ]
    return page(f"{config['recipe']['name']} · {folder.name}", sections)


def _time_and_findings(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where the time of the newest process went, and what was found in all of them, with the newest counts."""
    summaries = [event for event in events if event["event"] == "summary"]
    said = [event for event in events if event["event"] == "diagnostic"]
    said += [finding for summary in summaries for finding in summary["findings"]]
    newest = {(each["kind"], each.get("place", each["message"])): each["message"] for each in said}
    items = "".join(f"<li>{html.escape(message)}</li>" for message in newest.values())
    return [
        *[("Where the time went", table(("", "", "share"), summary_rows(summary))) for summary in summaries[-1:]],
        *([("Diagnostics", f"<ul>{items}</ul>")] if items else []),
    ]


def _facts(
    config: dict[str, Any], updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    chosen = config["chosen"]
    what = token_unit(chosen["tokens_per_row"])
    facts = [("devices", f"{chosen['devices']} x {chosen['device']}"), ("sharding", chosen["reason"])]
    if updates:
        last = updates[-1]
        speeds = sorted(row["tokens_per_s"] for row in updates)
        facts += [
            ("steps", f"{last['step']:,} of {config['train']['steps']:,}"),
            (what, f"{last['tokens']:,}"),
            ("training time", f"{last['wall_s']:.1f} s"),
            (f"{what}/s, median", f"{speeds[len(speeds) // 2]:,.0f}"),
            ("loss", format_figure(last["loss"])),
        ]
    if evaluations:
        facts.append(("held-out loss", format_figure(evaluations[-1]["eval_loss"])))
    return facts

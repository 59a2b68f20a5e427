"""The report of a run: loss.png and one HTML page that needs nothing else. A swarm's is made of the same pieces."""

import base64
import html
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import tomli_w
from matplotlib.figure import Figure

from tpuswarm.train.diagnose.summary import rows
from tpuswarm.train.run import EVENTS, METRICS, read_config, read_rows

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "pre{background:#f3f5f7;padding:1rem;overflow-x:auto}img{max-width:100%}"
    "td,th{padding:.2rem 1rem .2rem 0;text-align:left;font-variant-numeric:tabular-nums}"
)


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html of the run in `folder` from its own files; the page's path."""
    metrics = list(read_rows(folder / METRICS))
    updates = [row for row in metrics if "loss" in row]
    evaluations = [row for row in metrics if "eval_loss" in row]
    picture = loss_picture(updates, evaluations)
    (folder / "loss.png").write_bytes(picture)
    made = folder / "report.html"
    made.write_text(_page(folder, updates, evaluations, picture), encoding="utf-8")
    return made


def loss_picture(updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> bytes:
    """PNG: loss against tokens, every update and every evaluation."""
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row["tokens"] for row in updates], [row["loss"] for row in updates], lw=0.8, label="training")
    if evaluations:
        tokens, losses = zip(*[(row["tokens"], row["eval_loss"]) for row in evaluations], strict=True)
        axes.plot(tokens, losses, "o-", label="held out")
    axes.set(xlabel="tokens", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)


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
    rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{''.join(rows)}</table>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a head."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


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
    samples = "".join(
        f"<h3>step {event['step']}</h3><pre>{html.escape(event['text'])}</pre>"
        for event in events
        if event["event"] == "sample"
    )
    sections = [
        ("", facts_table(_facts(config, updates, evaluations))),
        ("Loss", image("loss against tokens", picture)),
        *_time_and_findings(events),
        *([("Samples", samples)] if samples else []),
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
        *[("Where the time went", table(("", "", "share"), rows(summary))) for summary in summaries[-1:]],
        *([("Found on the way", f"<ul>{items}</ul>")] if items else []),
    ]


def _facts(
    config: dict[str, Any], updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    chosen = config["chosen"]
    facts = [("devices", f"{chosen['devices']} x {chosen['device']}"), ("sharding", chosen["reason"])]
    if updates:
        last = updates[-1]
        speeds = sorted(row["tokens_per_s"] for row in updates)
        facts += [
            ("steps", f"{last['step']:,} of {config['train']['steps']:,}"),
            ("tokens", f"{last['tokens']:,}"),
            ("training time", f"{last['wall_s']:.1f} s"),
            ("tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}"),
            ("loss", f"{last['loss']:.4f}"),
        ]
    if evaluations:
        facts.append(("held-out loss", f"{evaluations[-1]['eval_loss']:.4f}"))
    return facts

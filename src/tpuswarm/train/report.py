"""The report of a run: loss.png and one HTML page that needs nothing else."""

import base64
import html
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import tomli_w
from matplotlib.figure import Figure

from tpuswarm.train.run import EVENTS, METRICS, read_config, read_rows

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "pre{background:#f3f5f7;padding:1rem;overflow-x:auto}img{max-width:100%}"
    "td,th{padding:.2rem 1rem .2rem 0;text-align:left;font-variant-numeric:tabular-nums}"
)


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html of the run in `folder` from its own files; the page's path."""
    rows = list(read_rows(folder / METRICS))
    updates = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    picture = loss_picture(updates, evaluations)
    (folder / "loss.png").write_bytes(picture)
    page = folder / "report.html"
    page.write_text(_page(folder, updates, evaluations, picture), encoding="utf-8")
    return page


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
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _page(
    folder: Path, updates: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], picture: bytes
) -> str:
    config = read_config(folder)
    name = html.escape(f"{config['recipe']['name']} · {folder.name}")
    facts = _facts(config, updates, evaluations)
    table = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in facts)
    samples = "".join(
        f"<h3>step {event['step']}</h3><pre>{html.escape(event['text'])}</pre>"
        for event in read_rows(folder / EVENTS)
        if event["event"] == "sample"
    )
    image = base64.b64encode(picture).decode()
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<h1>{name}</h1><table>{table}</table>"
        f'<h2>Loss</h2><img alt="loss against tokens" src="data:image/png;base64,{image}">'
        + (f"<h2>Samples</h2>{samples}" if samples else "")
        + f"<h2>Configuration</h2><pre>{html.escape(tomli_w.dumps(config))}</pre></html>\n"
    )


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

"""The report of a swarm's run, built from the parts of a plain run's report; and its ledger as lines of text."""

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tpuswarm.config.formatting import format_figure
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.swarm.views.events import sentence
from tpuswarm.swarm.views.missing_rows import missing_rows
from tpuswarm.swarm.views.overview import MemberTotals, Overview, overview
from tpuswarm.swarm.views.status import RunView, people_sentence, read_run
from tpuswarm.swarm.views.tables import COMMIT_COLUMNS, Commit, commit_row
from tpuswarm.train.look.report import (
    configuration_section,
    draw_losses,
    facts_table,
    history_facts,
    html_image,
    html_page,
    html_table,
    pictures_section,
    samples_section,
    show_thousands,
    to_png,
)
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import EVENTS, METRICS, read_config, read_rows
from tpuswarm.train.run.life import END_EVENTS

MAX_EVENTS = 200
"""Newest events in the table."""
MAX_COLORED_MEMBERS = 10
"""With more members, all lines have one color."""
FATE_COLORS = {"dropped": "tab:red", "returned": "tab:orange", "void": "black"}
MARK_COLOR, TEXT_SIZE = "tab:red", 8


class Span(NamedTuple):
    """A member's incarnation, in seconds since the start of the run."""

    member: str
    incarnation: str
    start: float
    end: float


class Mark(NamedTuple):
    """The loss of a process."""

    name: str
    time: float
    """In seconds since the start of the run."""


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html of a swarm's run from its own files; return the page's path.

    Raise RunFailed if a record is damaged or missing.
    """
    commits, events, run = overview(Store(folder)), list(read_rows(folder / EVENTS)), read_run(folder)
    picture = loss_picture(read_rows(folder / METRICS), run.unit)
    write_atomically(folder / "loss.png", picture)
    config = read_config(folder)
    spans, marks, seconds = incarnation_spans(events)
    gaps = [("missing", missing)] if (missing := missing_rows(folder)) else []
    sections = [
        ("", facts_table("Facts", [*history_facts(events), *_facts(config, run, commits, seconds), *gaps])),
        (
            "Loss",
            html_image("training loss of each member against its tokens, held-out loss against all", picture),
        ),
        *pictures_section(folder, "commit"),
        *samples_section(events),
        (
            "Members",
            html_image("which members were alive when, and what was lost", members_picture(spans, marks, seconds)),
        ),
        (
            "Commits",
            html_image("weight of each member in each commit", to_png(draw_commits(commits)))
            + _commits(commits.newest),
        ),
        (run.unit.capitalize(), facts_table(f"{run.unit} by fate", _tokens(run)) + _totals(commits.totals)),
        ("What happened", _events(events)),
        configuration_section(config),
    ]
    path = folder / "report.html"
    write_atomically(path, html_page(f"{run.recipe} · {folder.name}", sections))
    return path


def replay_lines(store: Store) -> Iterator[str]:
    """Verify the whole ledger; yield a line for each version, then the result."""
    report = verify(store, lambda text: None)
    ledger = Ledger(store)
    recomputed = set(report.recomputed)
    for record in ledger.records(range(report.newest + 1)) if report.newest is not None else ():
        parts = [
            f"{decision.identity.incarnation.member} "
            + (
                f"{decision.weight:.0%} ({decision.tokens:,})"
                if decision.fate == "applied"
                else f"{decision.fate}: {decision.reason}"
            )
            for decision in record.decisions
        ]
        rule = record.rule + ("" if record.rule == "average" else f" at {record.rate:g}")
        check = ", recomputed, bit-identical" if record.version in recomputed else ""
        content = f"{', '.join(parts)}; {rule}" if record.version else "the initial state"
        yield f"commit {record.version}: {content}; sha256 {ledger.digest(record)[:8]}{check}"
    yield from report.problems
    if report.newest is not None:
        yield (
            f"{report.newest} commits, hash chain intact, {len(recomputed)} recomputed; "
            f"{report.applied:,} tokens counted, "
            "none twice"
        )


def loss_picture(rows: Iterable[Mapping[str, Any]], unit: str) -> bytes:
    """Draw a PNG of each member's losses over its own tokens, and of held-out losses over counted tokens.

    unit: `tokens`, or `rows` if each row counts as one.
    """
    evaluations: list[tuple[int, float]] = []
    members: dict[str, tuple[array[int], array[float]]] = {}
    for row in rows:
        if not row.keys() >= {"tokens", "member"}:  # it is damaged
            continue
        if row.get("eval_loss") is not None:
            evaluations.append((row["tokens"], row["eval_loss"]))
        elif "loss" in row:
            tokens, losses = members.setdefault(row["member"], (array("q"), array("d")))
            tokens.append(row["tokens"])
            losses.append(math.nan if row["loss"] is None else row["loss"])
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    left, right = (
        figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if evaluations else (figure.add_subplot(), None)
    )
    few = len(members) <= MAX_COLORED_MEMBERS
    for number, (member, (tokens, losses)) in enumerate(sorted(members.items())):
        label, color = (member, f"C{number}") if few else (f"each of {len(members)}" if not number else "", "tab:blue")
        draw_losses(left, tokens, losses, label, color, raw=few)
    left.set(xlabel=f"{unit} of the member", ylabel="loss", title="training loss of each member")
    show_thousands(left)
    if members:
        left.legend(ncols=2)
    if right is not None:
        right.plot(*zip(*sorted(evaluations), strict=True), "o-", color="black", ms=4)
        right.set(xlabel=f"{unit} counted", title="held-out loss of the model", xlim=(0, None))
        show_thousands(right)
    return to_png(figure)


def incarnation_spans(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Mark], float]:
    """Return the spans of incarnations, the losses of processes, and the run's seconds without pauses."""
    spans: list[Span] = []
    marks: list[Mark] = []
    alive: dict[str, tuple[str, float]] = {}
    now = before = 0.0
    running = False

    def close(member: str) -> None:
        if member in alive:
            spans.append(Span(member, *alive.pop(member), now))

    for event in events:
        kind = event["event"]
        if running and kind != "started":  # nothing ran between a kill of everything and the next start
            now += max(0.0, event["time"] - before)
        before = event["time"]
        if kind == "started" or kind in END_EVENTS:
            for member in list(alive):
                close(member)
            running = kind == "started"
        elif kind in ("joined", "lost", "left"):
            close(event["member"])
            if kind == "joined":
                alive[event["member"]] = (event["incarnation"], now)
            elif kind == "lost":
                marks.append(Mark(event["member"], now))
        elif kind in ("coordinator", "shard"):
            marks.append(Mark(event["name"], now))
    for member in list(alive):
        close(member)
    return spans, marks, now


def members_picture(spans: Sequence[Span], marks: Sequence[Mark], seconds: float) -> bytes:
    """Draw a PNG with a bar for each incarnation and a cross for each lost process."""
    names = sorted({span.member for span in spans} | {mark.name for mark in marks}, reverse=True)
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(names)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    row = {name: number for number, name in enumerate(names)}
    for span in spans:
        axes.barh(row[span.member], span.end - span.start, left=span.start, height=0.6, color="tab:blue", ec="white")
        if span.end - span.start > seconds / 10:
            axes.text(span.start, row[span.member], f" {span.incarnation[:8]}", va="center", fontsize=TEXT_SIZE)
    if marks:
        points = [mark.time for mark in marks], [row[mark.name] for mark in marks]
        axes.plot(*points, "x", color=MARK_COLOR, ms=9, mew=2, label="lost")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds of the run", xlim=(0, max(seconds, 1e-9)), ylim=(-0.6, max(len(names), 1) - 0.4))
    axes.grid(axis="x", alpha=0.3)
    return to_png(figure)


def draw_commits(commits: Overview) -> Figure:
    """Draw members by versions, colored by weight, with a dot for each contribution that was not counted."""
    names = [total.member for total in commits.totals]
    row = {name: number for number, name in enumerate(names)}
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(names)), dpi=110, layout="constrained")
    axes: Axes = figure.add_subplot()
    shown = axes.imshow(
        commits.weights, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1,
        extent=(-0.5, max(commits.commits, 1) - 0.5, max(len(names), 1) - 0.5, -0.5),
    )  # fmt: skip
    figure.colorbar(shown, label="weight")
    for fate, points in sorted(commits.others.items()):
        versions, members = zip(*points, strict=True)
        axes.plot(versions, [row[member] for member in members], "o", ms=4, color=FATE_COLORS[fate], label=fate)
    if commits.others:
        axes.legend(loc="upper left", fontsize=TEXT_SIZE)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="commit")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _facts(config: Mapping[str, Any], run: RunView, commits: Overview, seconds: float) -> list[tuple[str, str]]:
    swarm, chosen = config["swarm"], config["chosen"]
    form, contributed = "" if swarm["quantize"] == "plain" else f", {swarm['quantize']}", len(commits.totals)
    facts = [
        (
            "members",
            f"{swarm['members']}, each with {chosen['devices']} x {chosen['platform']}; {contributed} contributed",
        ),
        ("pushes", f"every {swarm['cycle']} steps, {swarm['outer']}{form}"),
    ]
    if people := people_sentence(run.status.people):
        facts.append(("people", people.removeprefix("contributed: ")))
    if commits.newest:
        newest = commits.newest[-1]
        facts += [
            ("commits", f"{newest.version:,}, by {newest.epoch} coordinator{'s' * (newest.epoch > 1)}"),
            ("steps", f"{newest.tokens // run.tokens_per_step:,} of {run.steps:,}"),
            (run.unit, f"{newest.tokens:,} of {run.status.horizon:,}"),
            ("time", f"{seconds:.1f} s, including start and end"),
            (f"{run.unit}/s", f"{newest.tokens / max(seconds, 1e-9):,.0f} counted"),
        ]
    if run.loss is not None:
        facts.append(("training loss, last 20 steps of each member", format_figure(run.loss)))
    if run.eval_loss is not None:
        facts.append(("held-out loss", format_figure(run.eval_loss)))
    return facts


def _tokens(run: RunView) -> list[tuple[str, str]]:
    tokens, goodput = run.status.tokens, run.status.goodput
    return [
        ("processed", f"{tokens.processed:,}"),
        ("applied", f"{tokens.applied:,}"),
        ("dropped", f"{tokens.dropped:,}"),
        ("outstanding", f"{tokens.outstanding:,}"),
        ("lost", f"{tokens.lost:,}"),
        ("goodput", "–" if goodput is None else f"{goodput:.2%}"),
    ]


def _totals(totals: Sequence[MemberTotals]) -> str:
    counts = ("contributions", "applied", "returned", "dropped", "void")
    return html_table(
        "Contributions of each member",
        ("member", "pushes", *counts[1:]),
        ([str(total.member), *(f"{getattr(total, name):,}" for name in counts)] for total in totals),
    )


def _commits(newest: Sequence[Commit]) -> str:
    return html_table("Newest commits", COMMIT_COLUMNS, map(commit_row, reversed(newest)))


def _events(events: Iterable[Mapping[str, Any]]) -> str:
    newest = [event for event in events if event["event"] != "commit"][-MAX_EVENTS:]
    times = (time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])) for event in newest)
    return html_table("Newest events", ("time", "what"), zip(times, map(sentence, newest), strict=True))

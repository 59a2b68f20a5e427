"""The report of a swarm's run, made of the same pieces as a plain run's; and its ledger as lines for the screen."""

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tpuswarm.config.formatting import format_figure
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.swarm.views.events import sentence
from tpuswarm.swarm.views.overview import MemberTotals, Overview, overview
from tpuswarm.swarm.views.status import Look, look
from tpuswarm.swarm.views.tables import COMMIT_COLUMNS, Commit, commit_row
from tpuswarm.train.look.report import (
    configuration,
    draw_losses,
    facts_table,
    history,
    image,
    page,
    pictures,
    png,
    samples,
    show_thousands,
    table,
)
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import EVENTS, METRICS, read_config, read_rows
from tpuswarm.train.run.life import LAST

HAPPENED = 200
"""Newest events in the table."""
NAMED = 10
"""Members that have a line of a colour of their own."""
LOST = {"dropped": "tab:red", "returned": "tab:orange", "void": "black"}
MARK, TEXT = "tab:red", 8


class Span(NamedTuple):
    """A member's incarnation, in seconds since the run began."""

    member: str
    incarnation: str
    start: float
    end: float


class Mark(NamedTuple):
    """A process that was lost, in seconds since the run began."""

    name: str
    at: float


def write_report(folder: Path) -> Path:
    """Write loss.png and report.html of the swarm's run in `folder` from its own files; the page's path.

    Raises RunFailed where a record is damaged or missing.
    """
    commits, events, seen = overview(Store(folder)), list(read_rows(folder / EVENTS)), look(folder)
    picture = loss_picture(read_rows(folder / METRICS), seen.unit)
    (folder / "loss.png").write_bytes(picture)
    config = read_config(folder)
    spans, marks, seconds = lives(events)
    sections = [
        ("", facts_table(history(events) + _facts(config, seen, commits, seconds))),
        (
            "Loss",
            image("training loss of each member against its tokens, held-out loss against all", picture),
        ),
        *pictures(folder, "commit"),
        *samples(events),
        ("Members", image("which members were alive when, and what was lost", members_picture(spans, marks, seconds))),
        ("Commits", image("weight of each member in each commit", commits_picture(commits)) + _commits(commits.newest)),
        (seen.unit.capitalize(), facts_table(_tokens(seen)) + _totals(commits.totals)),
        ("What happened", _happened(events)),
        configuration(config),
    ]
    made = folder / "report.html"
    write_atomically(made, page(f"{seen.recipe} · {folder.name}", sections))
    return made


def replay_lines(store: Store) -> Iterator[str]:
    """The whole ledger, checked, as lines for the screen: a line for each version, then what was proved."""
    report = verify(store, lambda text: None)
    ledger = Ledger(store)
    again = set(report.recomputed)
    for record in ledger.records(range(report.newest + 1)) if report.newest is not None else ():
        parts = [
            f"{each.identity.incarnation.member} "
            + (f"{each.weight:.0%} ({each.tokens:,})" if each.fate == "applied" else f"{each.fate}: {each.reason}")
            for each in record.decisions
        ]
        rule = record.rule + ("" if record.rule == "average" else f" at {record.rate:g}")
        check = ", recomputed, bit-identical" if record.version in again else ""
        said = f"{', '.join(parts)}; {rule}" if record.version else "the initial state"
        yield f"commit {record.version}: {said}; sha256 {ledger.digest(record)[:8]}{check}"
    yield from report.problems
    if report.newest is not None:
        yield (
            f"{report.newest} commits, hash chain intact, {len(again)} recomputed; {report.applied:,} tokens counted, "
            "none twice"
        )


def loss_picture(rows: Iterable[Mapping[str, Any]], what: str) -> bytes:
    """PNG: the losses of each member over its own tokens, and beside them the held-out losses over those counted.

    what: tokens, or rows where a row counts for one.
    """
    evaluations: list[tuple[int, float]] = []
    members: dict[str, tuple[array[int], array[float]]] = {}
    for row in rows:
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
    few = len(members) <= NAMED
    for number, (member, (tokens, losses)) in enumerate(sorted(members.items())):
        label, color = (member, f"C{number}") if few else (f"each of {len(members)}" if not number else "", "tab:blue")
        draw_losses(left, tokens, losses, label, color, raw=few)
    left.set(xlabel=f"{what} of the member", ylabel="loss", title="training loss of each member")
    show_thousands(left)
    if members:
        left.legend(ncols=2)
    if right is not None:
        right.plot(*zip(*sorted(evaluations), strict=True), "o-", color="black", ms=4)
        right.set(xlabel=f"{what} counted", title="held-out loss of the model", xlim=(0, None))
        show_thousands(right)
    return png(figure)


def lives(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Mark], float]:
    """Who was alive when, what was lost when, and the seconds of the run, pauses between its lives left out."""
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
        if running and kind != "started":  # between a kill of everything and the next start nothing ran
            now += max(0.0, event["time"] - before)
        before = event["time"]
        if kind == "started" or kind in LAST:
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
    """PNG: a bar for each incarnation, a cross for each process that was lost."""
    names = sorted({each.member for each in spans} | {each.name for each in marks}, reverse=True)
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(names)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    row = {name: number for number, name in enumerate(names)}
    for span in spans:
        axes.barh(row[span.member], span.end - span.start, left=span.start, height=0.6, color="tab:blue", ec="white")
        if span.end - span.start > seconds / 10:
            axes.text(span.start, row[span.member], f" {span.incarnation[:8]}", va="center", fontsize=TEXT)
    if marks:
        at = [each.at for each in marks], [row[each.name] for each in marks]
        axes.plot(*at, "x", color=MARK, ms=9, mew=2, label="lost")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds of the run", xlim=(0, max(seconds, 1e-9)), ylim=(-0.6, max(len(names), 1) - 0.4))
    axes.grid(axis="x", alpha=0.3)
    return png(figure)


def commits_picture(commits: Overview) -> bytes:
    """PNG: members by versions, the colour is the weight; a dot is a contribution that was not counted."""
    names = [each.member for each in commits.totals]
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
        axes.plot(versions, [row[each] for each in members], "o", ms=4, color=LOST[fate], label=fate)
    if commits.others:
        axes.legend(loc="upper left", fontsize=TEXT)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="commit")
    return png(figure)


def _facts(config: Mapping[str, Any], seen: Look, commits: Overview, seconds: float) -> list[tuple[str, str]]:
    swarm, chosen = config["swarm"], config["chosen"]
    form, contributed = "" if swarm["quantize"] == "plain" else f", {swarm['quantize']}", len(commits.totals)
    facts = [
        (
            "members",
            f"{swarm['members']}, each with {chosen['devices']} x {chosen['platform']}; {contributed} contributed",
        ),
        ("pushes", f"every {swarm['cycle']} steps, {swarm['outer']}{form}"),
    ]
    if commits.newest:
        newest = commits.newest[-1]
        facts += [
            ("commits", f"{newest.version:,}, by {newest.epoch} coordinator{'s' * (newest.epoch > 1)}"),
            ("steps", f"{newest.tokens // seen.tokens_per_step:,} of {seen.steps:,}"),
            (seen.unit, f"{newest.tokens:,} of {seen.status.horizon:,}"),
            ("time", f"{seconds:.1f} s, including start and end"),
            (f"{seen.unit}/s", f"{newest.tokens / max(seconds, 1e-9):,.0f} counted"),
        ]
    facts += (
        [("training loss, last 20 steps of each member", format_figure(seen.loss))] if seen.loss is not None else []
    )
    facts += [("held-out loss", format_figure(seen.eval_loss))] if seen.eval_loss is not None else []
    return facts


def _tokens(seen: Look) -> list[tuple[str, str]]:
    tokens, goodput = seen.status.tokens, seen.status.goodput
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
    return table(
        ("member", "pushes", *counts[1:]),
        ([str(each.member), *(f"{getattr(each, name):,}" for name in counts)] for each in totals),
    )


def _commits(newest: Sequence[Commit]) -> str:
    return table(COMMIT_COLUMNS, map(commit_row, reversed(newest)))


def _happened(events: Iterable[Mapping[str, Any]]) -> str:
    """All events but commits, alarms among them."""
    shown = [each for each in events if each["event"] != "commit"][-HAPPENED:]
    stamps = (time.strftime("%m-%d %H:%M:%S", time.localtime(each["time"])) for each in shown)
    return table(("time", "what"), zip(stamps, map(sentence, shown), strict=True))

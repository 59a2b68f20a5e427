"""`tpuswarm ledger show` and `verify`: what a swarm's ledger says, and whether it is true."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import Json, Run, make_console
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.swarm.storage.store import Store
    from tpuswarm.swarm.storage.verify import Report

app = typer.Typer(help="Look at a swarm's ledger and check it.", rich_markup_mode=None)
PROBLEMS = 20
"""Shown; the rest are counted."""


@app.command()
def show(
    run: Run,
    last: Annotated[int, typer.Option("-n", help="How many commits.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the last commits: who contributed, with what weight, what was not counted and why, rule and rate."""
    from tpuswarm.swarm.views.tables import commit_row, read_commits

    check_number(last, "-n, a number of commits,", least=1)
    commits = read_commits(_store(run), last)
    if as_json:
        print(json.dumps({"run": run, "commits": [asdict(each) for each in commits]}))
        return
    from tpuswarm.train.look.live import Column, table

    columns = (
        Column("commit", right=True),
        Column("time", rank=2),
        Column("epoch", right=True, rank=3),
        Column("contributors", wraps=20),
        Column("not counted", wraps=20),
        Column("tokens", right=True, rank=1),
        Column("total", right=True),
        Column("rule"),
    )
    console = make_console()
    console.print(table(columns, [commit_row(each) for each in commits], console.width))


@app.command()
def verify(run: Run, as_json: Json = False) -> None:
    """Check everything stored: digests, rows, tokens; recompute the commits whose payloads are still there.

    Exits with 1 if anything is wrong.
    """
    from tpuswarm.swarm.storage.verify import verify as check

    report = check(_store(run), lambda text: say(text, err=True))
    if as_json:
        print(json.dumps({"run": run, "sound": not report.problems, **asdict(report)}))
    else:
        _print(run, report)
    if report.problems:
        raise typer.Exit(1)


def _print(run: str, report: "Report") -> None:
    if report.newest is not None:
        say(f"commits 0 to {report.newest}: hash chain intact, no row counts twice, the tokens add up")
        say(
            f"tokens: {report.processed:,} trained, {report.applied:,} counted, {report.dropped:,} dropped, "
            f"{report.undecided:,} accepted but undecided"
        )
    if report.recomputed:
        say(f"recomputed from their pushes, bit-identical: {_ranges(report.recomputed)}")
    reasons: dict[str, list[int]] = {}
    for version, why in report.not_recomputed.items():
        kind = "payloads are gone" if why.startswith("payloads/") and why.endswith("is gone") else why
        reasons.setdefault(kind, []).append(version)
    for why, versions in sorted(reasons.items(), key=lambda each: each[1]):
        say(f"not recomputed: {_ranges(sorted(versions))}: {why}")
    for each in report.problems[:PROBLEMS]:
        say(f"problem: {each}")
    if rest := len(report.problems) - PROBLEMS:
        say(f"and {rest} more") if rest > 0 else None
    count = len(report.problems)
    say(f"{run} is not sound: {count} problem{'s' * (count > 1)}" if count else f"{run} is sound")


def _ranges(versions: list[int]) -> str:
    """3 to 7, 9."""
    runs = [
        [version for _, version in group] for _, group in groupby(enumerate(versions), lambda each: each[1] - each[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _store(run: str) -> "Store":
    """Where the ledger is. Raises InputError for what is no swarm's run, or not yet one with a ledger."""
    from tpuswarm.swarm.storage.store import Store
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.listing import find_run

    if "://" in run:
        store = Store(run)
    else:
        folder = Path(find_run(run))
        if "swarm" not in read_config(folder):
            raise InputError(f"{folder} is a plain run and has no ledger; `train --members` makes one")
        store = Store(folder)
    if not any(store.names(kind) for kind in ("commits/", "headers/", "objects/")):
        raise InputError(f"{store.root} has no commits: its first commit has not been made yet")
    return store

"""`tpuswarm ledger show` and `verify`: what a swarm's ledger says, and whether it is true."""

import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.runs import Json, Run, make_console
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.swarm.store import Store
    from tpuswarm.swarm.verify import Report

app = typer.Typer(help="Look at a swarm's ledger and check it.", rich_markup_mode=None)
PROBLEMS = 20
"""Shown; the rest are counted."""


@app.command()
def show(
    run: Run,
    last: Annotated[int, typer.Option("-n", help="So many commits.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the last commits: who contributed, with which weight, what was not counted and why, rule and rate."""
    from tpuswarm.swarm.tables import COMMIT_COLUMNS, commit_row, read_commits

    if last < 1:
        raise InputError(f"-n is a number of commits above 0, not {last}")
    commits, _ = read_commits(_store(run), last)
    if as_json:
        print(json.dumps({"run": run, "commits": [asdict(each) for each in commits]}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in COMMIT_COLUMNS:
        table.add_column(name, justify="right" if name in ("version", "epoch", "tokens", "in all") else "left")
    for each in commits:
        table.add_row(*commit_row(each))
    make_console().print(table, markup=False)


@app.command()
def verify(run: Run, as_json: Json = False) -> None:
    """Check all that is stored: digests, rows, tokens, and the versions whose payloads are there, computed again.

    Exits with 1 if anything is wrong.
    """
    from tpuswarm.swarm.verify import verify as check

    report = check(_store(run), lambda text: print(text, file=sys.stderr))
    if as_json:
        print(json.dumps({"run": run, "sound": not report.problems, **asdict(report)}))
    else:
        _print(run, report)
    if report.problems:
        raise typer.Exit(1)


def _print(run: str, report: "Report") -> None:
    if report.newest is not None:
        print(f"versions 0 to {report.newest}: their digests chain, no row counts twice, the tokens add up")
        print(
            f"tokens: {report.processed:,} reported as trained, {report.applied:,} counted, {report.dropped:,} "
            f"dropped, {report.undecided:,} accepted and undecided"
        )
    if report.recomputed:
        print(f"computed again from their payloads, to the same bits: {_ranges(report.recomputed)}")
    reasons: dict[str, list[int]] = {}
    for version, why in report.not_recomputed.items():
        kind = "its payloads are gone" if why.startswith("payloads/") and why.endswith("is gone") else why
        reasons.setdefault(kind, []).append(version)
    for why, versions in sorted(reasons.items(), key=lambda each: each[1]):
        print(f"not computed again: {_ranges(sorted(versions))}: {why}")
    for each in report.problems[:PROBLEMS]:
        print(f"problem: {each}")
    if rest := len(report.problems) - PROBLEMS:
        print(f"and {rest} more") if rest > 0 else None
    print(f"{run} is sound" if not report.problems else f"{run} is not sound: {len(report.problems)} problems")


def _ranges(versions: list[int]) -> str:
    """3 to 7, 9."""
    runs = [
        [version for _, version in group] for _, group in groupby(enumerate(versions), lambda each: each[1] - each[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _store(run: str) -> "Store":
    """Where the ledger is. Raises InputError for what is no swarm's run, or not yet one with a ledger."""
    from tpuswarm.swarm.store import Store
    from tpuswarm.train.run import find_run, read_config

    if "://" in run:
        store = Store(run)
    else:
        folder = Path(find_run(run))
        if "swarm" not in read_config(folder):
            raise InputError(f"{folder} is a run of the plain trainer and has no ledger; `train --members` makes one")
        store = Store(folder)
    if not any(store.names(kind) for kind in ("commits/", "headers/", "objects/")):
        raise InputError(f"{store.root} has no commits: its first version is still to be made")
    return store

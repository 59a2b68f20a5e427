"""`tpuswarm ledger`: show and verify a swarm's ledger."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import Json, Run, make_console
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.storage import rebuild as rebuilding
from tpuswarm.swarm.storage import verify as verification
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.tables import commit_row, read_commits
from tpuswarm.train.process.atomic import new_folder
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import read_config, require_not_in_use
from tpuswarm.train.run.listing import find_run

app = typer.Typer(help="Look at a swarm's ledger and check it.", rich_markup_mode=None)
MAX_PROBLEMS = 20
NOT_COPIED = {
    "commits", "headers", "objects", "payloads", "invites.json", "listen.pem", "lock", "logs",
    "report.html", "status.json", "token", "views",
}  # fmt: skip
"""Files of a run that a rebuilt one makes itself, or must not share."""


@app.command()
def show(
    run: Run,
    last: Annotated[int, typer.Option("-n", help="How many commits.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the last commits: who contributed, with what weight, what was not counted and why, rule and rate."""
    check_number(last, "-n, a number of commits,", least=1)
    commits = read_commits(_open_store(run), last)
    if as_json:
        print(json.dumps({"run": run, "commits": [asdict(commit) for commit in commits]}))
        return
    from tpuswarm.train.look.widgets import Column, make_table

    columns = (
        Column("commit", right=True), Column("time", rank=2), Column("epoch", right=True, rank=3),
        Column("contributors", wraps=20), Column("not counted", wraps=20), Column("tokens", right=True, rank=1),
        Column("total", right=True), Column("rule"),
    )  # fmt: skip
    console = make_console()
    console.print(make_table(columns, [commit_row(commit) for commit in commits], console.width))


@app.command()
def verify(run: Run, as_json: Json = False) -> None:
    """Check everything stored: digests, rows, tokens; recompute the commits whose payloads still exist.

    Exits with 1 if anything is wrong.
    """
    report = verification.verify(_open_store(run), lambda text: echo(text, err=True))
    if as_json:
        print(json.dumps({"run": run, "sound": not report.problems, **asdict(report)}))
    else:
        _print_report(run, report)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def rebuild(
    run: Run,
    without: Annotated[list[str], typer.Option(help="A member, or a person with all their members; repeatable.")],
    to: Annotated[Path, typer.Option(help="The folder of the rebuilt run, which must not exist.")],
    as_json: Json = False,
) -> None:
    """Compute a run again without some members' contributions, into a new run that `train` can continue.

    Needs the payloads of all commits since the first one that they contributed to: `train --keep-payloads all`.
    """
    folder = Path(find_run(run))
    source = _open_store(run)
    require_not_in_use(folder)
    rate = read_config(folder)["swarm"].get("outer_lr")
    with new_folder(to) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=_ignore_all_but_the_runs_own(folder))
        target = Store(partial)

        done = rebuilding.rebuild(source, target, is_one_of(without), rate, lambda text: echo(text, err=True))
        report = verification.verify(target, lambda text: echo(text, err=True))
        if report.problems:
            raise RunFailed(f"the rebuilt run is not sound: {report.problems[0]}")
    if as_json:
        print(json.dumps({"run": str(to), **asdict(done)}))
        return
    left = "" if report.applied else "; nobody else contributed: it is back at its beginning"
    echo(
        f"{to} is sound: commits {done.first} to {done.newest}, computed again without {done.contributions} "
        f"contributions ({done.tokens:,} tokens) of {', '.join(without)}{left}; to go on: `tpuswarm train --run {to}`"
    )


def is_one_of(names: list[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a member, or its person, is named."""
    return lambda member: member in names or (person_of(member) or member) in names


def _ignore_all_but_the_runs_own(folder: Path) -> Callable[[str, list[str]], set[str]]:
    """Return a filter for copying a run: without its ledger and arrays, and what belongs to its processes."""
    return lambda place, names: set(names) & NOT_COPIED if Path(place) == folder else set()


def _print_report(run: str, report: verification.Report) -> None:
    if report.newest is not None:
        echo(f"commits 0 to {report.newest}: hash chain intact, no row counts twice, the tokens add up")
        echo(
            f"tokens up to commit {report.newest}: {report.processed:,} trained, {report.applied:,} counted, "
            f"{report.dropped:,} dropped, {report.undecided:,} accepted but undecided"
        )
    if report.recomputed:
        echo(f"recomputed from their pushes, bit-identical: {_format_ranges(report.recomputed)}")
    versions_by_reason: dict[str, list[int]] = {}
    for version, reason in report.not_recomputed.items():
        is_deleted = reason.startswith("payloads/") and reason.endswith("is gone")
        versions_by_reason.setdefault("payloads are gone" if is_deleted else reason, []).append(version)
    for reason, versions in sorted(versions_by_reason.items(), key=lambda item: item[1]):
        echo(f"not recomputed: {_format_ranges(sorted(versions))}: {reason}")
    count = len(report.problems)
    for problem in report.problems[:MAX_PROBLEMS]:
        echo(f"problem: {problem}")
    if count > MAX_PROBLEMS:
        echo(f"and {count - MAX_PROBLEMS} more")
    echo(f"{run} is not sound: {count} problem{'s' * (count > 1)}" if count else f"{run} is sound")


def _format_ranges(versions: list[int]) -> str:
    # such as `3 to 7, 9`
    groups = groupby(enumerate(versions), lambda item: item[1] - item[0])
    ranges = [[version for _, version in group] for _, group in groups]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in ranges)


def _open_store(run: str) -> Store:
    """Open the store of a swarm's run. Raises InputError for a plain run, and before the first commit."""
    if "://" in run:
        store = Store(run)
    else:
        folder = Path(find_run(run))
        if "swarm" not in read_config(folder):
            raise InputError(f"{folder} is a plain run and has no ledger; `train --members` writes one")
        store = Store(folder)
    if not any(store.names(kind) for kind in ("commits/", "headers/", "objects/")):
        raise InputError(f"{store.root} has no commits yet")
    return store

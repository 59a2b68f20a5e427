"""`tpuswarm profile`: a trace of a run's steps."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import Run
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

LOOK, LOOK_FAR = 0.2, 5.0
"""Seconds between two looks at a run's files: on this disk, and in a bucket."""
SOON = ("joining", "evaluating")
"""States of a member that trains soon."""
LISTED = 5
"""Members that are named where one is to be chosen."""


def profile(
    run: Run,
    steps: Annotated[int | None, typer.Option(help="Steps in the trace. Default: 5.", show_default=False)] = None,
    member: Annotated[
        str | None, typer.Option(help="Of a swarm: whose steps. Default: the first that trains.", show_default=False)
    ] = None,
) -> None:
    """Trace a few steps of a running run; for one that has ended, list its traces and how to open them."""
    from tpuswarm.train.look import profile as profiling
    from tpuswarm.train.run.directory import EVENTS, holder, read_config, read_rows
    from tpuswarm.train.run.listing import find_run
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import origin, shown
    from tpuswarm.train.storage.sync import owner_elsewhere

    folder = Path(find_run(run))
    swarm = "swarm" in read_config(folder)
    if member is not None and not swarm:
        raise InputError(f"{shown(folder)} is not a swarm: leave --member out")
    if steps is not None:
        check_number(steps, "--steps", least=1)
    pid = holder(folder)
    if pid is None:
        _show(folder, steps, member)
        return
    if swarm:
        member = _training(folder, member)
    count, far = steps or profiling.STEPS, owner_elsewhere(folder)

    def told(ours: str = "") -> list[str]:
        rows = (row for row in read_rows(folder / EVENTS) if row["event"] == profiling.TRACE)
        mine = (row for row in rows if row.get("member") == member and row.get("request", ours) == ours)
        return [row["message"] for row in mine]

    refresh(folder, profiling.BOARD)
    before, had = len(told()), profiling.traces(folder, member)
    asked = profiling.request(folder, count, member)
    who = member or f"process {pid}{f' on {far.host}' if far else ''}"
    say(f"asked {who} to trace {count} steps; Ctrl-C stops waiting", err=True)
    try:
        with waiting("waiting for the trace"):
            while len(told(asked)) == before:
                if holder(folder) is None and len(told(asked)) == before:
                    raise RunFailed(
                        f"{shown(folder)} ended before the trace was taken; `tpuswarm status {shown(folder)}` says why"
                    )
                time.sleep(LOOK if origin(folder) is None else LOOK_FAR)
                refresh(folder)
            message = told(asked)[before]
            if not message.startswith("trace of"):
                raise RunFailed(message)
            if origin(folder):
                _bring(folder, member, had)
    finally:
        profiling.withdraw(folder)
    what = message.removeprefix("trace of ").partition(" in ")[0]
    say(profiling.taken_sentence(what, folder / profiling.BOARD / (member or "")))


def _bring(folder: Path, member: str | None, had: Collection[Path]) -> None:
    """Wait for a trace that the copy of a run in a bucket had not: the event of it may come before it."""
    from tpuswarm.train.look.profile import BOARD, traces
    from tpuswarm.train.run.directory import holder
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import shown

    refresh(folder, BOARD)
    while set(traces(folder, member)) <= set(had):
        if holder(folder) is None:  # that was seen before the files were: all that it has sent is here
            raise RunFailed(f"{shown(folder)} ended before the trace was in its bucket")
        time.sleep(LOOK_FAR)
        refresh(folder, BOARD)


def _training(folder: Path, member: str | None) -> str:
    """The member that is meant, once it trains. Raises InputError where it does not, or none does, nor will soon."""
    from tpuswarm.swarm.views.status import read_status
    from tpuswarm.train.run.directory import holder
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import origin, shown

    with waiting(f"waiting until {member or 'a member'} trains"):
        while True:
            status = read_status(folder)
            members = status.members if status else ()
            train = [each.id for each in members if each.state == "alive"]
            if member is None and train:
                return train[0]
            found = next((each for each in members if each.id == member), None)
            if found and found.state == "alive":
                return found.id
            meant = [found] if found else [] if train and member else members
            if members and all(each.state not in SOON for each in meant):
                break
            if holder(folder) is None:
                raise RunFailed(f"{shown(folder)} ended before {member or 'a member'} trained")
            time.sleep(LOOK if origin(folder) is None else LOOK_FAR)
            refresh(folder)
    more = f" and {len(train) - LISTED} more" if len(train) > LISTED else ""
    now = f"training now: {', '.join(train[:LISTED])}{more}" if train else "nobody trains yet; try again once one does"
    if member is None:
        raise InputError(f"{shown(folder)} has no steps to trace: {now}")
    if found is None:
        raise InputError(f"{shown(folder)} has no member {member}; {now}")
    is_now = "has left" if found.state == "left" else f"is {found.state}"
    raise InputError(f"{member} {is_now}, so it has no steps to trace; {now}")


def _show(folder: Path, steps: int | None, member: str | None) -> None:
    from tpuswarm.train.look.profile import BOARD, HOW_TO_OPEN, traces
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import shown

    if steps is not None:
        raise InputError(
            f"{shown(folder)} is not running, so no steps can be traced; leave --steps out to see its traces"
        )
    refresh(folder, BOARD)
    found = traces(folder, member)
    if not found:
        of = f" of {member}" if member else ""
        raise InputError(
            f"{shown(folder)} is not running and has no trace{of}; train with --profile, or use `tpuswarm profile` "
            "while it runs"
        )
    for trace in found:
        print(trace)
    say(f"to open them: {HOW_TO_OPEN.format(folder=folder / BOARD)}")

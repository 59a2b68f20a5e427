"""`tpuswarm profile`: trace steps of a run."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import Run
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.views.status import read_status
from tpuswarm.train.look import profile as profiling
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import EVENTS, holder_pid, read_config, read_rows
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import refresh
from tpuswarm.train.storage.folders import origin, shown
from tpuswarm.train.storage.sync import owner_elsewhere

DISK_POLL_INTERVAL_S, BUCKET_POLL_INTERVAL_S = 0.2, 5.0
STATES_BEFORE_TRAINING = ("joining", "evaluating")
MAX_NAMED_MEMBERS = 5


def profile(
    run: Run,
    steps: Annotated[int | None, typer.Option(help="Steps in the trace. Default: 5.", show_default=False)] = None,
    member: Annotated[
        str | None, typer.Option(help="Of a swarm: whose steps. Default: the first that trains.", show_default=False)
    ] = None,
) -> None:
    """Trace a few steps of a running run; for one that has ended, list its traces and how to open them."""
    folder = Path(find_run(run))
    is_swarm = "swarm" in read_config(folder)
    if member is not None and not is_swarm:
        raise InputError(f"{shown(folder)} is not a swarm: leave --member out")
    if steps is not None:
        check_number(steps, "--steps", least=1)
    pid = holder_pid(folder)
    if pid is None:
        _print_traces(folder, steps, member)
        return
    if is_swarm:
        member = wait_for_member(folder, member)
    step_count, owner = steps or profiling.TRACE_STEPS, owner_elsewhere(folder)

    def read_messages(request: str = "") -> list[str]:
        rows = (row for row in read_rows(folder / EVENTS) if row["event"] == profiling.TRACE_EVENT)
        rows = (row for row in rows if row.get("member") == member and row.get("request", request) == request)
        return [row["message"] for row in rows]

    refresh(folder, profiling.TENSORBOARD_FOLDER)
    old_count, old_traces = len(read_messages()), profiling.trace_folders(folder, member)
    request = profiling.request_trace(folder, step_count, member)
    who = member or f"process {pid}{f' on {owner.host}' if owner else ''}"
    echo(f"requested a trace of {step_count} steps from {who}; Ctrl-C stops waiting", err=True)
    try:
        with waiting("waiting for the trace"):
            while len(read_messages(request)) == old_count:
                if holder_pid(folder) is None and len(read_messages(request)) == old_count:
                    raise RunFailed(f"{shown(folder)} ended before the trace. See `tpuswarm status {shown(folder)}`.")
                time.sleep(_poll_interval_s(folder))
                refresh(folder)
            message = read_messages(request)[old_count]
            if not message.startswith("trace of"):
                raise RunFailed(message)
            if origin(folder):
                _wait_for_trace_in_bucket(folder, member, old_traces)
    finally:
        profiling.withdraw_request(folder)
    traced = message.removeprefix("trace of ").partition(" in ")[0]
    echo(profiling.trace_sentence(traced, folder / profiling.TENSORBOARD_FOLDER / (member or "")))


def _poll_interval_s(folder: Path) -> float:
    return DISK_POLL_INTERVAL_S if origin(folder) is None else BUCKET_POLL_INTERVAL_S


def _wait_for_trace_in_bucket(folder: Path, member: str | None, old_traces: Collection[Path]) -> None:
    """Wait until a new trace is in the bucket, where its event may arrive first."""
    refresh(folder, profiling.TENSORBOARD_FOLDER)
    while set(profiling.trace_folders(folder, member)) <= set(old_traces):
        if holder_pid(folder) is None:  # released after its last upload, so nothing more comes
            raise RunFailed(f"{shown(folder)} ended before the trace was in its bucket")
        time.sleep(BUCKET_POLL_INTERVAL_S)
        refresh(folder, profiling.TENSORBOARD_FOLDER)


def wait_for_member(folder: Path, member: str | None) -> str:
    """Wait until the member, or any, trains; return its id. Raises InputError if none will soon."""
    with waiting(f"waiting until {member or 'a member'} trains"):
        while True:
            status = read_status(folder)
            members = status.members if status else ()
            training = [known.id for known in members if known.state == "alive"]
            if member is None and training:
                return training[0]
            found = next((known for known in members if known.id == member), None)
            if found and found.state == "alive":
                return found.id
            candidates = [found] if found else [] if training and member else members
            if members and all(known.state not in STATES_BEFORE_TRAINING for known in candidates):
                break
            if holder_pid(folder) is None:
                raise RunFailed(f"{shown(folder)} ended before {member or 'a member'} trained")
            time.sleep(_poll_interval_s(folder))
            refresh(folder)
    now = "no member trains yet; try again later"
    if training:
        more = f" and {len(training) - MAX_NAMED_MEMBERS} more" if len(training) > MAX_NAMED_MEMBERS else ""
        now = f"training now: {', '.join(training[:MAX_NAMED_MEMBERS])}{more}"
    if member is None:
        raise InputError(f"{shown(folder)} has no steps to trace: {now}")
    if found is None:
        raise InputError(f"{shown(folder)} has no member {member}; {now}")
    state = "has left" if found.state == "left" else f"is {found.state}"
    raise InputError(f"{member} {state}, so it has no steps to trace; {now}")


def _print_traces(folder: Path, steps: int | None, member: str | None) -> None:
    if steps is not None:
        raise InputError(f"{shown(folder)} is not running. To list its traces, leave --steps out.")
    refresh(folder, profiling.TENSORBOARD_FOLDER)
    traces = profiling.trace_folders(folder, member)
    if not traces:
        raise InputError(
            f"{shown(folder)} is not running and has no trace{f' of {member}' if member else ''}. Train with "
            "--profile, or use `tpuswarm profile` while it runs."
        )
    for trace in traces:
        print(trace)
    echo(f"to open them: {profiling.HOW_TO_OPEN.format(folder=folder / profiling.TENSORBOARD_FOLDER)}")

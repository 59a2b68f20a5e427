"""`tpuswarm profile`: a trace of a run's steps."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.runs import Run
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

LOOK = 0.2
"""Seconds between two looks at a run's files."""


def profile(
    run: Run,
    steps: Annotated[int | None, typer.Option(help="Steps in the trace. Default: 5.", show_default=False)] = None,
) -> None:
    """Trace a few steps of a running run; for one that has ended, list its traces and how to open them."""
    from tpuswarm.train.look import profile as profiling
    from tpuswarm.train.run.directory import EVENTS, holder, read_config, read_rows
    from tpuswarm.train.run.listing import find_run

    folder = Path(find_run(run))
    if "swarm" in read_config(folder):
        raise InputError(f"{folder} is a swarm; only plain runs can be traced so far")
    if steps is not None:
        check_number(steps, "--steps", least=1)
    pid = holder(folder)
    if pid is None:
        _show(folder, steps)
        return

    def told() -> list[str]:
        return [row["message"] for row in read_rows(folder / EVENTS) if row["event"] == profiling.TRACE]

    before = len(told())
    profiling.request(folder, steps or profiling.STEPS)
    say(f"asked process {pid} to trace {steps or profiling.STEPS} steps; Ctrl-C cancels", err=True)
    try:
        with waiting("waiting for the trace"):
            while len(told()) == before:
                if holder(folder) is None and len(told()) == before:
                    raise RunFailed(f"{folder} ended before the trace was taken; `tpuswarm status {folder}` says why")
                time.sleep(LOOK)
    finally:
        profiling.withdraw(folder)
    message = told()[before]
    if not message.startswith("trace of"):
        raise RunFailed(message)
    say(message)


def _show(folder: Path, steps: int | None) -> None:
    from tpuswarm.train.look.profile import HOW_TO_OPEN, traces

    if steps is not None:
        raise InputError(f"{folder} is not running, so no steps can be traced; leave --steps out to see its traces")
    found = traces(folder)
    if not found:
        raise InputError(
            f"{folder} is not running and has no trace; train with --profile, or use `tpuswarm profile` while it runs"
        )
    for trace in found:
        print(trace)
    say(f"to open them: {HOW_TO_OPEN.format(folder=folder / 'tensorboard')}")

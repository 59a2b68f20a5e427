"""Real `tpuswarm` processes, started, watched and killed by tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tpuswarm.train.run.directory import METRICS, read_rows

TIMES = ("tokens_per_s", "wait_s", "wall_s")
ONE_DEVICE = {"XLA_FLAGS": "", "JAX_PLATFORMS": ""}


def start(
    words: list[str], cwd: Path, program: list[str] | None = None, stdin: int | None = None
) -> subprocess.Popen[str]:
    """A process of the command line, in `cwd`, on the one device that a machine without accelerators has."""
    command = program or [str(Path(sys.executable).with_name("tpuswarm"))]
    return subprocess.Popen(
        [*command, *words], cwd=cwd, env={**os.environ, **ONE_DEVICE}, text=True,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What a process printed on stdout and stderr; fails unless it ends with `code`."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit {process.returncode}, not {code}:\n{out}\n{err}"
    return out, err


def run(words: list[str], cwd: Path, code: int = 0) -> tuple[str, str]:
    """Start and finish."""
    return finish(start(words, cwd), code)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Look until `condition` holds; fails if the process ends before."""
    while not condition():
        assert process.poll() is None, f"ended before its time:\n{process.communicate()}"
        time.sleep(0.005)


def updates(folder: Path) -> int:
    """How many updates a run's metrics hold."""
    return sum("loss" in row for row in read_rows(folder / METRICS))


def kill_after(process: subprocess.Popen[str], folder: Path, rows: int, number: signal.Signals) -> tuple[str, str]:
    """Signal a process once its run has so many updates; what it printed."""
    wait_for(lambda: updates(folder) >= rows, process)
    process.send_signal(number)
    return process.communicate(timeout=240)


def rows_without_times(folder: Path) -> list[dict]:
    """All rows of a run's metrics but for the clock."""
    return [{name: v for name, v in row.items() if name not in TIMES} for row in read_rows(folder / METRICS)]

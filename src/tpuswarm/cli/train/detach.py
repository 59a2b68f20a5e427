"""`train --detach`: the same command in a session of its own, which no terminal ends.

The foreground checks all that can be checked at once, starts the command, and waits until it trains. As a program, this
module is that command: what it says goes to its run's train.log, each line with its time.
"""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import typer

from tpuswarm.cli.train.train_options import Asked
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.stamped import STAMP, Stamped
from tpuswarm.train.process.stop import Interrupted, blocked, held
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import EVENTS, METRICS, Run, read_rows

LOG = "train.log"
LOOK = 0.1
"""Seconds between two looks at whether it trains."""


def detach(asked: Asked, hosts: int | None, as_json: bool) -> None:
    """Start the command that this process was given, and say how to look at it and how to stop it.

    One that ends before its first step is answered as it would be in the foreground: its words, its exit code.
    """
    if hosts is not None:
        raise InputError("--detach and --hosts exclude each other; start each host's command with nohup")
    with held():
        run = Run(asked.folder, asked.recipe.name)  # raises, naming the pid, while a living process uses it
        run.close()
    folder, began = run.folder, time.time()
    with (folder / LOG).open("ab+") as log:
        start = log.tell()
        try:
            process = _start(folder, asked.folder is None, log)
            with waiting(f"starting {asked.recipe.name} in {folder}", short=0.0):
                while process.poll() is None and not _trains(folder, began):
                    time.sleep(LOOK)
        except Interrupted as interrupted:
            if interrupted.asked != signal.SIGHUP:  # a terminal that closes is what it was detached for
                _end(process)
                _forget(run)
            raise
        if process.returncode is None:
            _tell(folder, process.pid, as_json)
            return
        log.seek(start)
        said = _unstamped(log.read())
    _forget(run)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise RunFailed(f"{folder}: its process was ended by {name} before the first step")
    say(said.rstrip("\n"), err=bool(process.returncode))
    raise typer.Exit(process.returncode)


def _start(folder: Path, new: bool, log: BinaryIO) -> "subprocess.Popen[bytes]":
    words = [each for each in sys.argv[1:] if each not in ("--detach", "--json")]
    command = [sys.executable, "-P", "-m", __name__, *words, *(["--run", str(folder)] if new else [])]
    with held(), blocked():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _trains(folder: Path, began: float) -> bool:
    """Whether the process that was started at `began` has made a step."""
    started = [row["time"] for row in read_rows(folder / EVENTS) if row["event"] == "started"]
    if not started or started[-1] < began or not (folder / METRICS).exists():
        return False
    metrics = (folder / METRICS).stat()  # cut back to what is resumed before it was started
    return metrics.st_size > 0 and metrics.st_mtime > started[-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    with held(), waiting("waiting until it has stopped"):
        process.send_signal(signal.SIGINT)
        process.wait()


def _forget(run: Run) -> None:
    """Remove the folder of a command that ended before it was a run."""
    if run.config() is None:
        (run.folder / LOG).unlink(missing_ok=True)
        run.abandon()


def _tell(folder: Path, pid: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(folder), "pid": pid}))
        return
    say(f"{folder} is training, process {pid}; it goes on when this terminal closes")
    say(f"to look at it: `tpuswarm logs -f {folder}`, `tpuswarm status {folder}`")
    say(f"to stop it: `tpuswarm stop {folder}`")


def _unstamped(log: bytes) -> str:
    return "".join(STAMP.sub("", line) for line in log.decode(errors="replace").splitlines(keepends=True))


def main() -> None:
    """The command that was detached."""
    from tpuswarm import cli

    sys.argv[0] = "tpuswarm"
    for name in ("stdout", "stderr"):
        raw = io.BufferedWriter(Stamped(getattr(sys, name).fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "replace", line_buffering=True))
    cli.main()


if __name__ == "__main__":
    main()

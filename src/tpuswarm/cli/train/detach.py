"""`train --detach`: run the same command in a new session, which survives the terminal.

The foreground checks all it can, starts the command, and waits for its first step. As a program, this module is that
command: its output goes to train.log in the run's folder, with a time on each line.
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

from tpuswarm.cli.train.train_options import TrainOptions
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.stop import Interrupted, block_signals, defer_interrupts
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.timestamps import TIMESTAMP, TimestampedFile
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import EVENTS, METRICS, Run, read_rows

LOG = "train.log"
POLL_INTERVAL_S = 0.1


def start_detached(options: TrainOptions, as_json: bool) -> None:
    """Start this process's command in the background, and print how to follow and stop it.

    If it ends before its first step, repeat its output and its exit code.
    """
    if options.hosts is not None:
        raise InputError(
            "--detach and --hosts exclude each other; start each host's command with nohup, or all with `exec --detach`"
        )
    with defer_interrupts():
        run = Run(options.folder, options.recipe.name)  # raises, with the pid, while another process uses it
        run.close()
    folder, started_at = run.folder, time.time()
    with (folder / LOG).open("ab+") as log:
        log_start = log.tell()
        try:
            process = _start_process(folder, options.folder is None, log)
            with waiting(f"starting {options.recipe.name} in {folder}", delay_s=0.0):
                while process.poll() is None and not _has_made_step(folder, started_at):
                    time.sleep(POLL_INTERVAL_S)
        except Interrupted as interrupted:
            if interrupted.signal != signal.SIGHUP:  # it survives a terminal that closes
                with defer_interrupts(), waiting("waiting until it has stopped"):
                    process.send_signal(signal.SIGINT)
                    process.wait()
                _remove_unused(run)
            raise
        if process.returncode is None:
            _print_started(folder, process.pid, as_json)
            return
        log.seek(log_start)
        lines = log.read().decode(errors="replace").splitlines(keepends=True)
        output = "".join(TIMESTAMP.sub("", line) for line in lines)
    _remove_unused(run)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise RunFailed(f"{folder}: {name} ended its process before the first step")
    echo(output.rstrip("\n"), err=bool(process.returncode))
    raise typer.Exit(process.returncode)


def _start_process(folder: Path, is_new: bool, log: BinaryIO) -> "subprocess.Popen[bytes]":
    words = [word for word in sys.argv[1:] if word not in ("--detach", "--json")]
    command = [sys.executable, "-P", "-m", __name__, *words, *(["--run", str(folder)] if is_new else [])]
    with defer_interrupts(), block_signals():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _has_made_step(folder: Path, started_at: float) -> bool:
    started = [row["time"] for row in read_rows(folder / EVENTS) if row["event"] == "started"]
    if not started or started[-1] < started_at or not (folder / METRICS).exists():
        return False
    metrics = (folder / METRICS).stat()  # a resumed run cuts it back before it starts
    return metrics.st_size > 0 and metrics.st_mtime > started[-1]


def _remove_unused(run: Run) -> None:
    if run.config() is None:
        (run.folder / LOG).unlink(missing_ok=True)
        run.abandon()


def _print_started(folder: Path, pid: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(folder), "pid": pid}))
        return
    echo(f"{folder} trains in the background, process {pid}; you may close this terminal")
    echo(f"to follow it: `tpuswarm logs -f {folder}`, `tpuswarm status {folder}`")
    echo(f"to stop it: `tpuswarm stop {folder}`")


def main() -> None:
    """Run the detached command."""
    from tpuswarm import cli

    sys.argv[0] = "tpuswarm"
    for name in ("stdout", "stderr"):
        raw = io.BufferedWriter(TimestampedFile(getattr(sys, name).fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "replace", line_buffering=True))
    cli.main()


if __name__ == "__main__":
    main()

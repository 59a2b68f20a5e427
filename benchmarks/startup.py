"""Measure how long a user waits for `--help`, the first output, an error, and the first step. 3 minutes.

Limits: 0.3 s for the help and for the first output in a terminal, 0.5 s for a wrong argument; 15 s to the first step of
`train`, and 45 s to that of the demo, a swarm of three. On a shared machine, CPU seconds are more reliable for the
short ones. The first step is the first row of metrics.jsonl. Cold: no token file and an empty compilation cache; warm:
the same command again.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Settings, Table, median, verdict

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
SHORT_COUNT, TRAINING_COUNT = 10, 3
OUTPUT_LIMIT_S, ERROR_LIMIT_S = 0.3, 0.5
TRAIN = ["train", "gpt2-tiny"]
COMMANDS = (([*TRAIN, "--run", "runs/demo"], 15.0), (["demo"], 45.0))
"""Commands that write runs/demo, and limits in seconds."""
FIRST_STEP_TIMEOUT_S = 120.0


def run(settings: Settings) -> Table:
    short, trainings = (2, 1) if settings.quick else (SHORT_COUNT, TRAINING_COUNT)
    rows = [_row("python -c pass", [_time_command([sys.executable, "-c", "pass"]) for _ in range(short)])]
    for name, limit, starts in (
        ("--help", OUTPUT_LIMIT_S, [_time_command([PROGRAM, "--help"]) for _ in range(short)]),
        ("train, first output in a terminal", OUTPUT_LIMIT_S, [_first_output([PROGRAM, *TRAIN]) for _ in range(short)]),
        (
            "train, wrong option",
            ERROR_LIMIT_S,
            [_time_command([PROGRAM, *TRAIN, "--stepz", "5"], 2) for _ in range(short)],
        ),
        (
            "train, wrong value",
            ERROR_LIMIT_S,
            [_time_command([PROGRAM, *TRAIN, "--lr", "fast"], 2) for _ in range(short)],
        ),
    ):
        rows.append(_row(f"tpuswarm {name}", starts, limit))
    for words, limit in COMMANDS:
        cold, warm = [], []
        for _ in range(trainings):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(first_step(Path(folder), words))
                warm.append(first_step(Path(folder), words))
        for name, seconds in (("cold", median(cold)), ("warm", median(warm))):
            shown_limit = (f"at most {limit:.0f}", verdict(seconds.middle <= limit))
            rows.append(
                (f"tpuswarm {' '.join(words[:2])} to its first step, {name}", seconds.show(".2f"), "", *shown_limit)
            )
    return Table(
        "Start-up",
        ("", "seconds: median (interval)", "of CPU", "limit", ""),
        rows,
        [f"the first five: {short} starts, 95% interval; the others: {trainings} starts each, cold and warm, range"],
    )


def _row(name: str, starts: list[tuple[float, float]], limit: float | None = None) -> tuple[str, ...]:
    seconds, cpu_s = (median(list(column)) for column in zip(*starts, strict=True))
    shown_limit = ("", "") if limit is None else (f"at most {limit}", verdict(seconds.middle <= limit))
    return name, seconds.show(".3f"), cpu_s.show(".3f"), *shown_limit


def _time_command(command: list[str], code: int = 0) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a command that exits with `code`."""
    start, before = time.perf_counter(), _children_cpu_s()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != code:
        raise RuntimeError(f"exit {done.returncode}, not {code}: {done.stderr}")
    return seconds, _children_cpu_s() - before


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _first_output(command: list[str]) -> tuple[float, float]:
    """Start a command in a terminal; return the seconds and CPU seconds until its first output."""
    ours, theirs = os.openpty()
    start, before = time.perf_counter(), _children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            os.read(ours, 1)
            seconds = time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    return seconds, _children_cpu_s() - before


def first_step(folder: Path, words: list[str]) -> float:
    """Start a command in `folder`; return the seconds until the first row of runs/demo."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    metrics = folder / "runs" / "demo" / "metrics.jsonl"
    environment = os.environ | {"TPUSWARM_CACHE": str(folder / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        demo = subprocess.Popen([PROGRAM, *words], cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if demo.poll() is not None or time.perf_counter() - start > FIRST_STEP_TIMEOUT_S:
                    raise RuntimeError(f"it made no step: {(folder / 'output.txt').read_text()[-500:]}")
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            demo.terminate()
            demo.wait(FIRST_STEP_TIMEOUT_S)

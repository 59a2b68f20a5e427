"""How long a person waits: for `--help`, for the first word, for a wrong one's answer, for the first step. 3 minutes.

Limits: 0.3 s for the help and for the first output in a terminal, 0.5 s for the answer to a wrong argument; 15 s to the
first step of `train`, and 45 s to that of the demo, which is a swarm of three. On a machine that others use, seconds of
CPU say more of the short ones than those of a clock. The first step is there when the run's
metrics.jsonl has its first row; the command is then ended with SIGTERM. Cold: no token file and nothing in the
compilation cache; warm: the same command again.
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
HELPS, DEMOS = 10, 3
FIRST_LIMIT, WRONG_LIMIT = 0.3, 0.5
TRAIN = ["train", "gpt2-tiny"]
COMMANDS = (([*TRAIN, "--run", "runs/demo"], 15.0), (["demo"], 45.0))
"""What is started, and its limit; both leave runs/demo."""
PATIENCE = 120.0


def run(settings: Settings) -> Table:
    """Every command as a person would start it, in a folder of its own."""
    helps, demos = (2, 1) if settings.quick else (HELPS, DEMOS)
    rows = [_row("python -c pass", [taken([sys.executable, "-c", "pass"]) for _ in range(helps)])]
    for name, limit, starts in (
        ("--help", FIRST_LIMIT, [taken([PROGRAM, "--help"]) for _ in range(helps)]),
        ("train, first output in a terminal", FIRST_LIMIT, [_first_output([PROGRAM, *TRAIN]) for _ in range(helps)]),
        ("train, wrong option", WRONG_LIMIT, [taken([PROGRAM, *TRAIN, "--stepz", "5"], 2) for _ in range(helps)]),
        ("train, wrong value", WRONG_LIMIT, [taken([PROGRAM, *TRAIN, "--lr", "fast"], 2) for _ in range(helps)]),
    ):
        rows.append(_row(f"tpuswarm {name}", starts, limit))
    for words, limit in COMMANDS:
        cold, warm = [], []
        for _ in range(demos):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(first_step(Path(folder), words))
                warm.append(first_step(Path(folder), words))
        for name, found in (("cold", median(cold)), ("warm", median(warm))):
            shown_limit = (f"at most {limit:.0f}", verdict(found.middle <= limit))
            rows.append(
                (f"tpuswarm {' '.join(words[:2])} to its first step, {name}", found.show(".2f"), "", *shown_limit)
            )
    return Table(
        "Start-up",
        ("", "seconds: median (interval)", "of CPU", "limit", ""),
        rows,
        [f"{helps} starts of each of the first five, 95% interval; {demos} of the others, cold and warm, range"],
    )


def _row(name: str, taken: list[tuple[float, float]], limit: float | None = None) -> tuple[str, ...]:
    """taken: seconds of the clock and of CPU, of each start."""
    found, worked = (median(list(each)) for each in zip(*taken, strict=True))
    judged = ("", "") if limit is None else (f"at most {limit}", verdict(found.middle <= limit))
    return name, found.show(".3f"), worked.show(".3f"), *judged


def taken(command: list[str], code: int = 0, folder: Path | None = None) -> tuple[float, float]:
    """Seconds of the clock and of CPU of a command that ends with that code."""
    start, before = time.perf_counter(), _cpu()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    taken = time.perf_counter() - start
    if done.returncode != code:
        raise RuntimeError(f"exit {done.returncode}, not {code}: {done.stderr}")
    return taken, _cpu() - before


def _cpu() -> float:
    """Seconds of CPU of all processes of this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _first_output(command: list[str]) -> tuple[float, float]:
    """From the start of a command in a terminal until it writes something; it is ended then."""
    ours, theirs = os.openpty()
    start, before = time.perf_counter(), _cpu()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            os.read(ours, 1)
            taken = time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    return taken, _cpu() - before


def first_step(folder: Path, words: list[str]) -> float:
    """Seconds from the start of a command in `folder` to the first row of runs/demo; it is ended then."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    metrics = folder / "runs" / "demo" / "metrics.jsonl"
    environment = os.environ | {"TPUSWARM_CACHE": str(folder / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        demo = subprocess.Popen([PROGRAM, *words], cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if demo.poll() is not None or time.perf_counter() - start > PATIENCE:
                    raise RuntimeError(f"it made no step: {(folder / 'output.txt').read_text()[-500:]}")
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            demo.terminate()
            demo.wait(PATIENCE)

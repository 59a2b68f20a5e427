"""Measure `tpuswarm plan` for GPT-2 124M on seven generations of TPU, and print its results for all four sizes.

Limits, on 2 cores: 4 minutes with a batch, 12 with the largest micro-batch, 2 s from the cache, 6 GiB in all. Memory is
the PSS of all processes, read every 3 s. The TPU compiler computes the tables; no TPU is used. About 70 minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Settings, Skipped, Table, verdict
from tpuswarm.config.units import GIB
from tpuswarm.plan.compile.pool import no_compiler

BATCH = "64"
LIMITS = {"with a batch": 240.0, "largest micro-batch": 720.0, "the same again": 2.0}
MAX_MEMORY_GIB = 6.0
MEMORY_POLL_INTERVAL_S = 3.0
"""A reading takes the kernel some 50 ms."""
SIZES = ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m")


def run(settings: Settings) -> Iterator[Table]:
    if reason := no_compiler():
        raise Skipped(reason)
    sizes = ("gpt2-tiny",) if settings.quick else SIZES
    on = ["--on", "v5e-1", "--context", "1024"] if settings.quick else []
    with tempfile.TemporaryDirectory() as cache:
        arguments = {"with a batch": ["--batch", BATCH], "largest micro-batch": [], "the same again": []}
        took = {name: _plan([sizes[0], *on, *words], cache) for name, words in arguments.items()}
        yield Table(
            f"{sizes[0]} on {len(took['with a batch'][0])} slices",
            ("", "seconds", "limit", "", "memory at most, GiB", "limit", "", "compilations"),
            [
                (
                    name,
                    f"{seconds:.1f}",
                    f"{LIMITS[name]:.0f}",
                    verdict(seconds <= LIMITS[name]),
                    f"{memory / GIB:.1f}",
                    f"{MAX_MEMORY_GIB:.0f}",
                    verdict(memory <= MAX_MEMORY_GIB * GIB),
                    "–" if name == "the same again" else str(sum(row["compilations"] for row in rows)),
                )
                for name, (rows, seconds, memory) in took.items()
            ],
        )
        for name in ("with a batch", "largest micro-batch"):
            found = {size: _plan([size, *on, *arguments[name]], cache)[0] for size in sizes}
            yield _sizes(name, found)


def _sizes(name: str, found: dict[str, list[dict[str, Any]]]) -> Table:
    slices = [f"{row['accelerator']} of {row['hbm_bytes'] / GIB:.2f}" for row in next(iter(found.values()))]
    title = f"batch {BATCH}" if name == "with a batch" else "the largest micro-batch"
    return Table(
        f"Memory of one device in GiB, context 1024, {title}",
        ("", *slices),
        [(size, *(cell(row) for row in rows)) for size, rows in found.items()],
        [
            "sharding of the state, layers recomputed (remat), micro-batches x rows of each per device, GiB used; "
            "all by the TPU compiler",
        ],
    )  # fmt: skip


def cell(row: dict[str, Any]) -> str:
    """Describe a row of the plan: layout and memory of one device."""
    if row["fits"] is not True:
        return "does not fit" if row["fits"] is False else str(row["problem"])
    remat = "" if row["remat"] == "none" else f", {row['remat']}"
    return f"{row['sharding']}{remat}, {row['micro_batches']} x {row['micro_batch']}: {row['hbm_used_bytes'] / GIB:.2f}"


def _plan(words: list[str], cache: str) -> tuple[list[dict[str, Any]], float, int]:
    """Return rows, seconds, and the peak memory in bytes."""
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words, "--json"]
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=os.environ | {"TPUSWARM_CACHE": cache})
        last_poll = 0.0
        while process.poll() is None:
            time.sleep(0.02)
            if time.perf_counter() - last_poll > MEMORY_POLL_INTERVAL_S:
                last_poll = time.perf_counter()
                peak = max(peak, _memory(process.pid))
        seconds = time.perf_counter() - start
        for file in (out, errors):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read()[-2000:]}")
        return json.loads(out.read())["rows"], seconds, peak


def _memory(root: int) -> int:
    """Return the bytes of a process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    ours = {root}
    while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
        ours |= more
    total = 0
    for pid in ours:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total

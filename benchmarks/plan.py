"""What `tpuswarm plan` takes for GPT-2 124M on seven generations of TPU, and what it finds for all four sizes.

Limits, on 2 cores: 4 minutes with a batch, 12 with the largest micro-batch, 2 s once it is known, 6 GiB in all. Memory
is the sum over all processes of what is theirs, pages they share divided among them (PSS), looked at every 3 s. The
tables of sizes are what the TPU compiler says; no TPU is needed or used. About 70 minutes.
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
from tpuswarm.plan.compile_pool import no_compiler

BATCH = "64"
LIMITS = {"with a batch": 240.0, "largest micro-batch": 720.0, "the same again": 2.0}
MEMORY = 6.0
LOOK = 3.0
"""Seconds between two looks at the memory: each takes the kernel some 50 ms."""
SIZES = ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m")


def run(settings: Settings) -> Iterator[Table]:
    """The times, then a table for each way to ask."""
    if reason := no_compiler():
        raise Skipped(reason)
    sizes = ("gpt2-tiny",) if settings.quick else SIZES
    on = ["--on", "v5e-1", "--context", "1024"] if settings.quick else []
    with tempfile.TemporaryDirectory() as cache:
        asked = {"with a batch": ["--batch", BATCH], "largest micro-batch": [], "the same again": []}
        took = {name: _plan([sizes[0], *on, *words], cache) for name, words in asked.items()}
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
                    f"{MEMORY:.0f}",
                    verdict(memory <= MEMORY * GIB),
                    "–" if name == "the same again" else str(sum(row["compilations"] for row in rows)),
                )
                for name, (rows, seconds, memory) in took.items()
            ],
        )
        for name in ("with a batch", "largest micro-batch"):
            found = {size: _plan([size, *on, *asked[name]], cache)[0] for size in sizes}
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
    """How a row of plan runs, and what it needs of one device."""
    if row["fits"] is not True:
        return "does not fit" if row["fits"] is False else str(row["problem"])
    remat = "" if row["remat"] == "none" else f", {row['remat']}"
    return f"{row['sharding']}{remat}, {row['micro_batches']} x {row['micro_batch']}: {row['hbm_used_bytes'] / GIB:.2f}"


def _plan(words: list[str], cache: str) -> tuple[list[dict[str, Any]], float, int]:
    """Rows, seconds, and bytes of memory at the worst moment."""
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words, "--json"]
    start, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=out, stderr=said, env=os.environ | {"TPUSWARM_CACHE": cache})
        seen = 0.0
        while process.poll() is None:
            time.sleep(0.02)
            if time.perf_counter() - seen > LOOK:
                seen = time.perf_counter()
                most = max(most, _memory(process.pid))
        seconds = time.perf_counter() - start
        for file in (out, said):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {said.read()[-2000:]}")
        return json.loads(out.read())["rows"], seconds, most


def _memory(root: int) -> int:
    """Bytes of a process and of all under it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
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

"""Measure how fast a shard merges four contributions of 124 M and of 1.5 B parameters. 10 minutes, 40 GB of disk.

A merge reads payloads and the previous version, checks digests, sums, writes the next version, and calls fsync. The
same rounds measure memcpy of as many bytes, and for 124 M a gloo all-reduce of four float32 vectors on loopback, which
is not durable. With 1.5 B parameters the page cache is dropped before each merge.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Settings, Skipped, Table, median
from benchmarks.torch_speed import torch_python
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, initial_state
from tpuswarm.swarm.core.arithmetic.quantize import BITS, encode
from tpuswarm.swarm.core.messages import Merge, ShardResult
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Form, Header, Identity, Incarnation, Record
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.effects import RunBlocking
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name
from tpuswarm.swarm.storage.store import Store

CONTRIBUTION_COUNT, FRAGMENT_COUNT = 4, 8
SMALL_SIZE, LARGE_SIZE = 124_475_904, 1_557_611_200
"""Parameters of gpt2-124m and gpt2-1558m with padded vocabularies."""
ROUND_COUNT, LARGE_ROUND_COUNT = 6, 3
COPY_BLOCK_BYTES = 2**28


@dataclass(frozen=True)
class Case:
    name: str
    parameters: int
    form: Form
    outer: OuterRule
    cold: bool
    members: int = CONTRIBUTION_COUNT


def run(settings: Settings) -> Table:
    small, large = (2**20, 2**22) if settings.quick else (SMALL_SIZE, LARGE_SIZE)
    cases = [
        Case("124 M, f32, average", small, "plain", OuterRule("average"), cold=False),
        Case("124 M, int8 up, average", small, "int8", OuterRule("average"), cold=False),
        Case("124 M, int8 up and down, Nesterov", small, "int8", OuterRule("nesterov", downlink="int8"), cold=False),
        Case("1.5 B, int8 up, average, from disk", large, "int8", OuterRule("average"), cold=True),
    ]
    rows: list[tuple[str, ...]] = []
    notes = [
        f"one shard of {FRAGMENT_COUNT} fragments on {os.cpu_count()} cores; digests of all data; fsync",
        f"{ROUND_COUNT} rounds of 124 M and {LARGE_ROUND_COUNT} of 1.5 B after a warm-up; memcpy: one core, in memory",
        "all-reduce: one float32 vector a process, bytes of all four",
    ]
    for case in cases:
        try:
            rows.append(_row(case, 1 if settings.quick else LARGE_ROUND_COUNT if case.cold else ROUND_COUNT))
        except Skipped as reason:
            notes.append(f"{case.name}: skipped: {reason}")
    try:
        took = all_reduce(small, 2 if settings.quick else ROUND_COUNT)
        size = 4 * CONTRIBUTION_COUNT * small
        speed = median([size / seconds / 1e9 for seconds in took])
        shown = median(took).show(".2f"), speed.show(".2f")
        rows.append(("124 M, f32, gloo all-reduce", f"{size / 1e9:.1f}", *shown, ""))
    except Skipped as reason:
        notes.append(f"all-reduce: skipped: {reason}")
    return Table(
        "Merging four pushes",
        ("", "GB read + written", "s: median (interval)", "GB/s", "memcpy of as many bytes, GB/s"),
        rows,
        notes,
    )


def _row(case: Case, rounds: int) -> tuple[str, ...]:
    with room_for(case) as folder:
        prepared = Run(folder, case)
        merges, copies = [], []
        for number in range(-1, rounds):
            seconds = prepared.merge(), memcpy(prepared.bytes)
            if number >= 0:
                merges.append(seconds[0])
                copies.append(seconds[1])
    return (
        case.name,
        f"{prepared.read / 1e9:.1f} + {prepared.written / 1e9:.1f}",
        median(merges).show(".2f"),
        median([prepared.bytes / s / 1e9 for s in merges]).show(".2f"),
        median([prepared.bytes / s / 1e9 for s in copies]).show(".1f"),
    )


class Run:
    """A run at version 0 with a contribution from each member."""

    def __init__(self, folder: Path, case: Case):
        self._store, self._case = Store(folder), case
        ledger, objects = Ledger(self._store), Objects(self._store)
        share = case.parameters // FRAGMENT_COUNT // 256 * 256
        sizes = [share] * (FRAGMENT_COUNT - 1) + [case.parameters - share * (FRAGMENT_COUNT - 1)]
        numbers = np.random.default_rng(0)
        identities = [Identity(Incarnation(f"m{n}", f"{n:032x}"), 1) for n in range(case.members)]
        state: list[str] = []
        outer: list[str] = []
        digests: list[list[str]] = [[] for _ in identities]
        for fragment, size in enumerate(sizes):
            theta = numbers.standard_normal(size, np.float32)
            state.append(objects.put_array(theta))
            if (first := initial_state(case.outer, theta)) is not None:
                outer.append(objects.put_array(first + np.float32(1e-3)))
            for identity, own in zip(identities, digests, strict=True):
                delta = numbers.standard_normal(size, np.float32)
                delta *= np.float32(1e-2)
                payload = {"s": theta - delta}
                if case.form != "plain":
                    payload = dict(zip(("codes", "scales"), encode(delta, BITS[case.form]), strict=True))
                own.append(objects.put_payload(identity, fragment, payload))
        known = Digests("layout", "config", "data", "code")
        self._genesis = Record(
            run="run", version=0, epoch=1, parent="", state=tuple(state), outer=tuple(outer), decisions=(),
            rule=case.outer.rule, rate=0.0, momentum=case.outer.momentum, share=0.0, gathered=0.0, tokens=0,
            changes=0, processed=(), digests=known, time=0.0, downlink=case.outer.downlink,
        )  # fmt: skip
        ledger.append(self._genesis)
        decisions = []
        for number, (identity, own) in enumerate(zip(identities, digests, strict=True)):
            rows = Rows.from_ranges((number, number + 1))
            ledger.create_header(Header(identity, "run", 0, rows, 1, 1, case.form, 1.0, True, tuple(own)))
            decisions.append(Decision(identity, "applied", "", rows, 0, 1, 1 / case.members))
        self._merge = Merge(1, tuple(decisions), case.outer, 0.6, 1.0, 0.0, None, "")
        self._aggregator = Aggregator(ledger, objects, sizes, 0, 1)
        self._stored = set(self._store.names(""))
        payloads = [payload_name(identity, fragment) for identity in identities for fragment in range(FRAGMENT_COUNT)]
        self.read = self._size([object_name(digest) for digest in self._genesis.objects] + payloads)
        self.written = 0
        os.sync()

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def merge(self) -> float:
        """Merge, delete the result, and return the seconds."""
        if self._case.cold:
            for name in self._stored:
                with self._path(name).open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        effect = next(self._aggregator.merge(self._genesis, self._merge))
        assert isinstance(effect, RunBlocking)
        part = effect.action()
        seconds = time.perf_counter() - start
        assert isinstance(part, ShardResult)
        new = set(self._store.names("")) - self._stored
        self.written = self._size(new)
        for name in new:
            self._store.delete(name)
        return seconds

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._path(name).stat().st_size for name in names)

    def _path(self, name: str) -> Path:
        path = self._store.path(name)
        assert path is not None
        return path


def memcpy(size: int) -> float:
    """Return the seconds to copy `size` bytes in memory with one core."""
    source, target = np.ones(COPY_BLOCK_BYTES, np.uint8), np.ones(COPY_BLOCK_BYTES, np.uint8)
    start = time.perf_counter()
    for begin in range(0, size, COPY_BLOCK_BYTES):
        count = min(COPY_BLOCK_BYTES, size - begin)
        np.copyto(target[:count], source[:count])
    return time.perf_counter() - start


def all_reduce(parameters: int, rounds: int) -> list[float]:
    """Return the seconds of each all-reduce of a float32 vector among four processes."""
    python = torch_python("cpu")
    script = Path(__file__).with_name("torch_reduce.py")
    port = random.randrange(20_000, 60_000)
    arguments = [str(CONTRIBUTION_COUNT), str(parameters), str(rounds), str(port)]
    processes = [
        subprocess.Popen([python, script, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(CONTRIBUTION_COUNT)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise Skipped("torch.distributed with gloo does not work")
    return list(json.loads(outputs[0]))


@contextmanager
def room_for(case: Case) -> Iterator[Path]:
    """Yield a folder for a case. Raises Skipped if the disk is too small."""
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        needed = (10 + 4 * case.members) * case.parameters
        if free < needed:
            raise Skipped(f"{folder} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} are needed")
        print(f"{case.name}: making contributions …", file=sys.stderr)
        yield Path(folder)

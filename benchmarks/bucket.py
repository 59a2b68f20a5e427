"""What a version costs a bucket: requests, bytes and seconds with 4, 16 and 64 members, at 50 ms a request. A minute.

The coordinator's state machine, its ledger and the shards are the product's; the bucket is the memory of this process
and answers after 50 ms. Members push at once, as the nodes of the engine let them. The model has 2 MiB: the time that
bytes take on a line is not in it.
"""

import os
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_store import Memory
from benchmarks.report import Settings, Table
from tpuswarm.swarm.core.arithmetic.outer import Outer, first_state
from tpuswarm.swarm.core.books import Member, beat, granted, header, snapshot, trained
from tpuswarm.swarm.core.messages import Accepted, Granted, Terms
from tpuswarm.swarm.core.values import Digests, Incarnation, Record
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Do, Together
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.places import Copied
from tpuswarm.swarm.storage.store import Store

MEMBERS = (4, 16, 64)
FRAGMENTS, ELEMENTS = 8, 2**16
SECONDS = 0.05
"""Of a request."""
PER_SHARD = 16
"""Members for each aggregator, as the product has them."""


class Slow(Memory):
    """A bucket that takes its time, and counts."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds, self._counting = seconds, threading.Lock()
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _count(self, name: str, size: int) -> None:
        time.sleep(self._seconds)
        with self._counting:
            self.asked[name.partition("/")[0]] += 1
            self.sent[name.partition("/")[0]] += size

    def create(self, name: str, data: Any) -> bool:
        """Counted."""
        self._count(name, len(data) if isinstance(data, bytes) else sum(map(len, data)))
        return super().create(name, data)

    def put(self, name: str, data: Any) -> None:
        """Counted."""
        self._count(name, len(data) if isinstance(data, bytes) else sum(map(len, data)))
        super().put(name, data)

    def put_file(self, name: str, part: Path) -> None:
        """Counted."""
        self._count(name, part.stat().st_size)
        super().put_file(name, part)

    def fetch(self, name: str, to: Path) -> None:
        """Counted: a copy was not there."""
        self._count(f"read of {name}", 0)
        super().fetch(name, to)


def _carried(process: Any, shards: list[Aggregator]) -> Any:
    """What a process returns, its effects carried out; calls are to shards, which work together."""
    answer: Any = None
    while True:
        try:
            effect = process.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Do):
            answer = effect.action()
        elif isinstance(effect, Together):
            with ThreadPoolExecutor(len(effect.calls)) as pool:
                answer = tuple(pool.map(lambda call: _shard(call, shards), effect.calls))
        else:
            answer = None  # it would sleep


def _shard(call: Call, shards: list[Aggregator]) -> Any:
    return _carried(getattr(shards[int(call.address)], call.method)(*call.arguments), shards)


def version(members: int, folder: Path, seconds: float) -> tuple[Slow, float, float]:
    """The bucket after one version of so many members, seconds of the slowest push, and of the commit."""
    back = Slow(0.0)
    store = Store(folder)
    store._back = Copied(back, folder)  # type: ignore[arg-type]
    ledger, objects, outer = Ledger(store), Objects(store), Outer("nesterov")
    zero = np.zeros(ELEMENTS, np.float32)
    first = first_state(outer, zero)
    assert first is not None
    state, momentum = (objects.put_array(each) for each in (zero, first))
    names = tuple(f"m{number}" for number in range(members))
    terms = Terms("run", Digests("l", "c", "d", "k"), 1, 1, 1_000_000, 1, names, outer)
    ledger.append(
        Record(
            run="run", version=0, epoch=1, parent="", state=(state,) * FRAGMENTS, outer=(momentum,) * FRAGMENTS,
            decisions=(), rule="nesterov", rate=0.7, momentum=0.9, share=1.0, gathered=0.0, tokens=0, changes=0,
            processed=(), digests=terms.digests, time=0.0,
        )
    )  # fmt: skip
    number = -(-members // PER_SHARD)
    shards = [Aggregator(ledger, objects, (ELEMENTS,) * FRAGMENTS, index, number) for index in range(number)]
    ticks = count()
    addresses = [str(each) for each in range(number)]
    coordinator = Coordinator(ledger, addresses, lambda: float(next(ticks)) / 1e6, time.time)
    _carried(coordinator.open(terms, founded=True), shards)
    pushing = []
    for name in names:
        books = Member(terms, "plain", True, Incarnation(name, uuid.uuid4().hex), 0, 0)
        reply = coordinator.beat(beat(books, None))
        assert isinstance(reply, Granted)
        books = granted(books, reply, 0)
        books = snapshot(trained(books, books.next_rows))
        pushing.append(books)
    rng = np.random.default_rng(0)
    payloads = [{"s": rng.standard_normal(ELEMENTS, np.float32)} for _ in range(FRAGMENTS)]
    digests = tuple(map(tensors.digest, payloads))
    back._seconds = seconds
    back.asked.clear()
    back.sent.clear()

    def push(books: Member) -> float:
        began = time.monotonic()
        books, made = header(books, 1.0, True, digests)
        for fragment, payload in enumerate(payloads):
            shard = shards[fragment % number]
            _carried(shard.put(made.identity, fragment, payload, digests[fragment]), shards)
        with order:
            process = coordinator.push(made)
            effect = process.send(None)
        assert isinstance(effect, Do)
        done = effect.action()  # beside those of the other members
        with order:
            try:
                process.send(done)
            except StopIteration as end:
                assert isinstance(end.value, Accepted)
        return time.monotonic() - began

    order = threading.Lock()
    with ThreadPoolExecutor(members) as pool:
        slowest = max(pool.map(push, pushing))
    began = time.monotonic()
    run = coordinator.run()
    effect = run.send(None)
    while coordinator.state.view.version == 0:
        if isinstance(effect, Together):
            with ThreadPoolExecutor(len(effect.calls)) as pool:
                effect = run.send(tuple(pool.map(lambda call: _shard(call, shards), effect.calls)))
        else:
            effect = run.send(effect.action() if isinstance(effect, Do) else None)
    return back, slowest, time.monotonic() - began


SPEED_UP, RUN_S = 60, 30
"""The intervals of a plain run are so much shorter while its requests are counted for so long."""


def plain_run(seconds: float) -> Table:
    """Requests an hour of a run whose metrics grow all the time."""
    from tests.swarm.bucket import bucket
    from tests.train.storage.conftest import URL

    from tpuswarm.train.run.directory import Run
    from tpuswarm.train.storage import record, sync
    from tpuswarm.train.storage.folders import folder_of

    intervals = record.RENEW_INTERVAL_S, sync.UPLOAD_INTERVAL_S
    with tempfile.TemporaryDirectory() as name, bucket("bucket", Path(name)) as server:
        os.environ |= {"TPUSWARM_CACHE": name, "STORAGE_EMULATOR_HOST": server.endpoint}
        vars(sync)["RENEW_INTERVAL_S"], sync.UPLOAD_INTERVAL_S = (each / SPEED_UP for each in intervals)
        run = Run(folder_of(URL))
        run.write_config({})
        time.sleep(1)  # what its start asks for
        first, end = len(server.requests), time.monotonic() + seconds
        while time.monotonic() < end:
            run.write_metrics({"step": 1, "loss": 1.0})
            time.sleep(0.02)
        made = Counter(request.partition(" ")[0] for request in server.requests[first:])
        run.close()
    hours = seconds * SPEED_UP / 3600
    rows = [
        ("writing (class A)", f"{(made['POST'] + made['PUT']) / hours:.0f}"),
        ("reading (class B)", f"{made['GET'] / hours:.0f}"),
        ("deleting (free)", f"{made['DELETE'] / hours:.0f}"),
    ]
    note = f"renewed every {intervals[0]:.0f} s, uploaded every {intervals[1]:.0f} s; counted {SPEED_UP} times as fast"
    return Table("Requests of a plain run, an hour", ("", "requests"), rows, [note])


def run(settings: Settings) -> Iterator[Table]:
    """One version of each number of members, and a plain run."""
    yield plain_run(3 if settings.quick else RUN_S)
    found: dict[int, tuple[Slow, float, float]] = {}
    at_once: dict[int, tuple[Slow, float, float]] = {}
    for members in (2, 4) if settings.quick else MEMBERS:
        for made, seconds in ((found, SECONDS), (at_once, 0.0)):
            with tempfile.TemporaryDirectory() as name:
                made[members] = version(members, Path(name) / "run", seconds)
    size = FRAGMENTS * ELEMENTS * 4
    rows: list[tuple[str, Callable[[int, Slow, float, float], str]]] = [
        ("a member's requests: payloads, header", lambda n, each, *_: _each(each, n, "payloads", "headers")),
        ("a member's bytes, of the model's", lambda n, each, *_: f"{each.sent['payloads'] / n / size:.2f}"),
        ("the slowest push, s", lambda n, each, push, commit: f"{push:.2f}"),
        ("with a bucket that answers at once, s", lambda n, *_: f"{at_once[n][1]:.2f}"),
        ("the commit's requests: objects, record", lambda n, each, *_: _each(each, 1, "objects", "commits")),
        ("its bytes, of the model's", lambda n, each, *_: f"{each.sent['objects'] / size:.2f}"),
        ("its record and all headers, KB", lambda n, each, *_: _small(each)),
        ("the commit, s", lambda n, each, push, commit: f"{commit:.2f}"),
        ("with a bucket that answers at once, s", lambda n, *_: f"{at_once[n][2]:.2f}"),
        ("reads", lambda n, each, *_: str(sum(v for k, v in each.asked.items() if k.startswith("read")))),
    ]
    yield Table(
        "Requests of a version",
        ("members", *map(str, found)),
        [(name, *(show(members, *each) for members, each in found.items())) for name, show in rows],
        [f"{FRAGMENTS} fragments, plain, nesterov; {SECONDS * 1e3:.0f} ms a request; an aggregator for {PER_SHARD}"],
    )


def _each(bucket: Slow, members: int, *kinds: str) -> str:
    return ", ".join(f"{bucket.asked[kind] / members:g}" for kind in kinds)


def _small(bucket: Slow) -> str:
    return f"{(bucket.sent['commits'] + bucket.sent['headers']) / 1e3:,.0f}"

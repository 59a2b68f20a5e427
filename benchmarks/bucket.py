"""Count requests to a bucket by swarms, a plain run and a fleet's keepers. Two minutes.

A swarm's bucket is in memory and answers after 50 ms; all members push at once. It has the fragments of GPT-2 124M, but
small ones, so that transfer times do not count. A plain run and keepers use the local cloud's bucket.
"""

import os
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.swarm.memory_store import Memory

from benchmarks.report import Settings, Table
from tpuswarm.swarm.core.arithmetic.fragments import fragments_for
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, initial_state
from tpuswarm.swarm.core.member_state import (
    MemberState,
    after_grant,
    after_snapshot,
    after_step,
    finish_push,
    make_heartbeat,
)
from tpuswarm.swarm.core.messages import Accepted, Granted, Terms
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Parallel, RunBlocking
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.places import Copied
from tpuswarm.swarm.storage.store import Store

MEMBER_COUNTS = (4, 16, 32, 64)
MODEL_BYTES, FRAGMENT_SIZE = 4 * 124_439_808, 2**16
REQUEST_S = 0.05
MEMBERS_PER_SHARD = 16
"""As in the product."""


class SlowBucket(Memory):
    """A bucket that takes a time for each request and counts requests and bytes by folder."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds, self._counting = seconds, threading.Lock()
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _count(self, name: str, size: int) -> None:
        time.sleep(self._seconds)
        with self._counting:
            self.requests[name.partition("/")[0]] += 1
            self.sent[name.partition("/")[0]] += size

    def create(self, name: str, data: Any) -> bool:
        self._count(name, len(data) if isinstance(data, bytes) else sum(map(len, data)))
        return super().create(name, data)

    def put(self, name: str, data: Any) -> None:
        self._count(name, len(data) if isinstance(data, bytes) else sum(map(len, data)))
        super().put(name, data)

    def put_file(self, name: str, part: Path) -> None:
        self._count(name, part.stat().st_size)
        super().put_file(name, part)

    def fetch(self, name: str, to: Path) -> None:
        self._count(f"read of {name}", 0)
        super().fetch(name, to)


def _run_effects(process: Any, shards: list[Aggregator]) -> Any:
    """Run a process and its calls to shards; return its result."""
    answer: Any = None
    while True:
        try:
            effect = process.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, RunBlocking):
            answer = effect.action()
        elif isinstance(effect, Parallel):
            with ThreadPoolExecutor(len(effect.calls)) as pool:
                answer = tuple(pool.map(lambda call: _call_shard(call, shards), effect.calls))
        else:
            answer = None  # instead of sleeping


def _call_shard(call: Call, shards: list[Aggregator]) -> Any:
    return _run_effects(getattr(shards[int(call.address)], call.method)(*call.arguments), shards)


def commit_version(members: int, folder: Path, seconds: float) -> tuple[SlowBucket, float, float]:
    """Commit one version; return the bucket and the seconds of the slowest push and of the commit."""
    bucket = SlowBucket(0.0)
    fragments = fragments_for(MODEL_BYTES, members)
    store = Store(folder)
    store._back = Copied(bucket, folder)  # type: ignore[arg-type]
    ledger, objects, outer = Ledger(store), Objects(store), OuterRule("nesterov")
    zero = np.zeros(FRAGMENT_SIZE, np.float32)
    first = initial_state(outer, zero)
    assert first is not None
    state, momentum = (objects.put_array(array) for array in (zero, first))
    names = tuple(f"m{number}" for number in range(members))
    terms = Terms("run", Digests("l", "c", "d", "k"), 1, 1, 1_000_000, 1, names, outer)
    ledger.append(replace(genesis(terms, 0), state=(state,) * fragments, outer=(momentum,) * fragments))
    number = -(-members // MEMBERS_PER_SHARD)
    shards = [Aggregator(ledger, objects, (FRAGMENT_SIZE,) * fragments, index, number) for index in range(number)]
    ticks = count()
    addresses = [str(index) for index in range(number)]
    coordinator = Coordinator(ledger, addresses, lambda: float(next(ticks)) / 1e6, time.time)
    _run_effects(coordinator.open(terms, founded=True), shards)
    pushing = []
    for name in names:
        member = MemberState(terms, "plain", True, Incarnation(name, uuid.uuid4().hex), 0, 0)
        reply = coordinator.beat(make_heartbeat(member, None))
        assert isinstance(reply, Granted)
        member = after_grant(member, reply, 0)
        member = after_snapshot(after_step(member, member.next_rows))
        pushing.append(member)
    rng = np.random.default_rng(0)
    payloads = [{"s": rng.standard_normal(FRAGMENT_SIZE, np.float32)} for _ in range(fragments)]
    digests = tuple(map(tensors.digest, payloads))
    bucket._seconds = seconds
    bucket.requests.clear()
    bucket.sent.clear()

    def push(member: MemberState) -> float:
        start = time.monotonic()
        member, header = finish_push(member, 1.0, True, digests)
        for fragment, payload in enumerate(payloads):
            shard = shards[fragment % number]
            _run_effects(shard.put(header.identity, fragment, payload, digests[fragment]), shards)
        with order:
            process = coordinator.push(header)
            effect = process.send(None)
        assert isinstance(effect, RunBlocking)
        done = effect.action()  # concurrent with other members
        with order:
            try:
                process.send(done)
            except StopIteration as end:
                assert isinstance(end.value, Accepted)
        return time.monotonic() - start

    order = threading.Lock()
    with ThreadPoolExecutor(members) as pool:
        slowest = max(pool.map(push, pushing))
    start = time.monotonic()
    run = coordinator.run()
    effect = run.send(None)
    while coordinator.state.view.version == 0:
        if isinstance(effect, Parallel):
            with ThreadPoolExecutor(len(effect.calls)) as pool:
                effect = run.send(tuple(pool.map(lambda call: _call_shard(call, shards), effect.calls)))
        else:
            effect = run.send(effect.action() if isinstance(effect, RunBlocking) else None)
    return bucket, slowest, time.monotonic() - start


SPEED_UP_FACTOR = 60
"""Shortens the intervals of a plain run."""
RUN_S, KEEPER_S = 30, 3600


@contextmanager
def counted(requests: list[str]) -> Iterator[Counter[str]]:
    """Count requests by their class while the block runs."""
    found: Counter[str] = Counter()
    first = len(requests)
    yield found
    for request in requests[first:]:
        method, path = request.split(" ")
        is_listing = method == "GET" and path.endswith("/o")
        found["A" if is_listing or method in ("POST", "PUT") else "B" if method == "GET" else "free"] += 1


def plain_run(seconds: float) -> tuple[float, float]:
    """Return the requests of class A and B in an hour of a run that always writes metrics."""
    from tests.swarm.bucket import bucket
    from tests.train.storage.conftest import URL

    from tpuswarm.train.run.directory import Run
    from tpuswarm.train.storage import record, sync
    from tpuswarm.train.storage.folders import copy_folder

    intervals = record.RENEW_INTERVAL_S, sync.UPLOAD_INTERVAL_S
    with tempfile.TemporaryDirectory() as name, bucket("bucket", Path(name)) as server:
        os.environ |= {"TPUSWARM_CACHE": name, "STORAGE_EMULATOR_HOST": server.endpoint}
        vars(sync)["RENEW_INTERVAL_S"], sync.UPLOAD_INTERVAL_S = (interval / SPEED_UP_FACTOR for interval in intervals)
        run = Run(copy_folder(URL))
        run.write_config({})
        time.sleep(1)  # the requests of its start
        end = time.monotonic() + seconds
        with counted(server.requests) as made:
            while time.monotonic() < end:
                run.write_metrics({"step": 1, "loss": 1.0})
                time.sleep(0.02)
        run.close()
    hours = seconds * SPEED_UP_FACTOR / 3600
    return made["A"] / hours, made["B"] / hours


def keeper(seconds: float, leads: bool) -> tuple[float, float]:
    """Return the requests of class A and B in an hour of a keeper of an unchanging fleet; its clock is simulated."""
    from tests.fleet.loop import ManagedFleet
    from tests.swarm.bucket import bucket

    from tpuswarm.cloud.google.access import Access
    from tpuswarm.cloud.google.buckets import GoogleBucket
    from tpuswarm.cloud.google.endpoints import Endpoints

    with tempfile.TemporaryDirectory() as name, bucket("state", Path(name)) as server:
        fleet = ManagedFleet(Path(name))
        document, cloud = fleet.document, fleet.cloud
        vars(cloud)["bucket"] = lambda name: GoogleBucket(Access("p", Endpoints("", server.endpoint, "token")), name)
        fleet.new_store().change(lambda _: document)
        leader = fleet.keeper("head")
        fleet.run(leader, 600)
        measured = leader if leads else fleet.keeper("laptop")
        end = cloud.now + seconds
        with counted(server.requests) as made:

            def sleep(pause: float) -> None:
                cloud.advance(pause)
                if not leads:
                    seen = len(server.requests)
                    leader.tick()
                    del server.requests[seen:]

            measured.run(lambda tick: None, lambda tick: cloud.now >= end, sleep)
    hours = seconds / 3600
    return made["A"] / hours, made["B"] / hours


def an_hour(quick: bool) -> Table:
    parts = {
        "a plain run whose metrics grow": plain_run(3 if quick else RUN_S),
        "the leading keeper": keeper(60 if quick else KEEPER_S, True),
        "a standby keeper": keeper(60 if quick else KEEPER_S, False),
    }
    rows = [(name, f"{a:,.0f}", f"{b:,.0f}") for name, (a, b) in parts.items()]
    a, b = (sum(part[index] for part in parts.values()) for index in (0, 1))
    rows.append(("a fleet: a run, a keeper on its head, one on a laptop", f"{a:,.0f}", f"{b:,.0f}"))
    rows.append(("limits of a run", "900", ""))
    rows.append(("limits of a fleet", "1,500", "2,500"))
    notes = [f"the run: for {RUN_S} s at {SPEED_UP_FACTOR} times the speed; keepers: an hour by a simulated clock"]
    return Table("Requests an hour", ("", "class A", "class B"), rows, notes)


def run(settings: Settings) -> Iterator[Table]:
    yield an_hour(settings.quick)
    slow: dict[int, tuple[SlowBucket, float, float]] = {}
    instant: dict[int, tuple[SlowBucket, float, float]] = {}
    for members in (2, 4) if settings.quick else MEMBER_COUNTS:
        for results, seconds in ((slow, REQUEST_S), (instant, 0.0)):
            with tempfile.TemporaryDirectory() as name:
                results[members] = commit_version(members, Path(name) / "run", seconds)
    rows: list[tuple[str, Callable[[int, SlowBucket, float, float], str]]] = [
        ("a member's requests: payloads, header", lambda n, bucket, *_: _requests(bucket, n, "payloads", "headers")),
        ("a member's bytes, of the model's", lambda n, bucket, *_: f"{bucket.sent['payloads'] / n / _size(n):.2f}"),
        ("the slowest push, s", lambda n, bucket, push, commit: f"{push:.2f}"),
        ("with an instant bucket, s", lambda n, *_: f"{instant[n][1]:.2f}"),
        (
            "requests of a push, with its share of the commit",
            lambda n, bucket, *_: f"{bucket.requests.total() / n:.1f}",
        ),
        ("the commit's requests: objects, record", lambda n, bucket, *_: _requests(bucket, 1, "objects", "commits")),
        ("its bytes, of the model's", lambda n, bucket, *_: f"{bucket.sent['objects'] / _size(n):.2f}"),
        (
            "its record and all headers, KB",
            lambda n, bucket, *_: f"{(bucket.sent['commits'] + bucket.sent['headers']) / 1e3:,.0f}",
        ),
        ("the commit, s", lambda n, bucket, push, commit: f"{commit:.2f}"),
        ("with an instant bucket, s", lambda n, *_: f"{instant[n][2]:.2f}"),
        ("reads", lambda n, bucket, *_: str(sum(v for k, v in bucket.requests.items() if k.startswith("read")))),
    ]
    yield Table(
        "Requests of a version",
        ("members", *map(str, slow)),
        [(name, *(show(members, *results) for members, results in slow.items())) for name, show in rows],
        [
            f"{', '.join(str(fragments_for(MODEL_BYTES, members)) for members in slow)} fragments, as for GPT-2 124M; "
            f"plain, nesterov; {REQUEST_S * 1e3:.0f} ms a request; an aggregator for {MEMBERS_PER_SHARD}; limit: "
            "8 requests a push"
        ],
    )


def _size(members: int) -> int:
    return fragments_for(MODEL_BYTES, members) * FRAGMENT_SIZE * 4


def _requests(bucket: SlowBucket, members: int, *kinds: str) -> str:
    return ", ".join(f"{bucket.requests[kind] / members:g}" for kind in kinds)

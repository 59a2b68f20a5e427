"""No request of a member, however malformed, replayed or out of order, ends the coordinator or an aggregator."""

import tracemalloc
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.swarm.supervision.fake_cluster import PLAN, SWARM
from tpuswarm.swarm.core.alarms import alarms
from tpuswarm.swarm.core.arithmetic.fragments import Layout, Piece
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule
from tpuswarm.swarm.core.coordinator_state import with_claims
from tpuswarm.swarm.core.messages import Accepted, Granted, Heartbeat, Merge, Refused
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Header, Identity, Incarnation
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.aggregator import Shard
from tpuswarm.swarm.processes.coordinator import Begin, FoundingCoordinator, Joining
from tpuswarm.swarm.processes.effects import Parallel, ProcessEnded, Sleep
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

LAYOUT = Layout(((Piece("b", (2,)),), (Piece("w", (3,)),)))
LONG = replace(PLAN, swarm=replace(SWARM, fragments=2), settings={**PLAN.settings, "steps": 400})
PLAN_OF_TWO = replace(LONG, settings=PLAN.settings)
GOOD, BAD = Incarnation("good", "a" * 32), Incarnation("bad", "b" * 32)


class Swarm:
    """The product's coordinator and aggregator over one folder, on a clock that the test moves."""

    def __init__(self, folder: Path, plan=LONG):
        (folder / "data").mkdir()
        (folder / "data" / "text.txt").write_text("text")
        (folder / "token").write_text("secret")
        self.now, self.plan = 0.0, plan
        store = Store(folder)
        self.head = FoundingCoordinator(plan, store, ["aggregator"], lambda: self.now, lambda: self.now, alone=True)
        self.servers = {"coordinator": self.head, "aggregator": Shard(store, folder / "data", 0, 1)}
        self.nodes = {name: NodeThreads(self.serve) for name in self.servers}
        self.work, self.answer = self.head.run(), None
        self.sent: list[tuple[str, str, tuple]] = []
        self.sequences = dict.fromkeys((GOOD, BAD), 0)

    def serve(self, call):
        return self.call(call.address, call.method, call.arguments)

    def call(self, address, method, arguments):
        return self.nodes[address].call(self.servers[address], method, arguments)

    def advance(self, until):
        """Let the coordinator work until a condition holds."""
        for _ in range(500):
            if until():
                return
            effect = self.work.send(self.answer)
            if isinstance(effect, Sleep):
                self.now, self.answer = self.now + 0.5, None
            elif isinstance(effect, Parallel):
                self.answer = [self.serve(call) for call in effect.calls]
            else:
                self.answer = effect.action()
        raise AssertionError("the coordinator makes no progress")

    @property
    def newest(self):
        return self.head.state.view.newest

    def begin(self):
        self.advance(lambda: self.head._is_unfounded)
        assert self.call("coordinator", "hello", ("m0", True)) == Begin()
        state, outer = [], self.plan.outer
        for size in LAYOUT.sizes:
            state.append(self.call("aggregator", "found", (np.ones(size, np.float32), outer))[0])
        founding = Founding(LAYOUT.fragments, {})
        found = (founding, tuple(state), (), self.plan.terms(founding).digests)
        assert self.call("coordinator", "found", found) == Accepted()
        self.advance(lambda: isinstance(self.call("coordinator", "hello", ("m0", True)), Joining))
        self.found = found
        return self

    def heartbeat(self, who, todo=NO_ROWS, undecided=None):
        joined = who in self.head.state.leases
        return Heartbeat(
            who, self.head.state.terms.digests, joined, self.newest.version, todo, NO_ROWS, undecided, 2.0, 8
        )

    def messages(self, who):
        """What a member may send now, and what a coordinator sends to aggregators."""
        lease = self.head.state.leases.get(who)
        rows = lease.rows.first(4) if lease and lease.rows else Rows(((0, 4),))
        following = Identity(who, self.head.state.view.decided_pushes(who) + 1)
        payloads = [{"s": np.full(size, 2.0, np.float32)} for size in LAYOUT.sizes]
        digests = tuple(map(tensors.digest, payloads))
        header = Header(following, "run", self.newest.version, rows, 4 * len(rows), 2, "plain", 1.0, True, digests)
        merge = Merge(self.newest.version + 1, (), LONG.outer, 0.0, 1.0, 0.0, None, "")
        return [
            ("coordinator", "beat", (self.heartbeat(who, undecided=following),)),
            *(("aggregator", "put", (following, n, payloads[n], digests[n])) for n in range(2)),
            ("coordinator", "push", (header,)),
            ("coordinator", "hello", ("m0", True)),
            ("coordinator", "found", self.found),
            ("coordinator", "leave", (who,)),
            ("aggregator", "fetch", (0, self.newest.state[0])),
            ("aggregator", "average", (0, self.newest.version)),
            ("aggregator", "updates", (0, 0, self.newest.version)),
            ("aggregator", "check", (self.newest,)),
            ("aggregator", "merge", (self.newest, merge)),
            ("aggregator", "found", (np.ones(2, np.float32), LONG.outer)),
            ("aggregator", "file", ("text.txt", 0, 4)),
            ("aggregator", "ranges", ("text.txt", np.array([0, 1]), 2)),
        ]

    def check(self):
        state = self.head.state
        assert [node.failure for node in self.nodes.values()] == [None, None]
        assert state == with_claims(state) and self.head.summarize() is not None
        held = [lease.rows for lease in state.leases.values()]
        assert sum(map(len, held)) == len(Rows.union(held)), "two members hold a row"

    def train(self, who):
        """A whole cycle of a healthy member: its push must be counted."""
        granted = self.call("coordinator", "beat", (self.heartbeat(who),))
        assert isinstance(granted, Granted) and granted.rows, granted
        before = self.newest.version
        messages = self.messages(who)
        for address, method, arguments in messages[1:4]:
            assert self.call(address, method, arguments) == Accepted()
        self.advance(lambda: self.newest.version > before)
        assert [each.fate for each in self.newest.decisions if each.identity.incarnation == who] == ["applied"]


def leaves(value, path=()):
    """Yield the path of each value inside a message."""
    yield path
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from leaves(part, (*path, number))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))


def changed(value, path, new):
    """Return a message with another value at a path, as if it had come over the network: nothing checks it."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: changed(value[first], rest, new)}
    if is_dataclass(value):
        made = object.__new__(type(value))
        for field in fields(value):
            part = getattr(value, field.name)
            object.__setattr__(made, field.name, changed(part, rest, new) if field.name == first else part)
        return made
    parts = list(value)
    parts[first] = changed(parts[first], rest, new)
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 9), st.floats(), st.text(max_size=4),
    st.sampled_from(["../../x", "../token", "..", "", "x" * 70, "0" * 64, "\ud800", b"bytes", (), {}, [], object]),
    st.sampled_from([(((5, 3)),), ((0, 2**62),), ((-4, 4),), Rows(((0, 2**40),)), Rows(((0, 4),)), 2**64]),
    st.sampled_from([GOOD, Identity(GOOD, 1), Incarnation("../../x", "../y"), {"s": np.ones(2)}, {"codes": "x"}]),
    st.sampled_from([np.ones(2), np.ones((2, 2), np.float32), np.array([None, "x"]), np.full(2, np.nan, np.float32)]),
)  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("honest"), st.integers(0, 20)),
        st.tuples(st.just("changed"), st.integers(0, 20), st.integers(0, 200), VALUES),
        st.tuples(st.just("replayed"), st.integers(0, 40)),
        st.tuples(st.just("called"), st.sampled_from(["coordinator", "aggregator"]), VALUES, VALUES),
        st.tuples(st.just("waited"), st.integers(0, 30)),
    ),
    max_size=12,
)


@given(STEPS, st.booleans())
@example([("called", "aggregator", "sizes", ()), ("called", "coordinator", "run", ())], True)
def test_no_sequence_of_requests_ends_a_process_or_hinders_others(steps, leases):
    with TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder)).begin()
        if leases:
            swarm.call("coordinator", "beat", (swarm.heartbeat(BAD),))
        for kind, *about in steps:
            messages = swarm.messages(BAD)
            message = messages[about[0] % len(messages)] if isinstance(about[0], int) else None
            if kind == "called":
                swarm.call(*about)
                continue
            if kind == "waited":
                swarm.now += about[0]
                continue
            if kind == "replayed" and swarm.sent:
                message = swarm.sent[about[0] % len(swarm.sent)]
            if kind == "changed":
                paths = list(leaves(message[2]))
                message = (*message[:2], changed(message[2], paths[about[1] % len(paths)], about[2]))
            swarm.sent.append(message)
            swarm.call(*message)
            swarm.check()
        swarm.train(GOOD)
        swarm.check()


@pytest.mark.parametrize(
    ("address", "method", "path", "value"),
    [
        ("coordinator", "push", (0, "base"), 7),
        ("coordinator", "push", (0, "norm"), float("nan")),
        ("coordinator", "push", (0, "digests"), ("0" * 64,)),
        ("coordinator", "beat", (0, "base"), 7),
        ("coordinator", "beat", (0, "processed"), 2**64),
        ("coordinator", "leave", (0, "member"), "../../x"),
        ("aggregator", "put", (0, "incarnation", "member"), "../../x"),
        ("aggregator", "put", (0, "incarnation", "name"), ".."),
        ("aggregator", "put", (1,), 2),
        ("aggregator", "put", (2, "s"), np.ones(2)),
        ("aggregator", "fetch", (1,), "../token"),
        ("aggregator", "average", (1,), 9),
        ("aggregator", "updates", (2,), 9),
        ("aggregator", "file", (0,), "../token"),
        ("aggregator", "file", (2,), 2**40),
        ("aggregator", "ranges", (0,), "../token"),
        ("aggregator", "ranges", (1,), np.array([3])),
        ("aggregator", "ranges", (1,), np.array([], np.int64)),
        ("aggregator", "ranges", (1,), np.array([-1])),
        ("aggregator", "ranges", (2,), 2**62),
        ("aggregator", "merge", (1, "outer"), OuterRule("average", average=MovingAverage(-1.0))),
        ("aggregator", "merge", (1, "outer"), OuterRule("average", average=MovingAverage(float("nan")))),
    ],
)
def test_malformed_request_is_refused(tmp_path, address, method, path, value):
    swarm = Swarm(tmp_path).begin()
    swarm.call("coordinator", "beat", (swarm.heartbeat(BAD),))
    messages = {message[:2]: message for message in reversed(swarm.messages(BAD))}
    answer = swarm.call(address, method, changed(messages[address, method][2], path, value))
    assert isinstance(answer, Refused) and len(answer.reason) < 300
    swarm.check()
    assert not (tmp_path / "payloads").exists() and not (tmp_path / "headers").exists()
    swarm.train(GOOD)


def test_part_of_a_file_behind_its_end_is_empty(tmp_path):
    swarm = Swarm(tmp_path).begin()
    assert swarm.call("aggregator", "file", ("text.txt", 2**62, 4)) == b""
    swarm.check()


def test_many_short_parts_of_a_file_need_little_memory(tmp_path):
    swarm = Swarm(tmp_path).begin()
    starts = np.arange(100_000) % 3
    tracemalloc.start()
    found = swarm.call("aggregator", "ranges", ("text.txt", starts, 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [bytes(part) for part in found[:3]] == [b"te", b"ex", b"xt"] and len(found) == len(starts)
    assert peak < 10 * found.nbytes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_push_with_nan_is_dropped_although_its_header_says_finite(tmp_path, value):
    swarm = Swarm(tmp_path).begin()
    swarm.call("coordinator", "beat", (swarm.heartbeat(BAD),))
    swarm.call("coordinator", "beat", (swarm.heartbeat(GOOD),))
    *_, (address, method, (header,)) = swarm.messages(BAD)[:4]
    payloads = [{"s": np.full(size, value, np.float32)} for size in LAYOUT.sizes]
    header = replace(header, digests=tuple(map(tensors.digest, payloads)))
    for number in range(2):
        put = (header.identity, number, payloads[number], header.digests[number])
        assert swarm.call("aggregator", "put", put) == Accepted()
    assert swarm.call(address, method, (header,)) == Accepted()
    swarm.train(GOOD)
    fates = {decision.identity.incarnation: decision.fate for decision in swarm.newest.decisions}
    assert fates == {GOOD: "applied", BAD: "dropped"}
    assert all(np.isfinite(swarm.call("aggregator", "fetch", (n, swarm.newest.state[n]))).all() for n in range(2))
    [alarm] = alarms([swarm.newest], [], None, 0.0, swarm.now)
    assert alarm.startswith("bad pushed NaN or infinity as finite values")
    assert not verify(Store(tmp_path), lambda _: None).problems


def push_of_another_coordinator(swarm, base, rows):
    """Another coordinator has accepted it: its payload and its header are stored."""
    _, *puts, (_, _, (header,)) = swarm.messages(BAD)[:4]
    for address, method, arguments in puts:
        assert swarm.call(address, method, arguments) == Accepted()
    header = replace(header, base=base, rows=rows, tokens=4 * len(rows))
    assert swarm.head._ledger.create_header(header) == "created"
    return header.identity


def test_run_does_not_end_before_every_accepted_push_has_a_verdict(tmp_path):
    swarm = Swarm(tmp_path, PLAN_OF_TWO).begin()
    undecided = push_of_another_coordinator(swarm, 0, Rows(((40, 44),)))
    with pytest.raises(StopIteration):
        while True:
            swarm.train(GOOD)
            if swarm.head.state.ended:
                swarm.advance(lambda: False)
    assert swarm.head._ledger.view().has_decided(undecided)


def test_coordinator_ends_at_a_push_from_a_newer_commit(tmp_path):
    swarm = Swarm(tmp_path).begin()
    push_of_another_coordinator(swarm, 7, Rows(((0, 4),)))
    clock = lambda: swarm.now  # noqa: E731
    swarm.head = FoundingCoordinator(LONG, Store(tmp_path), ["aggregator"], clock, clock, alone=True)
    swarm.work, swarm.answer = swarm.head.run(), None
    with pytest.raises(ProcessEnded, match="starts from commit 7: another coordinator is in charge"):
        swarm.advance(lambda: False)


def test_coordinator_without_members_notices_that_it_is_outdated(tmp_path):
    swarm = Swarm(tmp_path).begin()
    ledger, newest = swarm.head._ledger, swarm.newest
    record = replace(newest, version=1, epoch=2, parent=ledger.digest(newest))
    assert ledger.append(record) == "created"
    with pytest.raises(ProcessEnded, match="commit 1 exists: another coordinator is in charge"):
        swarm.advance(lambda: False)


def test_only_requests_can_be_called(tmp_path):
    swarm = Swarm(tmp_path).begin()
    for method in ("run", "open", "_commit", "state", "clock", "__class__", "__init__"):
        assert isinstance(swarm.call("coordinator", method, ()), Refused)
    swarm.train(GOOD)

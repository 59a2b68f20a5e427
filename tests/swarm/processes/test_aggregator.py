"""Shards: a commit has the same bits for any number of them; damaged versions are recomputed or named."""

import random
import shutil
import uuid
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.chains import SIZES, Run, applied, in_order, merge_of, problems_of
from tests.swarm.exact import DIGESTS
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage
from tpuswarm.swarm.core.choose import choose
from tpuswarm.swarm.core.messages import (
    Accepted,
    Merge,
    PayloadDamaged,
    PayloadsLost,
    PayloadsNotFinite,
    Refused,
    ShardResult,
    Terms,
    VersionDamaged,
    VersionExpired,
)
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.aggregator import MAX_STALENESS, Aggregator, sum_by_identity
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import ProcessEnded, Unreachable
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.downlink import Chain
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name, to_quantized
from tpuswarm.swarm.storage.store import Missing, Store
from tpuswarm.swarm.supervision import entry

PEOPLE = ["m0", "ada-home", "ada-colab", "bob-home"]
kinds = pytest.mark.parametrize(
    "kind",
    ["average-plain", "nesterov-plain", "average-int8", "nesterov-int4", "average-plain-ema", "nesterov-int8-ema"],
)


def grow_run(folder: Path, kind: str, commits: int = 4) -> Run:
    rule, downlink, *ema = kind.split("-")
    average = MovingAverage(half_life=100, share=0.5) if ema else None
    run = Run(Store(folder), random.Random(4), rule=rule, downlink=downlink, average=average).grow(commits)
    while not applied(run.records[-1]):
        run.grow(1)
    return run


def new_objects(run: Run) -> set[str]:
    return set(run.records[-1].objects) - {digest for record in run.records[:-1] for digest in record.objects}


class Shard:
    """A shard whose methods run at once."""

    def __init__(self, aggregator: Aggregator):
        self.aggregator = aggregator

    def __getattr__(self, method: str):
        return lambda *arguments: next(getattr(self.aggregator, method)(*arguments)).action()


def shards(store: Store, count: int = 2) -> list[Shard]:
    return [Shard(Aggregator(Ledger(store), Objects(store), SIZES, index, count)) for index in range(count)]


@kinds
def test_any_number_of_shards_makes_the_same_bits(tmp_path, kind):
    """Invariant 8."""
    run = grow_run(tmp_path, kind)
    newest = run.records[-1]
    for count in (2, 3):
        for digest in new_objects(run):
            run.store.delete(object_name(digest))
        parts = [shard.merge(run.records[-2], merge_of(newest, run.outer)) for shard in shards(run.store, count)]
        for name in ("state", "outer", "updates"):
            made = {number: digest for part in parts for number, digest in getattr(part, name).items()}
            assert in_order(made) == getattr(newest, name)
        assert not problems_of(run.store)


@pytest.mark.parametrize("kind", ["average-plain", "nesterov-int8"])
def test_work_of_people_is_measured_in_any_number_of_shards(tmp_path, kind):
    rule, downlink = kind.split("-")
    run = Run(Store(tmp_path), random.Random(4), rule=rule, downlink=downlink)
    run.members = [replace(key, member=name) for key, name in zip(run.members, PEOPLE, strict=True)]
    run.sequences = run.processed = dict.fromkeys(run.members, 0)
    bases = run.state(0)
    deltas = {}
    for member in run.members:
        identity = run.push(member).identity
        payloads = [run.objects.get_payload(identity, *numbered) for numbered in enumerate(run.pending[-1].digests)]
        whole = [
            base - payload["s"] if "s" in payload
            else to_quantized(payload).decode(0, base.size, np.empty(payload["codes"].shape[0] * 256, np.float32))
            for base, payload in zip(bases, payloads, strict=True)
        ]  # fmt: skip
        deltas[identity] = np.concatenate(whole).astype(np.float64)
    decisions = tuple(choose(run.view, run.pending, (), run.staleness))
    merge = Merge(1, decisions, run.outer, 0.7 if rule == "nesterov" else 1.0, 1.0, 0.0, None, "")
    for count in (1, 2):
        parts = [shard.merge(run.records[0], merge) for shard in shards(run.store, count)]
        assert sum_by_identity(part.squares for part in parts) == {
            identity: pytest.approx(delta @ delta, rel=1e-5)
            for identity, delta in deltas.items() if person_of(identity.incarnation.member)
        }  # fmt: skip


PAYLOADS = {
    "NaN": lambda size: {"s": np.full(size, np.nan, np.float32)},
    "one infinity": lambda size: {"s": np.where(np.arange(size) == size - 1, np.inf, 0).astype(np.float32)},
    "a scale of NaN": lambda size: {"codes": np.zeros((-(-size // 256), 256), np.uint8),
                                    "scales": np.full(-(-size // 256), np.nan, np.float32)},
    "an overflow": lambda size: {"s": np.full(size, -3.4e38, np.float32)},
}  # fmt: skip


@kinds
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("values", PAYLOADS)
def test_payload_that_is_not_finite_is_named_instead_of_merged(tmp_path, kind, values):
    """Invariant 12, against a header that calls the payload finite."""
    rule, downlink, *_ = kind.split("-")
    run = Run(Store(tmp_path), random.Random(4), rule=rule, downlink=downlink)
    good, bad = run.members[:2]
    run.push(good)
    payloads = [PAYLOADS[values](size) for size in SIZES]
    identity = Identity(bad, 1)
    digests = tuple(run.objects.put_payload(identity, *numbered) for numbered in enumerate(payloads))
    header = replace(run.pending[0], identity=identity, rows=Rows(((50, 51),)), digests=digests)
    run.ledger.create_header(header)
    decisions = tuple(choose(run.view, [*run.pending, header], (), run.staleness))
    merge = Merge(1, decisions, run.outer, 0.7 if rule == "nesterov" else 1.0, 1.0, 0.0, None, "")
    before = {path.name for path in (tmp_path / "objects").iterdir()}
    if values == "an overflow":
        merge = replace(merge, decisions=tuple(replace(each, weight=10.0) for each in decisions))
    assert shards(run.store, 1)[0].merge(run.records[0], merge) == PayloadsNotFinite(frozenset({identity}))
    assert not [path for path in (tmp_path / "objects").iterdir() if path.name not in before and path.suffix == ".part"]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("part", ["state", "outer"])
def test_state_that_was_not_finite_before_is_named_instead_of_its_payloads(tmp_path, part):
    run = grow_run(tmp_path, "nesterov-plain")
    run.push(run.members[0])
    decisions = tuple(choose(run.view, run.pending, (), run.staleness))
    digests = list(getattr(run.records[-1], part))
    digests[0] = run.objects.put_array(np.full_like(run.objects.get_array(digests[0]), np.nan))
    newest = replace(run.records[-1], **{part: tuple(digests)})
    merge = Merge(newest.version + 1, decisions, run.outer, 0.7, 1.0, newest.gathered, None, "")
    answer = shards(run.store, 1)[0].merge(newest, merge)
    assert isinstance(answer, VersionDamaged) and f"objects/{digests[0]}" in answer.reason, answer


def test_round_without_contributors_repeats_the_version(tmp_path):
    run = grow_run(tmp_path, "nesterov-int8")
    newest = run.records[-1]
    merge = replace(merge_of(newest, run.outer), decisions=())
    assert shards(run.store, 1)[0].merge(newest, merge) == ShardResult(
        dict(enumerate(newest.state)), dict(enumerate(newest.outer)), {}
    )


@pytest.mark.parametrize(
    ("kind", "row"), [("average-plain-ema", -1), ("nesterov-int8-ema", -2), ("nesterov-int8", None)]
)
def test_moving_average_of_a_version_is_served_or_the_version_with_which_it_starts(tmp_path, kind, row):
    run = grow_run(tmp_path, kind)
    newest = run.records[-1]
    found = shards(run.store, 1)[0].average(2, newest.version)
    expected = run.state(newest.version)[2] if row is None else run.objects.get_array(newest.outer[2])[row]
    np.testing.assert_array_equal(found, expected)


def test_damaged_and_unexpected_payloads_are_not_stored(tmp_path):
    shard, identity = shards(Store(tmp_path))[0], Identity(Incarnation("m0", "ab" * 16), 1)
    right = {"s": np.zeros(SIZES[2], np.float32)}
    other = {"s": right["s"] + 1}
    assert isinstance(shard.put(identity, 2, other, tensors.digest(right)), PayloadDamaged)
    wrong_size = {"codes": np.zeros((3, 256), np.uint8), "scales": np.zeros(3, np.float32)}
    assert isinstance(shard.put(identity, 2, wrong_size, tensors.digest(wrong_size)), Refused)
    assert not Store(tmp_path).exists(payload_name(identity, 2))
    assert isinstance(shard.put(identity, 2, right, tensors.digest(right)), Accepted)
    assert isinstance(shard.put(identity, 2, other, tensors.digest(other)), Refused)


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_payload_damaged_on_the_disk_is_named(tmp_path, damage):
    run = grow_run(tmp_path, "average-int8")
    identity = applied(run.records[-1])[-1].identity
    path = run.store.path(payload_name(identity, 1))
    path.unlink() if damage == "delete" else path.write_bytes(path.read_bytes()[:-1] + b"x")
    first, second = (shard.merge(run.records[-2], merge_of(run.records[-1], run.outer)) for shard in shards(run.store))
    assert isinstance(first, ShardResult) and second == PayloadsLost(frozenset({identity}))


@kinds
def test_damaged_version_is_computed_again(tmp_path, kind):
    """By the next merge, by a fetch, or when a coordinator starts; arrays of other versions do not change."""
    run = grow_run(tmp_path, kind)
    newest = run.records[-1]
    intact = {digest: run.store.read(object_name(digest)) for digest in new_objects(run) - {*newest.updates}}
    assert len(intact) >= 2

    def damage() -> None:
        for number, digest in enumerate(sorted(intact)):
            path = run.store.path(object_name(digest))
            path.unlink(missing_ok=True) if number % 2 else path.write_bytes(intact[digest][:-3])

    damage()
    assert [shard.check(newest) for shard in shards(run.store)] == [None, None]
    assert {digest: run.store.read(object_name(digest)) for digest in intact} == intact
    damage()
    assert shards(run.store)[0].fetch(2, newest.state[2]).tobytes() == intact[newest.state[2]][-4 * SIZES[2] :]
    run.commit()  # repeats it
    damage()
    assert shards(run.store)[0].check(run.records[-1]) is None


def test_request_for_a_removed_version_does_not_end_the_aggregator(tmp_path):
    """Newer commits have replaced it. Over a slow link, a member once ended one aggregator after the other."""
    run = grow_run(tmp_path, "average-plain-ema", commits=6)
    newest = run.records[-1]
    old = next(record for record in run.records[1:] if record.state != newest.state)
    shutil.rmtree(tmp_path / "payloads")
    for digest in (old.state[2], old.outer[2], newest.outer[2]):
        run.store.delete(object_name(digest))
    aggregator, node = Aggregator(Ledger(run.store), Objects(run.store), SIZES, 0, 1), NodeThreads(pytest.fail)
    assert node.call(aggregator, "fetch", (2, old.state[2])) == VersionExpired()
    assert node.call(aggregator, "average", (2, old.version)) == VersionExpired()
    np.testing.assert_array_equal(node.call(aggregator, "fetch", (2, newest.state[2])), run.state(newest.version)[2])
    with pytest.raises(Unreachable):  # no run continues without the newest
        node.call(aggregator, "average", (2, newest.version))
    assert isinstance(node.failure, Missing)


def test_lost_version_is_named_with_the_newest_intact_one(tmp_path):
    run = grow_run(tmp_path, "average-int8")
    digest = run.records[-1].state[2]
    run.store.delete(object_name(digest))
    shutil.rmtree(tmp_path / "payloads")
    both = shards(run.store)
    assert isinstance(both[0].check(run.records[-1]), VersionDamaged)
    assert both[1].check(run.records[-1]) is None

    over: list[ProcessEnded] = []
    engine = Inproc(1, on_ended=lambda node, error: over.append(error))
    terms = Terms("run", DIGESTS, 1, 8, 10**6, 4, (), run.outer)
    for number, shard in enumerate(both):
        engine.serve(f"shard-{number}", shard.aggregator)
    coordinator = Coordinator(Ledger(run.store), ["shard-0", "shard-1"], lambda: engine.now, lambda: engine.now)
    opening = coordinator.open(terms, founded=False)
    engine.spawn("coordinator", opening, lambda _: engine.spawn("coordinator", coordinator.run()))
    assert engine.run(lambda: bool(over), 100)
    version = run.records[-1].version
    intact = next(record.version for record in reversed(run.records) if record.state != run.records[-1].state)
    assert str(over[0]).startswith(f"commit {version} is damaged: objects/{digest}.safetensors is missing")
    assert str(over[0]).endswith(f"starts from commit {intact}, which is intact")


def test_aggregator_on_another_machine_works_on_the_bucket_and_keeps_few_copies(loopback, tmp_path, monkeypatch):
    """Its disk may be small: it holds payloads until they are decided, and the versions that may be bases."""
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path))
    url = f"gs://bucket/{uuid.uuid4()}"
    run = Run(Store(url), random.Random(4), rule="nesterov", downlink="int8").grow(9)
    folder = entry.folder_for_copies(url)
    (shard,) = shards(Store(folder), 1)
    for before, record in pairwise(run.records):
        made = shard.merge(before, merge_of(record, run.outer))
        assert not applied(record) or in_order(made.state) == record.state
    identity = Identity(Incarnation("m9", "a" * 32), 1)
    payload = {"s": np.zeros(SIZES[0], np.float32)}
    assert shard.put(identity, 0, payload, tensors.digest(payload)) == Accepted()
    assert Objects(Store(url)).get_payload(identity, 0, tensors.digest(payload))
    assert not problems_of(Store(url))

    payloads = {path.relative_to(folder).as_posix() for path in folder.glob("payloads/*/*/*.safetensors")}
    recent = {payload_name(decision.identity, number) for decision in record.decisions for number in range(len(SIZES))}
    assert payload_name(identity, 0) in payloads and payloads <= {*recent, payload_name(identity, 0)}
    objects = {path.name for path in folder.glob("objects/*.safetensors")}
    versions = run.records[-MAX_STALENESS - 2 :]
    assert objects <= {f"{digest}.safetensors" for version in versions for digest in version.objects}
    assert shard.fetch(0, run.records[0].state[0]).size == SIZES[0], "the bucket has the rest"


def test_version_whose_record_was_read_costs_no_request_to_a_bucket(tmp_path, monkeypatch):
    run = grow_run(tmp_path, "nesterov-int8-ema")
    version = run.records[-1].version
    monkeypatch.setattr(Store, "exists", None)  # of a run in a bucket, only `read` has copies on this disk
    shard = shards(run.store, 1)[0]
    assert isinstance(shard.updates(0, version - 1, version), Chain)
    assert isinstance(shard.average(0, version), np.ndarray)
    assert isinstance(shard.updates(0, 0, version + 1), Refused) and isinstance(shard.average(0, version + 1), Refused)

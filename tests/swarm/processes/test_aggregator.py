"""Shards: the bits of a commit whatever their number, and what a bad disk does to it."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.chains import SIZES, Run
from tests.swarm.exact import DIGESTS
from tpuswarm.swarm.core.arithmetic.outer import Average
from tpuswarm.swarm.core.messages import Accepted, Damage, Damaged, Gone, Lost, Merge, Part, Refused, Terms
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Over, Unreachable
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name
from tpuswarm.swarm.storage.store import Missing, Store
from tpuswarm.swarm.storage.verify import verify

kinds = pytest.mark.parametrize(
    "kind",
    ["average-plain", "nesterov-plain", "average-int8", "nesterov-int4", "average-plain-ema", "nesterov-int8-ema"],
)


def grown(folder: Path, kind: str, commits: int = 4) -> Run:
    """A run whose last record has contributors."""
    rule, downlink, *ema = kind.split("-")
    average = Average(half_life=100, share=0.5) if ema else None
    run = Run(Store(folder), random.Random(4), rule=rule, downlink=downlink, average=average).grow(commits)
    while not last(run):
        run.grow(1)
    return run


def last(run: Run):
    return [each for each in run.records[-1].decisions if each.fate == "applied"]


def fresh(run: Run) -> set[str]:
    """The objects that the newest record is the first to name."""
    return set(run.records[-1].objects) - {digest for record in run.records[:-1] for digest in record.objects}


class Shard:
    """A shard whose methods are carried out at once."""

    def __init__(self, aggregator: Aggregator):
        self.aggregator = aggregator

    def __getattr__(self, method: str):
        return lambda *arguments: next(getattr(self.aggregator, method)(*arguments)).action()


def shards(store: Store, count: int = 2) -> list[Shard]:
    return [Shard(Aggregator(Ledger(store), Objects(store), SIZES, index, count)) for index in range(count)]


def merge_of(run: Run) -> Merge:
    """What the coordinator asked for the newest record."""
    newest = run.records[-1]
    by = newest.rate, newest.share, newest.gathered, newest.kept
    return Merge(newest.version, newest.decisions, run.outer, *by, "")


@kinds
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_of_shards_does_not_change_a_bit(tmp_path, kind, count):
    """Invariant 8, against the same commit made of arrays in memory."""
    run = grown(tmp_path, kind)
    newest = run.records[-1]
    for digest in fresh(run):
        run.store.delete(object_name(digest))
    parts = [each.merge(run.records[-2], merge_of(run)) for each in shards(run.store, count)]
    for name, wanted in (("state", newest.state), ("outer", newest.outer), ("updates", newest.updates)):
        made = {number: digest for part in parts for number, digest in getattr(part, name).items()}
        assert tuple(made[number] for number in sorted(made)) == wanted
    assert not verify(run.store, lambda _: None).problems


def test_a_round_without_contributors_repeats_the_version(tmp_path):
    run = grown(tmp_path, "nesterov-int8")
    newest = run.records[-1]
    merge = replace(merge_of(run), decisions=())
    assert shards(run.store, 1)[0].merge(newest, merge) == Part(
        dict(enumerate(newest.state)), dict(enumerate(newest.outer)), {}
    )


@pytest.mark.parametrize("kind", ["average-plain-ema", "nesterov-int8-ema", "nesterov-int8"])
def test_the_average_of_a_version_or_the_version_with_which_one_will_begin(tmp_path, kind):
    run = grown(tmp_path, kind)
    newest, row = run.records[-1], -2 if "int8" in kind else -1
    found = shards(run.store, 1)[0].average(2, newest.version)
    wanted = run.objects.get_array(newest.outer[2])[row] if "ema" in kind else run.state(newest.version)[2]
    np.testing.assert_array_equal(found, wanted)


def test_payloads_that_arrive_damaged_or_of_another_size_are_not_stored(tmp_path):
    shard, identity = shards(Store(tmp_path))[0], Identity(Incarnation("m0", "ab" * 16), 1)
    right = {"s": np.zeros(SIZES[2], np.float32)}
    assert isinstance(shard.put(identity, 2, {"s": right["s"] + 1}, tensors.digest(right)), Damaged)
    wrong = {"codes": np.zeros((3, 256), np.uint8), "scales": np.zeros(3, np.float32)}
    assert isinstance(shard.put(identity, 2, wrong, tensors.digest(wrong)), Refused)
    assert not Store(tmp_path).exists(payload_name(identity, 2))
    assert isinstance(shard.put(identity, 2, right, tensors.digest(right)), Accepted)
    other = {"s": right["s"] + 1}
    assert isinstance(shard.put(identity, 2, other, tensors.digest(other)), Refused)


@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_payload_that_changed_on_the_disk_is_named(tmp_path, how):
    run = grown(tmp_path, "average-int8")
    identity = last(run)[-1].identity
    path = run.store.path(payload_name(identity, 1))
    path.unlink() if how == "delete" else path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = [each.merge(run.records[-2], merge_of(run)) for each in shards(run.store)]
    assert isinstance(found[0], Part) and found[1] == Lost(frozenset({identity}))


@kinds
def test_a_version_that_is_damaged_is_computed_again(tmp_path, kind):
    """By the next merge, by who fetches it, or when a coordinator begins; other versions' arrays stay as they are."""
    run = grown(tmp_path, kind)
    newest = run.records[-1]
    whole = {digest: run.store.read(object_name(digest)) for digest in fresh(run) - {*newest.updates}}
    assert len(whole) >= 2

    def harm() -> None:
        for number, digest in enumerate(sorted(whole)):
            path = run.store.path(object_name(digest))
            path.unlink(missing_ok=True) if number % 2 else path.write_bytes(whole[digest][:-3])

    harm()
    assert [each.check(newest) for each in shards(run.store)] == [None, None]
    assert {digest: run.store.read(object_name(digest)) for digest in whole} == whole
    harm()
    assert shards(run.store)[0].fetch(2, newest.state[2]).tobytes() == whole[newest.state[2]][-4 * SIZES[2] :]
    run.commit()  # repeats it
    harm()
    assert shards(run.store)[0].check(run.records[-1]) is None


def test_who_comes_too_late_for_a_version_is_told_so(tmp_path):
    """It went after many newer commits. Over a slow link a member ended one aggregator after the other by asking."""
    run = grown(tmp_path, "average-plain-ema", commits=6)
    newest = run.records[-1]
    old = next(each for each in run.records[1:] if each.state != newest.state)
    shutil.rmtree(tmp_path / "payloads")
    for digest in (old.state[2], old.outer[2], newest.outer[2]):
        run.store.delete(object_name(digest))
    aggregator, node = Aggregator(Ledger(run.store), Objects(run.store), SIZES, 0, 1), NodeThreads(pytest.fail)
    assert node.call(aggregator, "fetch", (2, old.state[2])) == Gone()
    assert node.call(aggregator, "average", (2, old.version)) == Gone()
    np.testing.assert_array_equal(node.call(aggregator, "fetch", (2, newest.state[2])), run.state(newest.version)[2])
    with pytest.raises(Unreachable):  # without the newest no run goes on
        node.call(aggregator, "average", (2, newest.version))
    assert isinstance(node.failure, Missing)


def test_what_cannot_be_computed_again_is_named_with_the_version_to_go_on_from(tmp_path):
    run = grown(tmp_path, "average-int8")
    digest = run.records[-1].state[2]
    run.store.delete(object_name(digest))
    shutil.rmtree(tmp_path / "payloads")
    made = shards(run.store)
    assert isinstance(made[0].check(run.records[-1]), Damage)
    assert made[1].check(run.records[-1]) is None

    over: list[Over] = []
    engine = Inproc(1, over=lambda node, error: over.append(error))
    terms = Terms("run", DIGESTS, 1, 8, 10**6, 4, (), run.outer)
    for number, shard in enumerate(made):
        engine.serve(f"shard-{number}", shard.aggregator)
    addresses, clock = ["shard-0", "shard-1"], lambda: engine.now
    coordinator = Coordinator(Ledger(run.store), addresses, clock, clock)
    opening = coordinator.open(terms, founded=False)
    engine.spawn("coordinator", opening, lambda _: engine.spawn("coordinator", coordinator.run()))
    assert engine.run(lambda: bool(over), 100)
    version = run.records[-1].version
    before = next(record.version for record in reversed(run.records) if record.state != run.records[-1].state)
    assert str(over[0]).startswith(f"commit {version} is damaged: objects/{digest}.safetensors is missing")
    assert str(over[0]).endswith(f"commit {before} is the newest that is intact")


FULL = f"""
import random, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
import numpy as np
from tests.swarm import chains
chains.SIZES = (100_000, 100_000)
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.core.messages import Merge
from tpuswarm.swarm.processes.effects import Unreachable
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.core.arithmetic.outer import Average
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store

folder = Path(sys.argv[1])
run = chains.Run(Store(folder / "run"), random.Random(1), downlink="int8")
run.push(run.members[0])
run.push(run.members[1])
decisions = chains.choose(run.view, run.pending, (), run.staleness)
merge = Merge(1, tuple(decisions), run.outer, 1.0, 1.0, 0.0, None, "")
files = sorted(path.name for path in folder.rglob("*") if path.is_file())
filler = folder / "filler"
with filler.open("wb") as file:
    try:
        while True:
            file.write(bytes(2**16))
            file.flush()
    except OSError:
        pass

def life():
    return NodeThreads(None), Aggregator(Ledger(run.store), Objects(run.store), chains.SIZES, 0, 1)

payload = dict(s=np.zeros(100_000, np.float32))
for method, arguments in (
    ("merge", (run.records[0], merge)),
    ("put", (chains.Identity(run.members[2], 1), 0, payload, tensors.digest(payload))),
):
    node, shard = life()
    try:
        node.call(shard, method, arguments)
    except Unreachable:
        print(node.failure)
filler.unlink()
print(files == sorted(path.name for path in folder.rglob("*") if path.is_file()))
node, shard = life()
part = node.call(shard, "merge", (run.records[0], merge))
record = run.commit()
print((tuple(part.state.values()), tuple(part.outer.values())) == (record.state, record.outer))
"""


def test_a_full_disk_ends_a_shard_with_a_sentence_and_nothing_counted_is_lost(on_small_disk):
    merging, putting, kept, same = on_small_disk(FULL, 8)
    for sentence in (merging, putting):
        assert sentence.endswith("could not be written: the disk is full; make room and start the same command again")
    assert (kept, same) == ("True", "True")

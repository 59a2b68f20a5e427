"""A run rebuilt without a member is sound, and is what float64 says it would have been."""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import FORMS, Run, memory_store
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, gathered_after
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name, to_quantized
from tpuswarm.swarm.storage.rebuild import LEFT_OUT, rebuild
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify


def say(text):
    pass


def deltas(objects: Objects, header, base, fragment: int) -> np.ndarray:
    """Return what a contribution changes, s - A in float64."""
    payload = objects.get_payload(header.identity, fragment, header.digests[fragment])
    if "s" in payload:
        return payload["s"].astype(np.float64) - base
    sent = to_quantized(payload)
    return -sent.decode(0, base.size, np.empty(sent.codes.size * 8 // sent.bits, np.float32)).astype(np.float64)


@settings(max_examples=15)
@given(
    st.integers(0, 2**32), st.sampled_from(["average", "nesterov"]), st.sampled_from(list(FORMS)),
    st.sampled_from([None, MovingAverage(40.0)]),
)  # fmt: skip
def test_rebuilt_run_is_sound_and_counts_everyone_else(seed, rule, downlink, average):
    run = Run(memory_store(), Random(seed), rule=rule, downlink=downlink, average=average)
    run.grow(8)
    target = memory_store()
    excluded = run.members[1].member
    counted = [d for record in run.records for d in record.decisions if d.fate == "applied"]
    if all(d.identity.incarnation.member != excluded for d in counted):
        with pytest.raises(InputError, match="nothing would change"):
            rebuild(run.store, target, excluded.__eq__, None, say)
        return
    done = rebuild(run.store, target, excluded.__eq__, None, say)
    report = verify(target, say)
    assert report.problems == [] and report.newest == run.view.version and not report.not_recomputed
    after = list(Ledger(target).records(range(report.newest + 1)))
    now = [d for record in after for d in record.decisions if d.fate == "applied"]
    assert {d.identity for d in now} == {d.identity for d in counted if d.identity.incarnation.member != excluded}
    left = [d for record in after for d in record.decisions if d.reason == LEFT_OUT]
    assert len(left) == done.contributions == len(counted) - len(now)
    assert sum(d.tokens for d in now) == after[-1].tokens == run.view.tokens - done.tokens
    assert after[: done.first] == run.records[: done.first] and after[done.first] != run.records[done.first]
    if rule == "nesterov":  # each quorum still makes one step of the momentum
        for before, record in pairwise(after):
            share = record.share if any(d.fate == "applied" for d in record.decisions) else 0.0
            assert (record.share, record.gathered) == (share, gathered_after(before.gathered, share))


@pytest.mark.parametrize("seed", range(6))
def test_rebuilt_mean_is_what_float64_says(seed):
    run = Run(memory_store(), Random(seed))
    run.grow(10)
    excluded, target = run.members[seed % 4].member, memory_store()
    if not any(d.fate == "applied" and d.identity.incarnation.member == excluded
               for record in run.records for d in record.decisions):  # fmt: skip
        pytest.fail("it never contributed: choose another seed")
    rebuild(run.store, target, excluded.__eq__, None, say)
    after = Ledger(target).record(run.view.version)
    for fragment in range(len(after.state)):
        expected = run.state(0)[fragment].astype(np.float64)
        for record in run.records[1:]:
            kept = [d for d in record.decisions
                    if d.fate == "applied" and d.identity.incarnation.member != excluded]  # fmt: skip
            whole = sum(d.weight for d in kept)
            for decision in kept:
                header = next(h for h in run.headers if h.identity == decision.identity)
                base = run.state(decision.base)[fragment].astype(np.float64)
                change = deltas(run.objects, header, base, fragment)
                expected = expected + decision.weight / whole * decision.clip * change
        found = Objects(target).get_array(after.state[fragment])
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_deleted_states_are_computed_again_and_lost_payloads_are_named():
    run = Run(memory_store(), Random(3), rule="nesterov")
    run.grow(8)
    excluded = next(d for r in run.records for d in r.decisions if d.fate == "applied").identity.incarnation.member
    whole = memory_store()
    rebuild(run.store, whole, excluded.__eq__, None, say)
    for record in run.records[1:-1]:
        for digest in record.objects:
            if digest not in (*run.records[-1].objects, *run.records[0].state):
                run.store.delete(object_name(digest))
    again = memory_store()
    rebuild(run.store, again, excluded.__eq__, None, say)
    assert Ledger(again).record(run.view.version) == Ledger(whole).record(run.view.version)

    lost = next(d for r in reversed(run.records) for d in r.decisions
                if d.fate == "applied" and d.identity.incarnation.member != excluded)  # fmt: skip
    run.store.delete(payload_name(lost.identity, 0))
    with pytest.raises(RunFailed, match="--keep-payloads all"):
        rebuild(run.store, memory_store(), excluded.__eq__, None, say)


def test_damaged_original_is_not_rebuilt(tmp_path: Path):
    run = Run(Store(tmp_path), Random(1))
    run.grow(4)
    (tmp_path / "commits" / "000002.json").write_text("{}")
    with pytest.raises(RunFailed, match=r"000002\.json"):
        rebuild(run.store, memory_store(), lambda name: True, None, say)

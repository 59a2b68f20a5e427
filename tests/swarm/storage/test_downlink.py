"""The quantized downlink: its updates add up (invariants 7, 10 and 13) to the exact bits of the ledger."""

import random

import numpy as np
import pytest

from tests.swarm.chains import SIZES, Run
from tests.swarm.core.arithmetic.test_outer import f32, normal
from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, apply_updates, commit_fragment, initial_state
from tpuswarm.swarm.core.arithmetic.quantize import BITS, Quantized, empty, encode, feedback
from tpuswarm.swarm.storage.downlink import chain
from tpuswarm.swarm.storage.objects import object_name
from tpuswarm.swarm.storage.store import Store

quantized = pytest.mark.parametrize("form", ["int8", "int4"])


def committed(theta, state, contributions, outer):
    new, after, sent = np.empty_like(theta), np.empty_like(state), empty(theta.size, BITS[outer.downlink])
    commit_fragment(theta, state, contributions, outer, outer.rate or 1.0, 1.0, new, after, sent)
    return new, after, sent


@quantized
@pytest.mark.parametrize("rule", ["average", "nesterov"])
def test_applied_and_unsent_deltas_of_both_links_add_up_to_all_training(form, rule):
    """Invariant 10, against sums in float64."""
    numbers, size, bits = np.random.default_rng(0), 1000, BITS[form]
    outer = OuterRule(rule, downlink=form) if rule == "average" else OuterRule(rule, 0.0, 1.0, form)
    start = theta = normal(numbers, size)
    state, unsent = initial_state(outer, np.zeros(size, f32)), np.zeros(size, f32)
    assert state is not None
    trained, sent_down = np.zeros(size), np.zeros(size)
    for _ in range(60):
        delta = f32(0.01) * normal(numbers, size)
        wanted = delta + unsent
        codes = encode(wanted, bits)
        unsent = feedback(wanted, *codes, bits)
        contribution = Contribution(1.0, 1.0, theta, Quantized(*codes, bits))
        theta, state, sent = committed(theta, state, [contribution], outer)
        trained += delta
        sent_down += apply_updates(np.zeros(size, f32), [sent])
    np.testing.assert_allclose(theta, start + sent_down, rtol=0, atol=60 * 2.0**-22)
    np.testing.assert_allclose(theta + state[-1] - unsent, start - trained, rtol=0, atol=60 * 2.0**-21)
    assert np.abs(start - trained - theta).max() > 1e-4  # the unsent deltas are not negligible


@pytest.mark.parametrize(("form", "longest"), [("int8", 3), ("int4", 7)])
def test_updates_are_sent_while_they_are_smaller_than_the_version(tmp_path, form, longest):
    run = Run(Store(tmp_path), random.Random(1), downlink=form)
    while len(run.records) < 30:
        run.push(run.members[0], finite=len(run.records) % 3 > 0)  # every third commit has no contributor
        run.commit()

    def found(base, version, fragment=2):
        return chain(run.ledger, run.objects, fragment, SIZES[fragment], base, version)

    seen = set()
    for base in range(0, 20, 4):
        for version in range(base, base + 10):
            changes = run.records[version].changes - run.records[base].changes
            made = found(base, version)
            assert (made is None) == (changes > longest)
            if made is not None and version % 3 == 0:
                seen.add(len(made.updates))
                theta = made.on(run.state(base)[2])
                assert theta is not None and theta.tobytes() == run.state(version)[2].tobytes()
                assert made.on(run.state(base)[2] + f32(1)) is None
    assert seen == set(range(longest + 1)) or form == "int4"
    changed = next(record for record in run.records[1:] if record.updates)
    run.store.path(object_name(changed.updates[2])).write_bytes(b"")
    assert found(changed.version - 1, changed.version) is None
    assert found(changed.version - 1, changed.version, 0) is not None


def test_run_without_quantized_updates_sends_whole_versions(tmp_path):
    run = Run(Store(tmp_path), random.Random(1)).grow(2)
    assert run.records[2].changes == 2
    assert chain(run.ledger, run.objects, 0, SIZES[0], 1, 2) is None

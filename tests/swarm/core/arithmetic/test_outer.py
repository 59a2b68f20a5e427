"""A commit: contributions are merged, and the outer step is taken; against float64 and optax, or bit for bit."""

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuswarm.swarm.core.arithmetic import merge
from tpuswarm.swarm.core.arithmetic import outer as module
from tpuswarm.swarm.core.arithmetic.merge import Contribution, average, update
from tpuswarm.swarm.core.arithmetic.outer import (
    MovingAverage,
    OuterRule,
    advance_quorum,
    commit_fragment,
    initial_state,
    state_rows,
)
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE, Quantized, decode, empty, encode

f32 = np.float32
seeds = st.integers(0, 2**32 - 1)


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(f32)


def stepped(theta, outer_state, u, outer, rate, share, momentum_step):
    """outer_state: the momentum and its buffer, which is 0 where it may be left out."""
    out_theta, (momentum, buffer) = np.full_like(theta, np.nan), np.full_like(outer_state, np.nan)
    before, after = outer_state[1] if outer_state[1].any() else None, None if momentum_step else buffer
    module.nesterov_step(theta, outer_state[0], before, u, outer, rate, share, out_theta, momentum, after)
    return out_theta, np.stack([momentum, np.zeros_like(theta) if momentum_step else buffer])


@pytest.mark.parametrize(
    ("contributors", "rate"),
    [(1, 0.4), (1.49, 0.4), (1.5, 0.6), (2, 0.6), (4.4, 0.6), (5, 0.7), (7.4, 0.7), (7.5, 0.8), (8, 0.8), (300, 0.8)],
)
def test_rate_follows_the_effective_contributors(contributors, rate):
    assert OuterRule("nesterov").rate_for(contributors) == rate
    assert OuterRule("nesterov", rate=0.5).rate_for(contributors) == 0.5
    assert OuterRule("average").rate_for(contributors) == 1.0


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match=r"average takes no rate, but 0\.7 was given"):
        OuterRule("average", rate=0.7)
    with pytest.raises(ValueError, match=r"averaged arrays \(1\) need a plain downlink, not int8"):
        OuterRule("nesterov", downlink="int8", averaged=((0, 1, 2),))


def test_quorum_of_single_arrivals_makes_one_momentum_step():
    for quorum in range(1, 60):
        gathered, steps = 0.0, []
        for _ in range(3 * quorum):
            share, gathered = advance_quorum(OuterRule("nesterov"), gathered, 1, quorum)
            assert share == 1 / quorum and 0 <= gathered < 1
            steps.append(gathered == 0)
        assert steps == ([False] * (quorum - 1) + [True]) * 3


def test_share_of_a_commit_is_what_it_adds_to_a_quorum_of_four():
    cases = [(0.0, 4, 1.0, 0.0), (0.0, 7, 1.0, 0.0), (0.5, 1, 0.25, 0.75), (0.75, 3, 0.75, 0.0), (0.75, 0, 0.0, 0.75)]
    for gathered, arrivals, share, after in cases:
        assert advance_quorum(OuterRule("nesterov"), gathered, arrivals, 4) == (share, after)
    assert advance_quorum(OuterRule("average"), 0.0, 1, 4) == (1.0, 0.0)


@given(seed=seeds, rate=st.floats(0.1, 1.0), momentum=st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=20)
def test_whole_quorum_is_the_step_of_optax_bit_for_bit(seed, rate, momentum):
    random = np.random.default_rng(seed)
    theta, outer_state = normal(random, 300), np.zeros((2, 300), f32)
    optimizer = optax.sgd(rate, momentum, nesterov=True)
    parameters = theta
    state = optimizer.init(parameters)
    for _ in range(4):
        u = normal(random, 300)
        theta, outer_state = stepped(theta, outer_state, u, OuterRule("nesterov", momentum), rate, 1.0, True)
        updates, state = optimizer.update(u, state)  # not jitted: one operation at a time
        parameters = optax.apply_updates(parameters, updates)
        assert np.array_equal(theta, parameters)
    assert not outer_state[1].any()


@given(seed=seeds, quorum=st.integers(1, 6), momentum=st.sampled_from([0.0, 0.9]))
@settings(max_examples=25)
def test_partial_commits_move_as_far_as_one_step_on_their_mean(seed, quorum, momentum):
    random, outer = np.random.default_rng(seed), OuterRule("nesterov", momentum)
    start, before = normal(random, 300), np.stack([normal(random, 300), np.zeros(300, f32)])
    updates = normal(random, quorum, 300)
    theta, outer_state, gathered = start, before, 0.0
    for u in updates:
        share, gathered = advance_quorum(outer, gathered, 1, quorum)
        theta, outer_state = stepped(theta, outer_state, u, outer, 0.6, share, gathered == 0)
    assert gathered == 0
    mean = updates.mean(axis=0, dtype=np.float64)
    velocity = momentum * before[0].astype(np.float64) + mean
    np.testing.assert_allclose(theta, start - 0.6 * (mean + momentum * velocity), rtol=0, atol=1e-5)
    np.testing.assert_allclose(outer_state, [velocity, np.zeros(300)], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("members", "at_once"), [(2, 1), (8, 4), (8, 1), (3, 2)])
def test_members_that_push_apart_move_theta_as_far_as_together(members, at_once):
    outer, u = OuterRule("nesterov"), np.ones(1, f32)

    def moved(parts: list[int]) -> float:
        theta, outer_state, gathered = np.zeros(1, f32), np.zeros((2, 1), f32), 0.0
        for _ in range(40):
            for part in parts:
                share, gathered = advance_quorum(outer, gathered, part, members)
                rate = outer.rate_for(part, share)
                theta, outer_state = stepped(theta, outer_state, u, outer, rate, share, gathered == 0)
        return float(theta[0])

    parts = [at_once] * (members // at_once) + [members % at_once] * (members % at_once > 0)
    assert moved(parts) == pytest.approx(moved([members]), rel=1e-4)


@pytest.mark.parametrize("rule", ["average", "nesterov"])
@pytest.mark.parametrize("size", [300, 3 * merge.CHUNK_SIZE + 5])
def test_averaged_ranges_lie_between_the_snapshots(rule, size):
    """All others are as without them. One contribution's base is old; the next state overwrites theta."""
    random, outer = np.random.default_rng(0), OuterRule(rule)
    theta, old = np.abs(normal(random, 2, size))
    rows = initial_state(outer, theta)
    given = [
        Contribution(0.25, 1.0, theta, np.abs(normal(random, size))),
        Contribution(0.75, 0.5, old, np.abs(normal(random, size))),
    ]
    means = [slice(3, 50), slice(size - 200, size - 1)]
    results = []
    for averaged in ([], means):
        new, new_rows = theta.copy(), None if rows is None else np.zeros((1, size), f32)
        commit_fragment(new, rows, given, outer, 1.0, 1.0, new, new_rows, averaged=averaged)
        results.append(new)
    without, found = results
    clipped = old + f32(0.5) * (given[1].payload - old)
    wanted = f32(0.25) * given[0].payload + f32(0.75) * clipped
    inside = np.zeros(size, bool)
    for part in means:
        inside[part] = True
    np.testing.assert_array_equal(found[~inside], without[~inside])
    np.testing.assert_array_equal(found[inside], wanted[inside])
    assert (found[inside] >= 0).all() and (without[inside] < 0).any()


@pytest.mark.parametrize("rule", ["average", "nesterov"])
@pytest.mark.parametrize("downlink", ["plain", "int8"])
@pytest.mark.parametrize("size", [300, 2 * merge.CHUNK_SIZE + 5])
def test_moving_average_is_of_the_published_states_and_changes_none(rule, downlink, size):
    """Against the recurrence in float64. Members push one by one, so that the momentum's buffer comes and goes."""
    random, average = np.random.default_rng(0), MovingAverage(half_life=64, share=0.5)
    start = normal(random, size)
    with_it, without = OuterRule(rule, downlink=downlink, average=average), OuterRule(rule, downlink=downlink)
    states, kept = {outer: [start] for outer in (with_it, without)}, []
    last = {outer: initial_state(outer, start) for outer in states}
    gathered = 0.0
    for number in range(5):
        share, gathered = advance_quorum(with_it, gathered, 1, 2)
        kept.append(average.kept(32, 32 * (number + 1)))
        delta = normal(random, size)
        for outer, made in states.items():
            theta, rows = made[-1], state_rows(outer, gathered)
            new, after = np.empty_like(theta), np.empty((rows, size), f32) if rows else None
            sent = None if downlink == "plain" else empty(size, 8)
            given = [Contribution(1.0, 1.0, theta, theta - delta)]
            commit_fragment(theta, last[outer], given, outer, 0.5, share, new, after, sent, kept=kept[-1])
            made.append(new)
            last[outer] = after
    for one, other in zip(*states.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    wanted = start.astype(np.float64)
    for left, state in zip(kept, states[with_it][1:], strict=True):
        wanted = left * wanted + (1 - left) * state
    np.testing.assert_allclose(last[with_it][module.average_row(downlink)], wanted, rtol=1e-5, atol=1e-5)
    assert kept == [0.5 ** (32 / min(64, 16 * count)) for count in range(1, 6)]


def committed(theta, outer_state, contributions, outer, share=1.0, gathered=0.0):
    rate = outer.rate_for(len(contributions))
    out_theta = np.full_like(theta, np.nan)
    rows = state_rows(outer, gathered)
    out_outer = np.full((rows, theta.size), np.nan, f32) if rows else None
    commit_fragment(theta, outer_state, contributions, outer, rate, share, out_theta, out_outer)
    return out_theta, out_outer


@pytest.mark.parametrize("momentum_step", [True, False])
@given(seed=seeds, chunk=st.sampled_from([BLOCK_SIZE, 3 * BLOCK_SIZE, 2**16]))
@settings(max_examples=20)
def test_commit_is_the_merge_and_then_the_step_at_any_chunk_size(momentum_step, seed, chunk):
    random, outer = np.random.default_rng(seed), OuterRule("nesterov")
    theta, outer_state = normal(random, 1000), normal(random, 2, 1000)
    contributions = [Contribution(0.5, 1.0, theta, normal(random, 1000))]
    contributions += [Contribution(0.5, 0.3, normal(random, 1000), Quantized(*encode(normal(random, 1000), 4), 4))]
    u, mean = np.empty_like(theta), np.empty_like(theta)
    update(contributions, u)
    average(theta, contributions, mean)
    want_theta, want_outer = stepped(theta, outer_state, u, outer, 0.6, 0.5, momentum_step)
    want_outer = want_outer[: state_rows(outer, 0.0)] if momentum_step else want_outer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK_SIZE", chunk)
        gathered = 0.0 if momentum_step else 0.5
        got_theta, got_outer = committed(theta, outer_state, contributions, outer, 0.5, gathered)
        assert committed(theta, None, contributions, OuterRule("average"))[0].tobytes() == mean.tobytes()
        commit_fragment(
            theta, outer_state, contributions, outer, 0.6, 0.5, theta, outer_state[: len(want_outer)]
        )  # in place
    assert got_theta.tobytes() == want_theta.tobytes() == theta.tobytes()
    assert got_outer.tobytes() == want_outer.tobytes() == outer_state[: len(want_outer)].tobytes()


def state(random: np.random.Generator, size: int) -> np.ndarray:
    values = np.where(random.random(size) < 0.1, random.choice([0.0, -0.0], size), random.standard_normal(size))
    return values.astype(f32)


def random_round(seed: int, size: int, count: int):
    random = np.random.default_rng(seed)
    theta = state(random, size)
    weights = random.dirichlet(np.ones(count))
    contributions = []
    for weight in weights:
        base = theta if random.random() < 0.5 else theta + (0.01 * state(random, size))
        s = np.where(random.random(size) < 0.1, base, base - f32(0.1) * state(random, size)).astype(f32)
        chosen = random.choice(np.array([None, 8, 4], object))
        payload = s if chosen is None else Quantized(*encode(base - s, chosen), chosen)
        clip = 1.0 if random.random() < 0.5 else float(random.random())
        contributions.append(Contribution(float(weight), clip, base, payload))
    return theta, contributions


def exactly(theta: np.ndarray, contributions: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    mean, u = np.zeros(theta.size), np.zeros(theta.size)
    for contribution in contributions:
        base, payload = contribution.base.astype(np.float64), contribution.payload
        quantized = isinstance(payload, Quantized)
        delta = decode(payload.codes, payload.scales, theta.size, payload.bits) if quantized else base - payload
        mean += contribution.weight * (theta.astype(np.float64) - contribution.clip * delta)
        u += contribution.weight * contribution.clip * delta
    return mean, u


@given(seeds, st.sampled_from([0, 1, 300, 1000]), st.integers(1, 5))
def test_sums_are_as_defined(seed, size, count):
    theta, contributions = random_round(seed, size, count)
    wanted_mean, wanted_u = exactly(theta, contributions)
    u = np.full_like(theta, np.nan)
    update(contributions, u)
    np.testing.assert_allclose(u, wanted_u, rtol=0, atol=20 * 2.0**-24)
    average(theta, contributions, theta)  # in place, over a base that may be the same array
    np.testing.assert_allclose(theta, wanted_mean, rtol=0, atol=20 * 2.0**-24)


@given(seeds)
def test_snapshot_of_a_single_member_comes_back_bit_for_bit(seed):
    random = np.random.default_rng(seed)
    theta, s = state(random, 700), state(random, 700)
    out = np.empty_like(theta)
    average(theta, [Contribution(1.0, 1.0, theta.copy(), s)], out)
    assert out.tobytes() == s.tobytes()


def test_signs_of_zeros_are_exact():
    minus, out = np.full(3, -0.0, f32), np.empty(3, f32)
    average(minus, [Contribution(0.5, 1.0, minus, minus)] * 2, out)
    assert np.signbit(out).all()  # the sum starts with its first term, not with 0.0
    average(-minus, [Contribution(1.0, 1.0, minus, minus)], out)
    assert not np.signbit(out).any()  # the base differs from theta: -0.0 + (0.0 - -0.0)


def test_quantized_delta_is_applied_exactly():
    """Otherwise error feedback would not add up: A - (A - d) is not d."""
    random = np.random.default_rng(0)
    base, delta = state(random, 1000), f32(1e-3) * state(random, 1000)
    payload = Quantized(*encode(delta, 8), 8)
    out = np.empty_like(base)
    update([Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, decode(payload.codes, payload.scales, 1000, 8))
    average(base, [Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, base - decode(payload.codes, payload.scales, 1000, 8))

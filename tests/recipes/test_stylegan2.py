"""StyleGAN2's step on one device and on four."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.recipes.stylegan2 import augment
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options

pytestmark = pytest.mark.long
TINY = {"resolution": 8, "latent": 4, "mapping": 1, "channels": 4, "most_channels": 4, "group": 2}
BATCH = 8


@pytest.fixture(scope="module")
def recipe():
    return StyleGAN2(**TINY)


@pytest.fixture(scope="module")
def one(recipe):
    return compile_step(recipe, Request(batch=BATCH), jax.devices()[:1])


def clock(step):
    return Clock(jax.random.fold_in(jax.random.key(5), step), np.int32(step), np.float32(0))


def rows(recipe, step):
    return recipe.data("train").rows(step * BATCH, BATCH)


def train(recipe, compiled, state, steps):
    """Take the steps; return a copy of the state after each, and its metrics."""
    states, history = [], []
    for step in steps:
        state, metrics = compiled.step(state, rows(recipe, step), clock(step))
        states.append(jax.tree.map(np.array, state))
        history.append(jax.device_get(metrics))
    return states, history


@pytest.fixture(scope="module")
def fresh(one):
    return jax.tree.map(np.array, one.init(jax.random.key(1)))


@pytest.fixture(scope="module")
def trained(recipe, one, fresh):
    return train(recipe, one, fresh, range(18))


def test_regularisers_take_their_turn_at_their_intervals(trained):
    _, history = trained
    changed = {
        name: [step for step in range(1, 18) if history[step][name] != history[step - 1][name]]
        for name in ("r1", "path_mean")
    }
    assert changed == {"r1": [16], "path_mean": [4, 8, 12, 16]}
    first, fifth = history[0], history[4]
    assert first["r1"] > 0 and first["path_mean"] > 0
    assert fifth["path_mean"] == pytest.approx(first["path_mean"], rel=0.2), "it begins with the first length"
    assert all(np.isfinite(list(metrics.values())).all() for metrics in history)


def test_every_saved_state_continues_bit_for_bit(recipe, one, trained):
    states, _ = trained
    for step in range(1, 18):
        [resumed], _ = train(recipe, one, states[step - 1], [step])
        assert all(map(np.array_equal, jax.tree.leaves(resumed), jax.tree.leaves(states[step])))


def test_four_devices_learn_what_one_does(recipe, fresh, trained, devices):
    """Each device has a whole group, so that minibatch deviation is taken over the same pictures."""
    states, history = train(recipe, compile_step(recipe, Request(batch=BATCH), devices[:4]), fresh, range(3))
    expected_states, expected = trained
    for name, value in history[2].items():
        assert value == pytest.approx(expected[2][name], rel=2e-3, abs=1e-5), name
    for a, b in zip(*(jax.tree.leaves(found[2].average) for found in (states, expected_states)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("broken", ["generator", "discriminator"])
def test_broken_network_makes_the_loss_nan(recipe, one, fresh, broken):
    network = jax.tree.map(lambda leaf: leaf * np.nan, getattr(fresh, broken))
    _, [metrics] = train(recipe, one, dataclasses.replace(fresh, **{broken: network}), [0])
    assert np.isnan(metrics["loss"])


def test_held_out_rest_is_scored_in_whole_groups_and_counts_once(recipe, fresh):
    program, scored = recipe.program(Options()), []

    def score(params, pictures):
        scored.append(np.asarray(pictures[:, 0, 0, 0] * 127.5 + 127.5).round())
        return jnp.arange(100.0, 100 + len(pictures))

    program._score = score
    values = program.evaluate(fresh, {"pictures": np.full((3, 8, 8, 3), [[[[1]]], [[[2]]], [[[3]]]], np.uint8)})
    np.testing.assert_array_equal(scored[0], [1, 2, 3, 1])
    assert len(scored[1]) == 4
    assert values["d_loss"] == pytest.approx(101), "the mean of 100, 101 and 102"


def test_swarm_shares_both_networks_and_the_mean_code(one, trained):
    state = trained[0][-1]
    program = one.program
    shared = program.exchange().get(state)
    parameters = program.parameters(state)
    names = [parameter.path for parameter in parameters]
    assert len(names) == len(jax.tree.leaves(shared)) and "w_mean" in names
    assert [parameter.path for parameter in parameters if parameter.statistic] == ["w_mean"]
    assert {name.split("/")[0] for name in names} == {"discriminator", "generator", "w_mean"}
    fresh = program.init(jax.random.key(3), shared)
    for mean, given in zip(jax.tree.leaves(fresh.average), jax.tree.leaves(shared["generator"]), strict=True):
        np.testing.assert_array_equal(mean, given)
    back = program.exchange().put(fresh, shared)
    assert jax.tree.structure(back) == jax.tree.structure(fresh)


def test_grid_shows_the_averaged_generator_and_follows_seed_and_truncation(recipe, trained):
    state = trained[0][-1]

    def grid(truncation=1.0, seed=0):
        return next(recipe.grids(state, 2, 3, truncation=truncation, seed=seed))

    assert grid().shape == (16, 24, 3) and grid().dtype == np.uint8
    np.testing.assert_array_equal(grid(), grid())
    assert (grid() != grid(seed=1)).any()
    np.testing.assert_array_equal(grid(truncation=0.0), grid(truncation=0.0, seed=1))
    other = dataclasses.replace(state, generator=jax.tree.map(np.zeros_like, state.generator))
    walk = list(recipe.grids(state, 2, 3, truncation=1.0, seed=0, count=8))
    np.testing.assert_array_equal(walk[0], grid())
    closed = np.stack([*walk, walk[0]]).astype(int)
    steps = np.abs(np.diff(closed, axis=0)).mean((1, 2, 3))
    across = np.abs(walk[0].astype(int) - walk[4].astype(int)).mean()
    assert len(walk) == 8 and 0 < steps.max() < across, "a walk of small steps that comes back"
    np.testing.assert_array_equal(next(recipe.grids(other, 2, 3, truncation=1.0, seed=0)), grid())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_r1_differentiates_by_the_pictures_before_augmentation_and_hides_no_overflow(fresh, monkeypatch):
    """Pictures that the augmentation doubles have twice the gradient."""
    recipe = StyleGAN2(**TINY, r1=1e38)
    program, real = recipe.program(Options()), rows(recipe, 0)["pictures"]

    def regularise(pictures):
        after = jax.jit(lambda state, real: program._regularise_discriminator(state, real, jax.random.key(0)))
        return jax.device_get(after(fresh, pictures))

    real = jnp.asarray(real, jnp.float32) / 128 - 1
    assert program._adapt
    monkeypatch.setattr(augment, "augment", lambda x, *_: x)
    plain = regularise(2 * real)
    monkeypatch.setattr(augment, "augment", lambda x, *_: 2 * x)
    assert regularise(real).seen["r1"] == pytest.approx(4 * plain.seen["r1"], rel=1e-4)
    # The authors' code replaces a gradient that overflows by 0, silently; here it reaches the parameters.
    assert np.isfinite(plain.seen["r1"])
    checked = jax.tree.leaves(program.exchange().get(plain))  # what a run checks before it saves
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(plain.discriminator))
    assert not all(np.isfinite(leaf).all() for leaf in checked)

"""Optimizers other than AdamW: those that need the loss, and GPT-2's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Weighted, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.recipe import Options

RATE = 3e-3


def train(recipe, steps, **options):
    """Return the states before and after each step on the same batch, and the losses."""
    program, batch = recipe.program(Options(**options)), recipe.data("train").rows(0, 16)
    step, states, losses = jax.jit(program.step), [jax.jit(program.init)(jax.random.key(0))], []
    for index in range(steps):
        state, metrics = step(states[-1], batch, toy.clock(index, index / steps))
        states.append(state)
        losses.append(float(metrics["loss"]))
    return states, losses


def test_rate_that_follows_the_loss_falls_on_a_plateau():
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    states, _ = train(supervised(toy.init, toy.loss, optimizer, toy.data()), 9)
    assert float(optax.tree.get(states[-1].opt, "scale")) == pytest.approx(0.5**4)


def summed_loss(params, batch, key):
    loss, metrics = toy.loss(params, batch, key)
    return Weighted(loss * len(batch["y"]), len(batch["y"])), metrics


@pytest.mark.parametrize(("loss", "accumulate"), [(toy.loss, 1), (summed_loss, 4)])
def test_line_search_sees_the_loss_of_the_whole_batch(loss, accumulate):
    """L-BFGS solves a least-squares problem of 6 unknowns in a few steps."""
    recipe = supervised(toy.init, loss, optax.lbfgs(), toy.data())
    _, losses = train(recipe, 12, accumulate=accumulate, freeze="unused")
    assert losses[-1] < 1e-6 * losses[0] and losses == sorted(losses, reverse=True)


def gpt2(optimizer, **options):
    shape = {"layers": 2, "heads": 1, "width": 32, "context": 8, "vocab": 128} | options
    return GPT2(data="fake", **shape, optimizer=optimizer, lr=RATE, warmup=0.0, weight_decay=0.0)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_gpt2_learns_with_other_optimizers_and_a_frozen_part(name):
    states, losses = train(gpt2(name), 12, freeze="wpe", decay="/w$", clip=1.0)
    assert losses[-1] < 0.93 * losses[0]
    before, after = (state.params for state in states[:2])
    np.testing.assert_array_equal(before["wpe"], states[-1].params["wpe"])
    # Muon's updates are orthogonal for each layer's matrix by itself, and of AdamW's size.
    for layer in range(2 * (name == "muon")):
        update = (after["blocks"]["mlp"]["fc"]["w"] - before["blocks"]["mlp"]["fc"]["w"])[layer] / RATE
        values = np.linalg.svd(np.asarray(update), compute_uv=False)
        assert np.allclose(values[:16] / (0.2 * np.sqrt(128)), 1.0, atol=0.35)  # of five iterations
        assert np.sqrt(np.mean(np.square(update))) == pytest.approx(0.2, rel=0.25)
        embedding = (after["wte"] - before["wte"]) / RATE
        assert np.abs(embedding).max() == pytest.approx(1 + 0.9 * 0.1 / 0.19, rel=1e-2)  # Adam's, with Nesterov


def abstract_state(recipe, **options):
    return jax.eval_shape(recipe.program(Options(**options)).init, jax.random.key(0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_in_bf16_take_half_the_bytes(name):
    recipe = gpt2(name, moments="bf16")
    state = abstract_state(recipe, freeze="wpe")
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params)) - state.params["wpe"].size
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt) if leaf.dtype == jnp.bfloat16) == trained
    assert GPT2(**recipe.options()).options() == recipe.options() and recipe.options()["moments"] == "bf16"
    assert recipe.options().get("optimizer") == (None if name == "adamw" else name)
    assert "moments" not in gpt2(name).options()


def test_adafactor_and_muon_have_less_state_than_adamw():
    states = (abstract_state(gpt2(name, width=128)).opt for name in ("adamw", "muon", "adafactor"))
    adamw, muon, adafactor = (sum(leaf.size for leaf in jax.tree.leaves(state)) for state in states)
    assert adafactor < 0.05 * adamw and muon < 0.65 * adamw


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean adamw"),
        ({"moments": "bf61"}, "unknown moments 'bf61'; did you mean bf16"),
        ({"optimizer": "adafactor", "moments": "bf16"}, "adafactor has no first moment"),
    ],
)
def test_unknown_optimizer_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        GPT2(data="fake", **options)

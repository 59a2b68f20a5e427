"""Optimizers of other kinds than AdamW: those that ask for the loss, and GPT-2's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, Weighted, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.recipe import Clock, Options

RATE = 3e-3


def step_of(recipe, steps=1, **options):
    """The states before some steps over the same batch and after each, and the losses."""
    program = recipe.program(Options(**options))
    batch = recipe.data("train").rows(0, 16)
    key = jax.random.key(0)
    step, states, losses = jax.jit(program.step), [jax.jit(program.init)(key)], []
    for index in range(steps):
        state, metrics = step(states[-1], batch, Clock(key, np.int32(index), np.float32(index / steps)))
        states.append(state)
        losses.append(float(metrics["loss"]))
    return states, losses


def test_a_rate_that_follows_the_loss_falls_on_a_plateau(tmp_path):
    made = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    run = Trainer(devices=1).fit(
        supervised(toy.init, toy.loss, made, toy.splits), steps=9, batch=64, run=tmp_path / "a"
    )
    assert float(optax.tree.get(run.state.opt, "scale")) == pytest.approx(0.5**4)


@pytest.mark.parametrize("count", [1, 4])
def test_a_line_search_sees_the_loss_of_the_whole_batch(count):
    """L-BFGS solves a least-squares problem of 6 unknowns in a few steps, from whatever is its objective's form."""

    def summed(params, batch, key):
        loss, metrics = toy.loss(params, batch, key)
        return Weighted(loss * len(batch["y"]), len(batch["y"])), metrics

    loss_of = {1: toy.loss, 4: summed}
    made = supervised(toy.init, loss_of[count], optax.lbfgs(), toy.splits)
    _, losses = step_of(made, 12, accumulate=count, freeze="unused")
    assert losses[-1] < 1e-6 * losses[0] and losses == sorted(losses, reverse=True)


def gpt2(optimizer, **options):
    shape = {"layers": 2, "heads": 1, "width": 32, "context": 8, "vocab": 128} | options
    return GPT2(data="fake", **shape, optimizer=optimizer, lr=RATE, warmup=0.0, weight_decay=0.0)


def learnt(name):
    """The states of a GPT-2 that has learnt something with one part of it frozen."""
    states, losses = step_of(gpt2(name), 12, freeze="wpe", decay="/w$", clip=1.0)
    assert losses[-1] < 0.93 * losses[0]
    np.testing.assert_array_equal(states[0].params["wpe"], states[-1].params["wpe"])
    return states


def test_gpt2_learns_with_adafactor():
    learnt("adafactor")


def test_gpt2_learns_with_muon_which_turns_each_layers_matrix_by_itself():
    """The singular values of its update are near to one another, but the smallest, and it has AdamW's size."""
    begun, after, *_ = learnt("muon")
    for layer in range(2):
        update = (after.params["blocks"]["mlp"]["fc"]["w"] - begun.params["blocks"]["mlp"]["fc"]["w"])[layer] / RATE
        values = np.linalg.svd(np.asarray(update), compute_uv=False)
        assert np.allclose(values[:16] / (0.2 * np.sqrt(128)), 1.0, atol=0.35)  # of five iterations
        assert np.sqrt(np.mean(np.square(update))) == pytest.approx(0.2, rel=0.25)
    flat = (after.params["wte"] - begun.params["wte"]) / RATE
    assert np.abs(flat).max() == pytest.approx(1 + 0.9 * 0.1 / 0.19, rel=1e-2)  # Adam's, with Nesterov's momentum


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_take_half_the_bytes_where_asked(name):
    recipe = gpt2(name, moments="bf16")
    state = jax.eval_shape(recipe.program(Options(freeze="wpe")).init, jax.random.key(0))
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params)) - state.params["wpe"].size
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt) if leaf.dtype == jnp.bfloat16) == trained
    assert GPT2(**recipe.options()).options() == recipe.options() and recipe.options()["moments"] == "bf16"
    assert recipe.options().get("optimizer") == (None if name == "adamw" else name)
    assert "moments" not in gpt2(name).options()


def test_adafactor_keeps_a_fraction_of_the_state():
    sizes = {
        name: sum(
            leaf.size
            for leaf in jax.tree.leaves(jax.eval_shape(gpt2(name, width=128).program(Options()).init, key).opt)
        )
        for name in ("adamw", "muon", "adafactor")
        for key in [jax.random.key(0)]
    }
    assert sizes["adafactor"] < 0.05 * sizes["adamw"] and sizes["muon"] < 0.65 * sizes["adamw"]


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(InputError, match="unknown optimizer 'adam'; did you mean adamw"):
        GPT2(data="fake", optimizer="adam")
    with pytest.raises(InputError, match="unknown moments 'bf61'; did you mean bf16"):
        GPT2(data="fake", moments="bf61")
    with pytest.raises(InputError, match="adafactor has no first moment"):
        GPT2(data="fake", optimizer="adafactor", moments="bf16")

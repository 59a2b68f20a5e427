"""Optimizers, learning rates and the loss of language models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.test_optimization import train
from tpuswarm import InputError, Trainer
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.recipe import Options

RATE = 3e-3


def gpt2(optimizer, **options):
    shape = {"layers": 2, "heads": 1, "width": 32, "context": 8, "vocab": 128} | options
    return GPT2(data="fake", **shape, optimizer=optimizer, lr=RATE, warmup=0.0, weight_decay=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_gpt2_learns_with_other_optimizers_and_a_frozen_part(name):
    states, metrics = train(gpt2(name), 12, freeze="wpe", decay="/w$", clip=1.0)
    assert metrics[-1]["loss"] < 0.93 * metrics[0]["loss"]
    before, after = (state.params for state in states[:2])
    np.testing.assert_array_equal(before["wpe"], states[-1].params["wpe"])
    # Muon's updates are orthogonal for each layer's matrix by itself, and of AdamW's size.
    for layer in range(2 * (name == "muon")):
        update = (after["blocks"]["mlp"]["fc"]["w"] - before["blocks"]["mlp"]["fc"]["w"])[layer] / RATE
        values = np.linalg.svd(np.asarray(update), compute_uv=False)
        assert np.allclose(values[:16] / (0.2 * np.sqrt(128)), 1.0, atol=0.35)  # after five iterations
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


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [0.011, 1.1, 0.9536, 0.6, 0.2464, 0.1302, 0.1]),
        ("linear", [0.011, 1.1, 0.85, 0.6, 0.35, 0.2111, 0.1]),
        ("wsd", [0.011, 1.1, 1.1, 1.1, 1.1, 0.6, 0.1]),
    ],
)
def test_learning_rate_follows_its_schedule(schedule, rates):
    recipe = GPT2(data="fake", lr=1.1, lr_end=0.1, warmup=0.1, schedule=schedule)
    shares = jnp.array([0, 0.1, 0.325, 0.55, 0.775, 0.9, 1])
    np.testing.assert_allclose(recipe.schedule(shares), rates, atol=1e-4)
    assert recipe.options().get("schedule", "cosine") == schedule


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean adamw"),
        ({"schedule": "wds"}, "unknown schedule 'wds'; did you mean wsd"),
        ({"moments": "bf61"}, "unknown moments 'bf61'; did you mean bf16"),
        ({"optimizer": "adafactor", "moments": "bf16"}, "adafactor has no first moment"),
    ],
)
def test_unknown_optimizer_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        GPT2(data="fake", **options)


@pytest.mark.parametrize(
    ("begun", "now", "words"),
    [
        ({"z_loss": 0.1}, {}, "z_loss was 0.1, now the default"),
        ({"schedule": "wsd"}, {}, "schedule was wsd, now the default"),
        ({}, {"schedule": "wsd"}, "schedule was the default, now wsd"),
    ],
)
def test_option_of_a_run_cannot_change_from_or_to_its_default(tmp_path, begun, now, words):
    Trainer(devices=1).fit(gpt2("adamw", **begun), steps=1, batch=8, run=tmp_path / "run")
    with pytest.raises(InputError, match=words):
        Trainer(devices=1).fit(gpt2("adamw", **now), steps=1, batch=8, run=tmp_path / "run")

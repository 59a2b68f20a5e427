import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import Trainer, supervised
from tpuswarm.errors import InputError
from tpuswarm.train.loop.learning_rate import steepest

CURVATURE = 50.0
RATES = np.geomspace(1e-6, 1.0, 100)


def bowl(sign=1.0, schedule=lambda progress: 1e-3):
    """A loss of known curvature: gradient descent diverges from a rate of 2 / CURVATURE on."""

    def loss(params, batch, key):
        return sign * (0.5 * CURVATURE * jnp.sum(jnp.square(params["w"])) + 0 * jnp.mean(batch["y"]))

    return supervised(lambda key: {"w": jnp.ones(3)}, loss, lambda rate, mask: optax.sgd(rate), toy.data(), schedule)


def test_the_rate_that_is_found_is_one_that_trains():
    found = Trainer(devices=2).find_lr(bowl(), batch=8)
    assert 0.01 / CURVATURE < found.lr < 2 / CURVATURE
    assert [rate for rate, _ in found.tried] == pytest.approx(list(1e-6 * 1e6 ** (np.arange(len(found.tried)) / 100)))
    assert found.tried[-1][1] > found.tried[0][1] and len(found.tried) < 100  # it stopped when it had grown too large


def test_without_a_batch_it_takes_the_one_of_the_run():
    """The recipe's, rounded up to the devices' micro-batches: one that they do not divide is refused."""
    recipe = bowl()
    recipe.defaults = {"batch": 12}
    assert Trainer(devices=8, accumulate=2).find_lr(recipe).lr > 0


def test_where_a_curve_falls_fastest():
    losses = 3 - 2 / (1 + np.exp(-3 * (np.log10(RATES) + 3)))  # around 1e-3
    losses[85:] = 50.0
    assert 1e-3 <= steepest(list(zip(RATES, losses, strict=True))) < 1e-2  # smoothing looks back, so it comes later


@pytest.mark.parametrize("losses", [np.full(100, 2.0), np.linspace(1, 1.5, 100), np.full(100, np.nan)])
def test_a_loss_that_never_falls_is_said(losses):
    with pytest.raises(InputError, match="does not fall at any learning rate from 1e-06 to 1e"):
        steepest(list(zip(RATES, losses, strict=True)))


def test_a_program_without_a_schedule_has_no_rate_to_look_for():
    recipe = supervised(lambda key: {"w": jnp.ones(3)}, toy.loss, optax.sgd(0.1), toy.data())
    with pytest.raises(InputError, match="has no schedule whose learning rate could be looked for"):
        Trainer(devices=1).find_lr(recipe, batch=8)


@pytest.mark.parametrize(
    ("trainer", "asked", "words"),
    [
        ({}, {"steps": 0}, "steps must be at least 1"),
        ({}, {"batch": "auto"}, "with a batch in rows"),
        ({"hosts": 2, "host": 0, "hosts_at": "127.0.0.1:1"}, {}, "runs on one host"),
    ],
)
def test_what_it_cannot_look_with_is_said(trainer, asked, words):
    with pytest.raises(InputError, match=words):
        Trainer(**trainer).find_lr(bowl(), **asked)

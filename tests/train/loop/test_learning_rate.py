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


def bowl(schedule=lambda progress: 1e-3, **options):
    """A loss of known curvature: gradient descent diverges from a rate of 2 / CURVATURE on."""

    def loss(params, batch, key):
        return 0.5 * CURVATURE * jnp.sum(jnp.square(params["w"])) + 0 * jnp.mean(batch["y"])

    optimizer = (lambda rate, mask: optax.sgd(rate)) if schedule else optax.sgd(0.1)
    return supervised(lambda key: {"w": jnp.ones(3)}, loss, optimizer, toy.data(), schedule, **options)


def test_found_rate_is_one_that_trains():
    found = Trainer(devices=2).find_lr(bowl(), batch=8)
    assert 0.01 / CURVATURE < found.lr < 2 / CURVATURE
    assert [rate for rate, _ in found.tried] == pytest.approx(list(1e-6 * 1e6 ** (np.arange(len(found.tried)) / 100)))
    assert found.tried[-1][1] > found.tried[0][1] and len(found.tried) < 100  # it stopped when it had grown too large
    # The recipe's batch is rounded up to a multiple of the devices' micro-batches.
    assert Trainer(devices=8, accumulate=2).find_lr(bowl(defaults={"batch": 12})).lr > 0


def test_steepest_is_where_the_curve_falls_fastest():
    losses = 3 - 2 / (1 + np.exp(-3 * (np.log10(RATES) + 3)))  # around 1e-3
    losses[85:] = 50.0
    assert 1e-3 <= steepest(list(zip(RATES, losses, strict=True))) < 1e-2  # smoothing looks back, so it comes later


@pytest.mark.parametrize("losses", [np.full(100, 2.0), np.linspace(1, 1.5, 100), np.full(100, np.nan)])
def test_loss_that_never_falls_is_refused(losses):
    with pytest.raises(InputError, match="does not fall at any learning rate from 1e-06 to 1e"):
        steepest(list(zip(RATES, losses, strict=True)))


@pytest.mark.parametrize(
    ("trainer", "arguments", "words"),
    [
        ({}, {"steps": 0}, "steps must be at least 1"),
        ({}, {"batch": "auto"}, "with a batch in rows"),
        ({"hosts": 2, "host": 0, "hosts_at": "127.0.0.1:1"}, {}, "runs on one host"),
        ({}, {"recipe": bowl(None), "batch": 8}, "has no schedule whose learning rate could be looked for"),
    ],
)
def test_wrong_arguments_are_refused(trainer, arguments, words):
    with pytest.raises(InputError, match=words):
        Trainer(**trainer).find_lr(**{"recipe": bowl()} | arguments)

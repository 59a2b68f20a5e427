"""Recipes as a user writes them: `line` works, the others have a fault."""

import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm import supervised

ROWS = {"x": np.ones((8, 3), np.float32)}


def _vector(key):
    return {"w": jnp.zeros(3)}


def line(width: int = 3, lr: float = 0.1):
    return supervised(
        lambda key: {"w": jnp.zeros(width)},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2),
        optax.sgd(lr),
        lambda split: {"x": np.eye(width, dtype=np.float32)[np.arange(24) % width]},
    )


def needs_width(width: int):
    return line(width)


def exits():
    raise SystemExit(3)


def wrong_shapes():
    def loss(params, batch, key):
        return jnp.mean(batch["x"] @ params["w"].T @ jnp.ones((7, 7)))

    return supervised(_vector, loss, optax.sgd(0.1), ROWS)


def no_data():
    def rows(split):
        raise KeyError("no such table")

    return supervised(_vector, lambda params, batch, key: params["w"].sum(), optax.sgd(0.1), rows)


def running_mean():
    def loss(params, extra, batch, key):
        return (batch["x"] @ params["w"]).mean(), ({}, {"mean": batch["x"].mean()})

    return supervised(_vector, loss, optax.sgd(0.1), ROWS, extra=lambda key: {"mean": jnp.zeros(())})

"""A linear model small enough to check by hand, as a recipe, and its trainer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm import ArraySource, Recipe, Trainer, supervised
from tpuswarm.train.recipe import Clock

ROWS = 64


def data(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, 5)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(1, 6, dtype=np.float32) + 0.5).astype(np.float32)}


def init(key: jax.Array) -> Any:
    return {"layer": {"w": jax.random.normal(key, (5,)), "b": jnp.zeros(())}, "unused": jnp.ones(3)}


def loss(params: Any, batch: Any, key: Any) -> Any:
    guess = batch["x"] @ params["layer"]["w"] + jnp.broadcast_to(params["layer"]["b"], batch["y"].shape)
    error = guess - batch["y"]
    return jnp.mean(jnp.square(error)) + 0 * params["unused"].sum(), {"worst": jnp.abs(error).max()}


def sgd(rate: Any, decay_mask: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(0.1, mask=decay_mask), optax.sgd(rate))


def adam(rate: Any, decay_mask: Any) -> optax.GradientTransformation:
    return optax.adamw(rate, mask=decay_mask)


def splits(split: str) -> Any:
    return {"train": data(0), "validation": data(1)}.get(split)


def recipe(optimizer: Any = adam, rate: float = 0.05, **options: Any):
    return supervised(init, loss, optimizer, splits, lambda progress: rate * (1 - progress), **options)


class Layers(Recipe):
    """Layers that can be recomputed, cheaper to compile than GPT-2's."""

    name, forms = "layers", ("remat",)

    def data(self, split):
        return ArraySource({"x": np.ones((8, 64), np.float32)})

    def program(self, options):
        def init(key):
            return {"in": jnp.ones((4, 64, 256)), "out": jnp.ones((4, 256, 64))}

        def layer(x, weights):
            return jnp.tanh(jnp.sin(x @ weights["in"])) @ weights["out"], None

        def loss(params, batch, key):
            policy = jax.checkpoint_policies.dots_saveable if options.remat == "dots" else None
            used = layer if options.remat == "none" else jax.checkpoint(layer, policy=policy)
            return jnp.square(jax.lax.scan(used, batch["x"], params)[0]).mean()

        return supervised(init, loss, optax.sgd(0.1), self.data("train")).program(options)


def toy(rate: float = 0.05):
    """A maker for `file.py:toy`."""
    return recipe(rate=rate)


def trainer(**options):
    return Trainer(**{"devices": 1, "save_every": 7, "eval_every": 5, **options})


def clock(step=0, progress=0.0, seed=0):
    return Clock(jax.random.fold_in(jax.random.key(seed), step), np.int32(step), np.float32(progress))

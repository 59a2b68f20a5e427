"""A recipe file with arrays that are large enough to be sharded, for tests of several hosts."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm import ArraySource, supervised
from tpuswarm.train.program.mesh import gathered

WIDTH = 512


def rows(seed, width=WIDTH):
    random = np.random.default_rng(seed)
    x = random.normal(size=(64, width)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32)}


def init(key, width=WIDTH):
    first, second = jax.random.split(key)
    scale = 1.1 * width**0.5
    return {"in": jax.random.normal(first, (width, width)) / scale, "out": jax.random.normal(second, (width,)) / scale}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ gathered(params["in"]))
    noise = 0.0 if key is None else jax.random.normal(key, batch["y"].shape) / 10
    return jnp.mean(jnp.square(hidden @ gathered(params["out"]) + noise - batch["y"]))


def wide(data_seed: int = 0, rate: float = 0.001):
    splits = {"train": rows(data_seed), "validation": rows(data_seed + 1)}
    return supervised(init, loss, lambda lr, mask: optax.adam(lr), splits.get, lambda progress: rate * (1 - progress))


class Held(ArraySource):
    """Give rows for the number of steps (of 16 rows) in the file `hold_after`; then wait until the file is gone."""

    in_memory = False

    def rows(self, start, count):
        while (file := Path("hold_after")).exists() and start >= 16 * int(file.read_text()):
            time.sleep(0.01)
        return super().rows(start, count)


def held():
    splits = {"train": Held(rows(0)), "validation": rows(1)}
    return supervised(init, loss, lambda lr, mask: optax.adam(lr), splits.get, lambda progress: 0.001 * (1 - progress))

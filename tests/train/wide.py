"""A recipe file with arrays that are large enough to be sharded, for tests of several hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm import supervised
from tpuswarm.train.program.mesh import gathered

WIDTH = 512


def rows(seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(64, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32)}


def init(key):
    first, second = jax.random.split(key)
    return {"in": jax.random.normal(first, (WIDTH, WIDTH)) / 25, "out": jax.random.normal(second, (WIDTH,)) / 25}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ gathered(params["in"]))
    noise = 0.0 if key is None else jax.random.normal(key, batch["y"].shape) / 10
    return jnp.mean(jnp.square(hidden @ params["out"] + noise - batch["y"]))


def wide(data_seed: int = 0, rate: float = 0.001):
    splits = {"train": rows(data_seed), "validation": rows(data_seed + 1)}
    return supervised(init, loss, lambda lr, mask: optax.adam(lr), splits.get, lambda progress: rate * (1 - progress))

"""The study of quality trains like the plain trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.simulated_quality import Arm, simulate

from tpuswarm import supervised
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.train.recipe import Clock, Options

pytestmark = pytest.mark.slow

SIZE, ROWS = 300, 512  # two quantization blocks


def data(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, SIZE)).astype(np.float32) / np.sqrt(np.float32(SIZE))
    truth = np.random.default_rng(9).standard_normal(SIZE).astype(np.float32)
    return {"x": x, "y": x @ truth + 0.1 * random.standard_normal(ROWS).astype(np.float32)}


def regression(optimizer, rate: float, noise: float = 0.0):
    """Learning rates fall to 0, and noise depends on the step: a wrong clock is a wrong result."""

    def loss(params, batch, key):
        off = noise * jax.random.normal(key, batch["y"].shape) if noise and key is not None else 0.0
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"] + off))

    recipe = supervised(
        lambda key: {"w": jax.random.normal(key, (SIZE,))}, loss, lambda rate, decay_mask: optimizer(rate),
        {"train": data(0), "validation": data(1)}.get, lambda progress: rate * (1 - progress),
    )  # fmt: skip
    return recipe.program(Options()), recipe.data("train"), recipe.data("validation")


def test_members_with_cycles_of_one_sgd_step_are_one_member_on_whole_batches():
    """One member with the mean is plain training: the single run that all tables compare with (invariant 2)."""
    program, source, _ = regression(optax.sgd, 2.0)
    init_key, step_key = jax.random.split(jax.random.key(3))
    state, step = program.init(init_key), jax.jit(program.step)
    for at in range(12):
        clock = Clock(jax.random.fold_in(step_key, at), np.int32(at), np.float32(at / 12))
        state, _ = step(state, source.rows(at * 8, 8), clock)
    for cycle, tolerance in [((4,), 1e-6), ((1,) * 2, 1e-5)]:  # contributions of two members are not clipped
        swarm = simulate(program, source, Arm(cycle, OuterRule("average")), batch=8, steps=12, seed=3)
        np.testing.assert_allclose(swarm.params["w"], state.params["w"], rtol=0, atol=tolerance)

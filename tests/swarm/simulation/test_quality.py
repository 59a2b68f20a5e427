"""The study of quality trains like the plain trainer, and shows why momentum waits for a quorum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.simulated_quality import Arm, held_out_loss, simulate

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


def test_momentum_at_every_arrival_is_far_worse():
    program, source, validation = regression(optax.adam, 0.1)

    def final(arm, steps=120):
        state = simulate(program, source, arm, batch=16, steps=steps, seed=0)
        return held_out_loss(program, state, validation, 64, ROWS)

    cycle, outer = (10,) * 4, OuterRule("nesterov")
    delayed = OuterRule("nesterov", rate=outer.rate_for(4))
    untrained = final(Arm(cycle, OuterRule("nesterov", 0.0, 0.0)), steps=10)
    together = final(Arm(cycle))
    assert together < 0.5 * untrained
    assert final(Arm(cycle, delayed, together=1)) < 2 * together
    assert final(Arm(cycle, delayed, together=1, quorum=1)) > 10 * together
    quantized = OuterRule("nesterov", downlink="int8")
    assert final(Arm((10, 5, 10, 5), quantized, bits=4, delay=2, adopt="add")) < 0.5 * untrained

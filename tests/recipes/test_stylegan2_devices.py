"""StyleGAN2's step on eight devices."""

import jax
import numpy as np
import pytest

from tests.recipes.test_stylegan2 import BATCH, TINY, clock
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

pytestmark = pytest.mark.slow


def test_eight_devices_learn_what_one_does(devices):
    """Each device has whole groups, so that minibatch deviation is taken over the same pictures."""
    recipe, batch = StyleGAN2(**TINY), 2 * BATCH
    results = []
    for used in (devices, devices[:1]):
        compiled = compile_step(recipe, Request(batch=batch), used)
        state = compiled.init(jax.random.key(1))
        for step in range(3):
            state, metrics = compiled.step(state, recipe.data("train").rows(step * batch, batch), clock(step))
        results.append((jax.device_get(state.average), jax.device_get(metrics)))
    (average, metrics), (expected, expected_metrics) = results
    for name in metrics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=2e-3, abs=1e-5), name
    for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)

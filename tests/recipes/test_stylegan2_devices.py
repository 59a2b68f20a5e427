"""StyleGAN2's step on several devices."""

import jax
import numpy as np
import pytest

from tests.recipes.test_stylegan2 import BATCH, TINY, train
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

pytestmark = pytest.mark.slow


def test_four_devices_learn_what_one_does(devices):
    """Each device has a whole group, so that minibatch deviation is taken over the same pictures."""
    recipe, results = StyleGAN2(**TINY), []
    for used in (devices[:4], devices[:1]):
        compiled = compile_step(recipe, Request(batch=BATCH), used)
        states, history = train(recipe, compiled, compiled.init(jax.random.key(1)), range(3))
        results.append((states[-1].average, history[-1]))
    (average, metrics), (expected, expected_metrics) = results
    for name in metrics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=2e-3, abs=1e-5), name
    for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)

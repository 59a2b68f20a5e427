"""Attention kernels, interpreted here, against plain softmax attention, and when they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpuswarm.train.program.attention import kernel, usable_form


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "keys", "heads", "groups"), [(True, 128, 1, 1), (False, 256, 2, 1)])
def test_splash_and_its_gradients_equal_plain_attention(causal, keys, heads, groups):
    random = np.random.default_rng(0)
    shapes = (1, 128, heads, 32), (1, keys, groups, 32), (1, keys, groups, 32)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)

    def splash(q, k, v):
        return jnp.sum(kernel(q, k, v, "splash", causal=causal, scale=0.3) ** 2)

    def plain(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=causal, scale=0.3) ** 2)

    with pltpu.force_tpu_interpret_mode():
        found, grads = jax.value_and_grad(splash, (0, 1, 2))(q, k, v)
    expected, expected_grads = jax.value_and_grad(plain, (0, 1, 2))(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, other in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, other, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize(
    ("wanted", "sizes", "form"),
    [
        ("cudnn", {}, "cudnn"),
        ("cudnn", {"bf16": False}, "xla"),
        ("cudnn", {"head_width": 160}, "xla"),
        ("splash", {}, "splash"),
        ("splash", {"keys": 77}, "xla"),
        ("xla", {}, "xla"),
    ],
)
def test_kernel_is_used_only_for_sizes_it_supports(wanted, sizes, form):
    assert usable_form(wanted, **{"bf16": True, "head_width": 64, "queries": 256, "keys": 128} | sizes) == form

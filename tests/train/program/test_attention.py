"""Kernels of attention: what they give, interpreted here, beside plain softmax attention, and when they are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpuswarm.train.program.attention import kernel, usable_form


@pytest.mark.parametrize(("causal", "keys", "groups"), [(True, 128, 2), (False, 256, 1)])
def test_splash_is_attention_with_its_gradients(causal, keys, groups):
    """Causal, and of two sequences; as many heads for keys as for queries, and fewer."""
    random = np.random.default_rng(0)
    shapes = (1, 128, 2, 32), (1, keys, groups, 32), (1, keys, groups, 32)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)

    def splash(q, k, v):
        return jnp.sum(kernel(q, k, v, "splash", causal=causal, scale=0.3) ** 2)

    def plain(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=causal, scale=0.3) ** 2)

    with pltpu.force_tpu_interpret_mode():
        found, grads = jax.value_and_grad(splash, (0, 1, 2))(q, k, v)
    expected, others = jax.value_and_grad(plain, (0, 1, 2))(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for mine, theirs in zip(grads, others, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * np.abs(theirs).max())


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
def test_a_form_is_taken_only_where_its_kernel_can_do_the_sizes(wanted, sizes, form):
    assert usable_form(wanted, **{"bf16": True, "head_width": 64, "queries": 256, "keys": 128} | sizes) == form

"""The FLOPs of a step of StyleGAN2."""

import jax
import numpy as np
import pytest

from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.recipe import Clock, Options

pytestmark = pytest.mark.slow

BATCH = 8


def by_hand(c):
    """Count the FLOPs of one picture in a step with both regularisers.

    A kernel of 3 x 3 around R pixels meets (3 R - 2)² pairs of pixels and taps; one that doubles or halves the size
    meets 9 for each pixel of the smaller size. Two FLOPs for each pair of channels.
    """
    D, side, resolutions = c.latent, c.resolution, c.resolutions
    rgb = sum(2 * 3 * c.width(R) * R**2 for R in resolutions)
    same = sum(2 * c.width(R) ** 2 * (3 * R - 2) ** 2 for R in resolutions)
    pairs = [(R, 2 * c.width(R) * c.width(R // 2)) for R in resolutions[1:]]
    resized = sum(both * 9 * (R // 2) ** 2 for R, both in pairs)
    inputs = [c.width(R) for R in resolutions for _ in ("same", "rgb")] + [c.width(R // 2) for R in resolutions[1:]]
    styles = sum(2 * D * width for width in inputs)
    demodulations = sum(both for _, both in pairs) + sum(2 * c.width(R) ** 2 for R in resolutions)
    codes = 2 * 2 * D * D * c.mapping  # two, for the mixing of styles
    rest = same + resized + styles + demodulations
    generator = rest + rgb + codes

    first = 2 * 3 * c.width(side) * side**2  # the discriminator's, from RGB
    last = 2 * c.width(4) ** 2 * (10**2 + 16) + 2 * c.width(4)
    skips = sum(both * (R // 2) ** 2 for R, both in pairs)
    discriminator = first + same - 2 * c.width(4) ** 2 * 10**2 + resized + skips + last

    # a picture is twice as large, mirrored, while its axes are scaled
    augmentation = 2 * 2 * (2 * side) ** 2 * (3 * side)

    # forward, then the gradients by weights and by inputs, except real and generated pictures
    of_discriminator = generator + 2 * augmentation + 2 * (3 * discriminator - first)
    of_generator = 3 * generator + 2 * (augmentation + discriminator)
    # forward, slope, then by weights and slopes of both; only the deviation bends the slope, which lies before the last
    # the augmentation has no weights: forward, slope, and the slope of that
    r1 = 3 * augmentation + 6 * discriminator - 2 * last - first
    # the same for the generator, whose styles are nonlinear and whose RGB is a sum: its slope, and the slope's gradient
    # by weights; half as many pictures
    path = (6 * rest + 2 * rgb + 3 * codes) / 2
    return of_discriminator + of_generator + r1 + path


@pytest.mark.parametrize(("side", "precision"), [(16, "f32"), (32, "bf16")])
def test_step_has_the_flops_counted_by_hand(side, precision):
    recipe = StyleGAN2(resolution=side, data="fake")
    program = recipe.program(Options(precision, platform="tpu" if precision == "bf16" else "cpu"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    clock = Clock(jax.random.key(0), np.int32(0), np.float32(0))
    found = model_flops(jax.jit(program.step).trace(state, program.batch_spec(BATCH), clock).jaxpr)
    assert found.total / BATCH == pytest.approx(by_hand(recipe.config), rel=1e-3) and not found.unknown

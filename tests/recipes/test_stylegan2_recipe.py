"""StyleGAN2 as a recipe: options, data, refusals and FLOPs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recipes.test_stylegan2 import TINY
from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2 import augment
from tpuswarm.recipes.stylegan2.pictures import digits
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options


def test_digits_are_digits():
    pictures = digits(32)
    assert pictures.shape == (1797, 32, 32, 3) and pictures.dtype == np.uint8
    assert pictures.max() == 255 and pictures.min() == 0
    first = np.asarray(pictures[0, 2::4, 2::4, 0], int)  # a 0: dark in the middle, light around it
    assert first[3:5, 3:5].max() < 60 < first[1:7, 2:6].max()


def test_recipe_is_rebuilt_from_its_options():
    recipe = StyleGAN2(**TINY)
    again = StyleGAN2(**recipe.options())
    assert again.config == recipe.config and again.options() == recipe.options()
    assert again.data("validation").rows_per_epoch == 179
    assert again.data("train").rows_per_epoch + 179 == again.data("all").rows_per_epoch == 1797


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": 48}, "a resolution is a power of two from 8 on, not 48"),
        ({"resolution": 4}, "a resolution is a power of two from 8 on, not 4"),
        ({"odd": "stretch"}, "odd is crop or refuse, not 'stretch'"),
        ({"lr": float("nan")}, "lr must be above 0, not nan"),
        ({"group": 1}, "group must be at least 2, not 1"),
    ],
)
def test_wrong_option_is_one_sentence(options, message):
    with pytest.raises(InputError) as caught:
        StyleGAN2(**options)
    assert str(caught.value) == message


def test_unsupported_requests_are_refused():
    recipe = StyleGAN2(**TINY)
    with pytest.raises(InputError, match="a batch of 7 does not divide into the groups of 2 pictures"):
        compile_step(recipe, Request(batch=7), jax.devices()[:1])
    with pytest.raises(InputError, match="stylegan2 does not support accumulate"):
        recipe.program(Options(accumulate=2))


def test_strength_follows_the_mean_sign_for_any_steps_of_a_member(monkeypatch):
    """In a swarm of four with cycles of 5 a member has 5 of 20 steps; a mean sign of 0.5 is under the target of 0.6."""
    recipe = StyleGAN2(**TINY)
    program = recipe.program(Options())
    monkeypatch.setattr(augment, "augment", lambda x, *settings: x)  # the rest need not be compiled
    program._regularise_generator = program._regularise_discriminator = lambda state, *_: state
    program._synthesize = lambda params, w, key: jnp.zeros((len(w), 8, 8, 3)) + 0 * w.mean()
    program._score = lambda params, x: np.float32([1, 1, 1, -1] * (len(x) // 4)) + 0 * x.mean((1, 2, 3))
    step, state, rows = jax.jit(program.step), program.init(jax.random.key(0)), recipe.data("train").rows(0, 8)
    for number in [start + step for start in range(0, 60, 20) for step in range(5)]:
        state, metrics = step(state, rows, Clock(jax.random.key(5), np.int32(number), np.float32(0)))
        assert metrics["strength"] == 0


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

    # forward, then by weights and by inputs, of which the real and the made pictures need none
    of_discriminator = generator + 2 * augmentation + 2 * (3 * discriminator - first)
    of_generator = 3 * generator + 2 * (augmentation + discriminator)
    # forward, slope, then by weights and slopes of both; only the deviation bends the slope, which lies before the last
    # the augmentation has no weights: forward, slope, and the slope of that
    r1 = 3 * augmentation + 6 * discriminator - 2 * last - first
    # the same of the generator, where every style bends it; RGB is a sum: its slope, and that by weights; of half as
    # many pictures
    path = (6 * rest + 2 * rgb + 3 * codes) / 2
    return of_discriminator + of_generator + r1 + path


@pytest.mark.slow
@pytest.mark.parametrize(("side", "precision"), [(16, "f32"), pytest.param(32, "bf16", marks=pytest.mark.long)])
def test_step_has_the_flops_counted_by_hand(side, precision):
    recipe = StyleGAN2(resolution=side, data="fake")
    program = recipe.program(Options(precision, platform="tpu" if precision == "bf16" else "cpu"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    clock = Clock(jax.random.key(0), np.int32(0), np.float32(0))
    found = model_flops(jax.jit(program.step).trace(state, program.batch_spec(BATCH), clock).jaxpr)
    assert found.total / BATCH == pytest.approx(by_hand(recipe.config), rel=1e-3) and not found.unknown

"""StyleGAN2 as a recipe: its options, its data, what it refuses."""

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
    monkeypatch.setattr(augment, "augment", lambda x, *settings: x)  # what is not looked at need not be compiled
    program._synthesize = lambda params, w, key: jnp.zeros((len(w), 8, 8, 3)) + 0 * w.mean()
    program._score = lambda params, x: np.float32([1, 1, 1, -1] * (len(x) // 4)) + 0 * x.mean((1, 2, 3))
    step, state, rows = jax.jit(program.step), program.init(jax.random.key(0)), recipe.data("train").rows(0, 8)
    for number in [start + step for start in range(0, 60, 20) for step in range(5)]:
        state, metrics = step(state, rows, Clock(jax.random.key(5), np.int32(number), np.float32(0)))
        assert metrics["strength"] == 0

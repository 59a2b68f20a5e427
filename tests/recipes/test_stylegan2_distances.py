"""Distances between sets of pictures, and the code of a picture, beside what is known of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from tests.recipes.test_stylegan2 import TINY
from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2 import distances, features, pictures
from tpuswarm.recipes.stylegan2.measuring import measure
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2

SETS = st.integers(0, 2**32 - 1).map(np.random.RandomState)


def normal(random, count, width, shift=0.0):
    mix = random.standard_normal((width, width))
    return random.standard_normal((count, width)) @ mix + shift


@settings(max_examples=20, deadline=None)
@given(SETS, st.integers(1, 6))
def test_the_frechet_distance_is_that_of_its_formula(random, width):
    a, b = normal(random, 40, width), normal(random, 30, width, 1.0)
    root = np.atleast_2d(sqrtm(np.atleast_2d(np.cov(a, rowvar=False)) @ np.atleast_2d(np.cov(b, rowvar=False))))
    of_a, of_b = (np.atleast_2d(np.cov(each, rowvar=False)) for each in (a, b))
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(of_a + of_b - 2 * root.real)
    assert distances.frechet(a, b) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert distances.frechet(a, a) == pytest.approx(0, abs=1e-6)
    assert distances.frechet(a, a + 3) == pytest.approx(9 * width, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(SETS, st.integers(2, 9), st.integers(2, 9))
def test_the_kernel_distance_is_the_mean_over_pairs(random, count, other):
    a, b = random.standard_normal((count, 3)), random.standard_normal((other, 3))

    def k(x, y):
        return (x @ y / 3 + 1) ** 3

    within = [np.mean([k(x, y) for i, x in enumerate(each) for j, y in enumerate(each) if i != j]) for each in (a, b)]
    across = np.mean([k(x, y) for x in a for y in b])
    assert distances.kernel(a, b) == pytest.approx(sum(within) - 2 * across, rel=1e-9, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(SETS, st.integers(5, 12), st.integers(1, 12))
def test_precision_and_recall_are_those_of_their_definition(random, count, other):
    of, by = random.standard_normal((count, 2)), random.standard_normal((other, 2))
    radii = [sorted(np.linalg.norm(of - x, axis=1))[3] for x in of]
    inside = [any(np.linalg.norm(y - x) <= radius for x, radius in zip(of, radii, strict=True)) for y in by]
    assert distances.coverage(of, by) == pytest.approx(np.mean(inside))


def test_a_set_beside_itself_and_one_that_lacks_a_kind():
    random = np.random.RandomState(0)
    both = np.concatenate([random.standard_normal((200, 2)), random.standard_normal((200, 2)) + 20])
    same = distances.distances(both, both)
    assert (same["precision"], same["recall"]) == (1, 1) and same["frechet_distance"] == pytest.approx(0, abs=1e-6)
    half = distances.distances(both, random.standard_normal((200, 2)))
    assert half["precision"] > 0.9 and 0.4 < half["recall"] < 0.6 and half["kernel_distance"] > 1


def test_the_features_are_the_same_everywhere_and_for_ever():
    """The figures are those of the day when the network was drawn: distances of one time compare with another's."""
    found = features.random_features(pictures.digits(32)[:2])
    assert found.shape == (2, features.FEATURES) and found.dtype == np.float32
    np.testing.assert_allclose(found[0, :4], FIRST, rtol=1e-4)
    base = features.weights()[1]
    np.testing.assert_allclose(base.T @ base, np.eye(features.FEATURES), atol=1e-5)


FIRST = [-0.515486, 0.879885, 0.310977, 0.950792]


@pytest.mark.parametrize("side", [8, 32, 64])
def test_the_features_rank_sets_of_pictures(side):
    digits = pictures.digits(side)
    shuffled = digits[np.random.RandomState(0).permutation(len(digits))]
    real, other = (features.random_features(each) for each in (shuffled[:600], shuffled[600:1200]))
    ones = features.random_features(digits[np.isin(load_classes(), [1, 7])][:300])
    dim = features.random_features(shuffled[600:1200] // 2)
    noise = features.random_features(pictures.fake(side))
    by = {name: distances.distances(real, each) for name, each in
          {"other": other, "ones": ones, "dim": dim, "noise": noise}.items()}  # fmt: skip
    for name in ("frechet_distance", "kernel_distance"):
        assert by["other"][name] < min(by[each][name] for each in ("ones", "dim", "noise")) / 3
    assert by["other"]["recall"] > 0.7 > by["ones"]["recall"] and by["noise"]["precision"] < 0.1


def load_classes():
    from sklearn.datasets import load_digits

    return load_digits().target


def test_what_is_measured_is_said(tmp_path):
    """Copies of real pictures are as good as real ones; too few real ones are all taken, and counted."""
    real = pictures.digits(8)

    def copies(state, z, truncation):
        return real[np.random.RandomState(len(told)).randint(0, len(real), len(z))]

    told = []
    found = measure(copies, None, real, 4, 100, None, lambda *far: told.append(far))
    assert (found["made"], found["reference"], found["held_out"]) == (1000, 1000, 179)
    assert told[-1] == (1000, 1000) and found["precision"] > 0.8
    few = measure(copies, None, real[:50], 4, 100, None, lambda *far: None)
    assert (few["made"], few["reference"], few["held_out"]) == (1000, 50, 5)


NETWORK = """
import numpy as np
W = np.random.RandomState(1).standard_normal((8 * 8 * 3, 16)) / 100  # where Inception would be

def features(pictures):
    return np.tanh(pictures.reshape(len(pictures), -1) @ W)

def short(pictures):
    return pictures.mean((1, 2, 3))

def broken(pictures):
    return pictures @ W

def words(pictures):
    return [["a", "b"]] * len(pictures)

class Traced:
    def __array__(self, *options, **more):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")  # as a tensor of torch does

def traced(pictures):
    return Traced()
"""


def test_features_of_the_users_own_and_what_is_wrong_with_them(tmp_path):
    (tmp_path / "inception.py").write_text(NETWORK)
    real = pictures.digits(8)

    def copies(state, z, truncation):
        return real[: len(z)]

    def by(name):
        return measure(copies, None, real, 4, 100, f"{tmp_path}/inception.py:{name}", lambda *far: None)

    assert (
        by("features")["frechet_distance"]
        != measure(copies, None, real, 4, 100, None, lambda *far: None)["frechet_distance"]
    )
    with pytest.raises(InputError, match=r"short gave an array of shape \[100\] for 100 pictures: a finite"):
        by("short")
    with pytest.raises(InputError, match=r"broken failed: ValueError: .*inception.py:12"):
        by("broken")
    with pytest.raises(InputError, match=r"words gave no array of numbers: could not convert string to float"):
        by("words")
    with pytest.raises(InputError, match=r"traced gave no array of numbers: Can't call numpy\(\)"):
        by("traced")
    with pytest.raises(InputError, match="has no feature; did you mean"):
        by("feature")


def test_a_picture_of_the_models_own_is_found_again():
    import jax

    from tpuswarm.train.recipe import Options

    recipe = StyleGAN2(**TINY)
    program = recipe.program(Options())
    state = program.init(jax.random.key(3))
    for block in state.average["blocks"].values():
        block["rgb"]["w"] *= 0.2  # as a trained one it stays within black and white
    given = next(recipe.grids(state, 1, 1, truncation=1.0, seed=5))
    mean = next(recipe.grids(state, 1, 1, truncation=0.0, seed=5))
    told = []
    found = recipe.project(state, given, 200, 0, lambda *far: told.append(far))
    away = np.sqrt(np.square(mean.astype(float) - given).mean())
    assert found.error < away / 20 and found.w.shape == (TINY["latent"],) and len(told) == 20
    np.testing.assert_array_equal(found.beside(given)[:, :8], given)
    np.testing.assert_array_equal(found.beside(given)[:, 8:], found.picture)
    again = recipe.project(state, given, 200, 0, lambda *far: None)
    np.testing.assert_array_equal(found.w, again.w)

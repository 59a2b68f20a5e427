"""Distances between sets of pictures, and the code of a given picture."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from tests.recipes.test_stylegan2 import TINY
from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2 import distances, pictures
from tpuswarm.recipes.stylegan2.distances import measure
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.recipe import Options

pytestmark = pytest.mark.slow
SETS = st.integers(0, 2**32 - 1).map(np.random.RandomState)


def normal(random, count, width, shift=0.0):
    mix = random.standard_normal((width, width))
    return random.standard_normal((count, width)) @ mix + shift


@settings(max_examples=10)
@given(SETS, st.integers(1, 6))
def test_frechet_distance_follows_its_formula(random, width):
    a, b = normal(random, 40, width), normal(random, 30, width, 1.0)
    cov_a, cov_b = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (a, b))
    root = np.atleast_2d(sqrtm(cov_a @ cov_b)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root)
    assert distances.frechet(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert distances.frechet(a, a) == pytest.approx(0, abs=1e-6)
    assert distances.frechet(a, a + 3) == pytest.approx(9 * width, rel=1e-6)


@settings(max_examples=10)
@given(SETS, st.integers(2, 9), st.integers(2, 9))
def test_kernel_distance_is_the_mean_over_pairs(random, count, other):
    a, b = random.standard_normal((count, 3)), random.standard_normal((other, 3))

    def k(x, y):
        return (x @ y / 3 + 1) ** 3

    within = [np.mean([k(x, y) for i, x in enumerate(rows) for j, y in enumerate(rows) if i != j]) for rows in (a, b)]
    across = np.mean([k(x, y) for x in a for y in b])
    assert distances.kernel(a, b) == pytest.approx(sum(within) - 2 * across, rel=1e-9, abs=1e-9)


@settings(max_examples=10)
@given(SETS, st.integers(5, 12), st.integers(1, 12))
def test_precision_and_recall_follow_their_definition(random, count, other):
    of, by = random.standard_normal((count, 2)), random.standard_normal((other, 2))
    radii = [sorted(np.linalg.norm(of - x, axis=1))[3] for x in of]
    inside = [any(np.linalg.norm(y - x) <= radius for x, radius in zip(of, radii, strict=True)) for y in by]
    assert distances.coverage(of, by) == pytest.approx(np.mean(inside))


def test_identical_sets_have_no_distance_and_a_missing_kind_lowers_recall():
    random = np.random.RandomState(0)
    both = np.concatenate([random.standard_normal((200, 2)), random.standard_normal((200, 2)) + 20])
    same = distances.distances(both, both)
    assert (same["precision"], same["recall"]) == (1, 1) and same["frechet_distance"] == pytest.approx(0, abs=1e-6)
    half = distances.distances(both, random.standard_normal((200, 2)))
    assert half["precision"] > 0.9 and 0.4 < half["recall"] < 0.6 and half["kernel_distance"] > 1


def test_random_features_never_change():
    """Otherwise distances measured before and after would not compare."""
    found = distances.random_features(pictures.digits(32)[:2])
    assert found.shape == (2, distances.FEATURE_COUNT) and found.dtype == np.float32
    np.testing.assert_allclose(found[0, :4], [-0.515486, 0.879885, 0.310977, 0.950792], rtol=1e-4)
    base = distances.weights()[1]
    np.testing.assert_allclose(base.T @ base, np.eye(distances.FEATURE_COUNT), atol=1e-5)


@pytest.mark.parametrize("side", [8, 32, 64])
def test_random_features_rank_sets_of_pictures(side):
    from sklearn.datasets import load_digits  # takes seconds

    digits = pictures.digits(side)
    shuffled = digits[np.random.RandomState(0).permutation(len(digits))]
    real = distances.random_features(shuffled[:600])
    sets = {
        "other": shuffled[600:1200],
        "ones": digits[np.isin(load_digits().target, [1, 7])][:300],
        "dim": shuffled[600:1200] // 2,
        "noise": pictures.fake(side),
    }
    found = {name: distances.distances(real, distances.random_features(each)) for name, each in sets.items()}
    for distance in ("frechet_distance", "kernel_distance"):
        assert found["other"][distance] < min(found[name][distance] for name in ("ones", "dim", "noise")) / 3
    assert found["other"]["recall"] > 0.7 > found["ones"]["recall"] and found["noise"]["precision"] < 0.1


def test_copies_of_real_pictures_are_as_good_as_real_ones():
    """Too few real ones are all taken, and counted."""
    real, progress = pictures.digits(8), []

    def copies(state, z, truncation):
        return real[np.random.RandomState(len(progress)).randint(0, len(real), len(z))]

    found = measure(copies, None, real, 4, 100, None, lambda *done: progress.append(done))
    assert (found["made"], found["reference"], found["held_out"]) == (1000, 1000, 179)
    assert progress[-1] == (1000, 1000) and found["precision"] > 0.8
    few = measure(copies, None, real[:50], 4, 100, None, lambda *done: None)
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


def test_users_own_features_are_used_and_their_mistakes_reported(tmp_path):
    (tmp_path / "inception.py").write_text(NETWORK)
    real = pictures.digits(8)

    def measured(features):
        return measure(lambda state, z, truncation: real[: len(z)], None, real, 4, 100, features, lambda *done: None)

    own = measured(f"{tmp_path}/inception.py:features")
    assert own["frechet_distance"] != measured(None)["frechet_distance"]
    for name, words in (
        ("short", r"short gave an array of shape \[100\] for 100 pictures: a finite"),
        ("broken", r"broken failed: ValueError: .*inception.py:12"),
        ("words", r"words gave no array of numbers: could not convert string to float"),
        ("traced", r"traced gave no array of numbers: Can't call numpy\(\)"),
        ("feature", "has no feature; did you mean"),
    ):
        with pytest.raises(InputError, match=words):
            measured(f"{tmp_path}/inception.py:{name}")


@pytest.mark.long
def test_code_of_a_made_picture_is_found():
    recipe = StyleGAN2(**TINY)
    program = recipe.program(Options())
    state = program.init(jax.random.key(3))
    for block in state.average["blocks"].values():
        block["rgb"]["w"] *= 0.2  # a trained generator stays within black and white
    given = next(recipe.grids(state, 1, 1, truncation=1.0, seed=5))
    mean = next(recipe.grids(state, 1, 1, truncation=0.0, seed=5))
    progress = []
    found = recipe.project(state, given, 200, 0, lambda *done: progress.append(done))
    away = np.sqrt(np.square(mean.astype(float) - given).mean())
    assert found.error < away / 20 and found.w.shape == (TINY["latent"],) and len(progress) == 20
    np.testing.assert_array_equal(found.beside(given)[:, :8], given)
    np.testing.assert_array_equal(found.beside(given)[:, 8:], found.picture)
    again = recipe.project(state, given, 200, 0, lambda *done: None)
    np.testing.assert_array_equal(found.w, again.w)

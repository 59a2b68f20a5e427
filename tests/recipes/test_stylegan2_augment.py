"""Adaptive augmentation beside scipy's maps and the statistics of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import affine_transform, gaussian_filter

from tpuswarm.recipes.stylegan2 import augment

pytestmark = pytest.mark.slow
SIDE = 16
SEEDS = st.integers(0, 2**32 - 1)
COUNT = 8

move = jax.jit(augment.warped)
turn = jax.jit(augment.turned)
change = jax.jit(augment.augment)
gradient = jax.jit(jax.grad(lambda x, key, strength, weight: (augment.augment(x, key, strength) * weight).sum()))


def smooth(seed, count=COUNT, side=SIDE, width=2):
    """Pictures without edges sharper than `width` pixels, which every interpolation sees alike."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(count, side, side, 3))
    planes = [gaussian_filter(picture, (width, width, 0), mode="reflect") for picture in noise]
    return (np.stack(planes) / np.std(planes)).astype(np.float32)


def maps(matrix, shift):
    return np.tile(np.float32(matrix), (COUNT, 1, 1)), np.tile(np.float32(shift), (COUNT, 1))


def scipys(picture, matrix, shift):
    """Return a picture whose pixel q shows `matrix q + shift`; q is (x, y) from the middle."""
    middle = (len(picture) - 1) / 2
    matrix, shift = np.asarray(matrix)[::-1, ::-1], np.asarray(shift)[::-1]  # rows first
    offset = middle + shift - matrix @ [middle, middle]
    planes = [affine_transform(plane, matrix, offset, order=3, mode="reflect") for plane in np.moveaxis(picture, -1, 0)]
    return np.stack(planes, -1)


@settings(max_examples=10)
@given(SEEDS, st.floats(-4, 4), st.floats(0.75, 1.3), st.floats(0.8, 1.25), st.floats(-1.5, 1.5), st.floats(-5, 5))
def test_map_is_scipys(seed, before, scale, stretch, after, shift):
    """Rotate, scale and shift; compare pixels whose source lies within the picture and within both shears."""

    def rotation(angle):
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    matrix = rotation(before) @ np.diag([scale * stretch, scale / stretch]) @ rotation(after)
    pictures = smooth(seed, width=3)
    found = move(pictures, *maps(matrix, (shift, -shift / 2)))
    wanted = np.stack([scipys(picture, matrix, (shift, -shift / 2)) for picture in pictures])
    ends = (SIDE - 1) / 2
    x, y = np.meshgrid(*[np.arange(SIDE) - ends] * 2, indexing="xy")
    at = np.stack((x, y), -1) @ matrix.T + (shift, -shift / 2)
    turns = np.round(np.arctan2(matrix[1, 0] - matrix[0, 1], matrix[0, 0] + matrix[1, 1]) / (np.pi / 2))
    (_, _), (across, down) = rotation(-turns * np.pi / 2) @ matrix
    inside = (np.abs(at) <= ends).all(-1) & (np.abs(y + across / down * x) <= SIDE - 1)
    error = np.square(found - wanted)[:, inside]
    assert not inside.any() or np.sqrt(error.mean()) < 0.09  # linear interpolation, twice; half a pixel is 0.10


@settings(max_examples=10)
@given(SEEDS, st.integers(-20, 20), st.integers(-20, 20))
def test_whole_shifts_and_turns_are_exact(seed, right, down):
    pictures = np.random.default_rng(seed).normal(size=(COUNT, SIDE, SIDE, 3)).astype(np.float32)
    wide = np.pad(pictures, ((0, 0), (20, 20), (20, 20), (0, 0)), mode="symmetric")
    shifted = wide[:, 20 + down : 20 + down + SIDE, 20 + right : 20 + right + SIDE]
    np.testing.assert_allclose(move(pictures, *maps(np.eye(2), (right, down))), shifted, atol=1e-6)
    for turns in range(4):
        found = turn(pictures, np.full(COUNT, turns, np.int32))
        np.testing.assert_array_equal(found, np.rot90(pictures, turns, (1, 2)))
        quarter = np.linalg.matrix_power(np.array([[0, -1], [1, 0]]), turns)
        np.testing.assert_allclose(move(pictures, *maps(quarter, (0, 0))), found, atol=1e-4)


@settings(max_examples=10)
@given(SEEDS)
def test_strength_0_changes_no_picture_and_strength_1_all(seed):
    pictures, key = smooth(seed), jax.random.key(seed)
    np.testing.assert_allclose(change(pictures, key, np.float32(0)), pictures, atol=1e-6)
    assert (np.abs(change(pictures, key, np.float32(1)) - pictures).max((1, 2, 3)) > 0.01).all()


@settings(max_examples=10)
@given(SEEDS, st.floats(0, 1, width=32))
def test_gradient_is_that_of_an_affine_map(seed, strength):
    one, other, weight = smooth(seed), smooth(seed + 1), smooth(seed + 2)
    key, strength = jax.random.key(seed), np.float32(strength)
    slope = gradient(one, key, strength, weight)
    found = ((change(other, key, strength) - change(one, key, strength)) * weight).sum()
    np.testing.assert_allclose((slope * (other - one)).sum(), found, rtol=2e-3, atol=2e-2)


def test_colours_change_as_often_and_as_much_as_the_paper_says():
    """Brightness has a deviation of 0.2, contrast a factor of deviation 2^0.5; signs are turned."""
    count, strength = 4_000, 0.4
    grey = np.full((count, 8, 8, 3), 0.5, np.float32)
    found = np.asarray(change(grey, jax.random.key(0), np.float32(strength)))[:, 0, 0, 0]
    unchanged = (1 - strength) ** 2 * (1 - strength / 2)
    assert np.isclose(found, 0.5, atol=1e-5).mean() == pytest.approx(unchanged, abs=0.03)
    assert (found < 0).mean() == pytest.approx(strength / 2, abs=0.03)
    assert np.median(np.abs(found)) == pytest.approx(0.5, abs=0.01)


def test_geometry_changes_as_often_as_the_paper_says():
    """The share of pictures that no geometric change touches, where half of the flips and a quarter of turns are none;
    both rotations together happen with the strength."""
    count, strength = 2_000, 0.3
    pictures = np.tile(smooth(0, 1, 8).mean(-1, keepdims=True), (count, 1, 1, 3))
    found = np.asarray(change(pictures, jax.random.key(1), np.float32(strength)))[..., 0]
    shape = (found - found.mean((1, 2), keepdims=True)) / found.std((1, 2), keepdims=True)
    wanted = (pictures[0, ..., 0] - pictures[0, ..., 0].mean()) / pictures[0, ..., 0].std()
    alike = np.minimum(np.abs(shape - wanted).max((1, 2)), np.abs(shape + wanted).max((1, 2))) < 1e-3
    stays = (1 - strength / 2) * (1 - 0.75 * strength) * (1 - 0.75 * strength) * (1 - strength) ** 4
    assert alike.mean() == pytest.approx(stays, abs=0.04)


def test_strength_follows_how_sure_the_discriminator_is():
    half = jnp.float32(0.5)
    assert augment.adjusted(half, jnp.float32(0.9), 5_000) == pytest.approx(0.51)
    assert augment.adjusted(half, jnp.float32(0.1), 5_000) == pytest.approx(0.49)
    assert augment.adjusted(jnp.float32(0), jnp.float32(0.1), 5_000) == 0

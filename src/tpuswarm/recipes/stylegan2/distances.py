"""Distances between generated and real pictures, by the features of both.

FID uses Inception's features, whose weights cannot be part of this project. Features of random convolutions tell sets
of pictures apart as well (Naeem et al. 2020, 2002.09797) and are the same everywhere. They rank runs on the same data;
they are not comparable with FIDs of others.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError, first_line

MIN_REFERENCE_PICTURES, MAX_REFERENCE_PICTURES = 1_000, 5_000
NEIGHBOUR_COUNT = 3
"""k of precision and recall."""
INPUT_SIZE = 32
"""Pictures are reduced to this size first."""
WIDTHS = (32, 64, 128)
"""Channels of the convolutions: 4 x 4, stride 2."""
FEATURE_COUNT = 128
"""F: numbers for each picture."""
WEIGHTS_SEED = 20_191_204

Features = Callable[[np.ndarray], np.ndarray]
"""Pictures uint8 (B, height, width, 3) → features float (B, F)."""


def measure(
    make: Callable[[Any, np.ndarray, float], np.ndarray],
    state: Any,
    pictures: np.ndarray,
    latent: int,
    batch: int,
    features: str | None,
    report: Callable[[int, int], None],
) -> dict[str, Any]:
    """Return the distances of generated pictures, always from the same codes, to the last real ones.

    pictures: uint8 (count, side, side, 3). Their last tenth is held out; training pictures fill up a small one. report:
    called with the pictures made and to make. Raises InputError for invalid features of the user's.
    """
    describe = user_features(features) if features else random_features
    held_out = len(pictures) // 10
    real = pictures[-min(max(held_out, MIN_REFERENCE_PICTURES), MAX_REFERENCE_PICTURES) :]
    count = max(MIN_REFERENCE_PICTURES, len(real))
    made: list[np.ndarray] = []
    for start in range(0, count, batch):
        key = jax.random.fold_in(jax.random.key(0), start)
        generated = make(state, np.asarray(jax.random.normal(key, (batch, latent))), 1.0)
        made.append(describe(generated[: count - start]))
        report(min(len(made) * batch, count), count)
    reference = [describe(real[start : start + batch]) for start in range(0, len(real), batch)]
    facts = {"made": count, "reference": len(real), "held_out": min(held_out, len(real))}
    return facts | distances(np.concatenate(reference), np.concatenate(made))


def distances(real_NxF: np.ndarray, made_MxF: np.ndarray) -> dict[str, float]:
    """Fréchet and kernel distance (0: the same distribution), precision and recall (1: one set covers the other)."""
    real, made = real_NxF.astype(np.float64), made_MxF.astype(np.float64)
    return {
        "frechet_distance": frechet(real, made),
        "kernel_distance": kernel(real, made),
        "precision": coverage(real, made),
        "recall": coverage(made, real),
    }


def frechet(a_NxF: np.ndarray, b_MxF: np.ndarray) -> float:
    """Distance of normal distributions with the sets' means and covariances (Heusel et al. 2017, 1706.08500, eq. 6)."""
    difference = a_NxF.mean(0) - b_MxF.mean(0)
    a, b = (np.atleast_2d(np.cov(features, rowvar=False)) for features in (a_NxF, b_MxF))
    values, vectors = np.linalg.eigh(a)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    both = np.sqrt(np.clip(np.linalg.eigvalsh(root @ b @ root), 0, None)).sum()
    return float(difference @ difference + np.trace(a) + np.trace(b) - 2 * both)


def kernel(a_NxF: np.ndarray, b_MxF: np.ndarray) -> float:
    """Squared mean discrepancy under (x·y / F + 1)³, unbiased (Bińkowski et al. 2018, 1801.01401, section 4)."""
    size = a_NxF.shape[1]

    def between(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x @ y.T / size + 1) ** 3

    def within(x: np.ndarray) -> float:
        values = between(x, x)
        return float((values.sum() - np.trace(values)) / (len(x) * (len(x) - 1)))

    return within(a_NxF) + within(b_MxF) - 2 * float(between(a_NxF, b_MxF).mean())


def coverage(of_NxF: np.ndarray, by_MxF: np.ndarray) -> float:
    """Share of `by` within the distance of a member of `of` to its third nearest neighbour.

    Real pictures covered by generated ones give precision, the reverse recall (Kynkäänniemi et al. 2019, 1904.06991,
    equation 1).
    """
    nearest = min(NEIGHBOUR_COUNT, len(of_NxF) - 1)
    radii_N = np.partition(_squared_distances(of_NxF, of_NxF), nearest, axis=1)[:, nearest]  # the first is itself
    return float((_squared_distances(by_MxF, of_NxF) <= radii_N).any(1).mean())


def _squared_distances(a_NxF: np.ndarray, b_MxF: np.ndarray) -> np.ndarray:
    return np.square(a_NxF).sum(1)[:, None] + np.square(b_MxF).sum(1) - 2 * a_NxF @ b_MxF.T


def network(kernels: list[np.ndarray], last: np.ndarray, x_BxHxWx3: jax.Array) -> jax.Array:
    """Compute features f_BxF of order 1 from pictures from -1 to 1; differentiable."""
    x = _reduced(x_BxHxWx3)
    for w in kernels:
        x = jax.lax.conv_general_dilated(
            x, jnp.asarray(w), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )
        x = jax.nn.leaky_relu(x, 0.2)
    return jnp.matmul(x.reshape(len(x), -1), last, precision="highest")


@cache
def weights() -> tuple[list[np.ndarray], np.ndarray]:
    """Draw the convolutions' kernels (He et al. 2015) and an orthonormal projection to F numbers."""
    random = np.random.RandomState(WEIGHTS_SEED)  # numpy's only generator with numbers that never change
    kernels, inputs = [], 3
    for outputs in WIDTHS:
        shape = (4, 4, inputs, outputs)
        kernels.append((random.standard_normal(shape) * (2 / (16 * inputs)) ** 0.5).astype(np.float32))
        inputs = outputs
    side = INPUT_SIZE >> len(WIDTHS)
    base, _ = np.linalg.qr(random.standard_normal((side * side * inputs, FEATURE_COUNT)))
    return kernels, (base * np.sign(base[0])).astype(np.float32)


def random_features(pictures: np.ndarray) -> np.ndarray:
    """uint8 (B, side, side, 3) → float32 (B, F)."""
    return np.asarray(_compiled()(pictures))


def user_features(target: str) -> Features:
    """Return the user's function at `file.py:name`, checked at every call; with Inception's features this is FID."""
    from tpuswarm.train.user_code import blame, find_maker

    call = find_maker(target)

    def features(pictures: np.ndarray) -> np.ndarray:
        with blame(f"{target} failed"):
            given = call(pictures)
        try:
            array = np.asarray(given, np.float64)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a torch tensor with a gradient
            raise InputError(f"{target} gave no array of numbers: {first_line(error)}") from error
        if array.ndim != 2 or len(array) != len(pictures) or not np.isfinite(array).all():
            raise InputError(
                f"{target} gave an array of shape {list(array.shape)} for {len(pictures)} pictures: a finite row of "
                "features for each is needed"
            )
        return array

    return features


@cache
def _compiled() -> Callable[[np.ndarray], jax.Array]:
    kernels, last = weights()
    return jax.jit(lambda x: network(kernels, last, x.astype(jnp.float32) / 127.5 - 1))


def _reduced(x_BxHxWx3: jax.Array) -> jax.Array:
    # to INPUT_SIZE x INPUT_SIZE by means over squares; smaller pictures by repetition
    B, side = len(x_BxHxWx3), x_BxHxWx3.shape[1]
    if side < INPUT_SIZE:
        return jnp.repeat(jnp.repeat(x_BxHxWx3, INPUT_SIZE // side, 1), INPUT_SIZE // side, 2)
    part = side // INPUT_SIZE
    return x_BxHxWx3.reshape(B, INPUT_SIZE, part, INPUT_SIZE, part, 3).mean((2, 4))

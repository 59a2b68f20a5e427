"""A fixed network that nobody trained, whose outputs pictures are compared by.

FID compares by Inception's features, whose weights cannot be part of this project. Features of random convolutions tell
sets of pictures apart as well (Naeem et al. 2020, 2002.09797) and are the same everywhere; distances by them rank runs
on the same data, and say nothing beside the FIDs that others report.
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError, first_line

SIDE = 32
"""Pictures are reduced to this size first, by means over squares."""
WIDTHS = (32, 64, 128)
"""Channels of the convolutions, 4 x 4, each of which halves the size."""
FEATURES = 128
"""F: of a picture."""
SEED = 20_191_204


Features = Callable[[np.ndarray], np.ndarray]
"""Pictures uint8 (B, height, width, 3) → features float (B, F)."""


def project(kernels: list[np.ndarray], last: np.ndarray, x_BxHxWx3: jax.Array) -> jax.Array:
    """Pictures from -1 to 1 → f_BxF of order 1; a differentiable function."""
    x = _reduced(x_BxHxWx3)
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(
            x, jnp.asarray(kernel), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )
        x = jax.nn.leaky_relu(x, 0.2)
    return jnp.matmul(x.reshape(len(x), -1), last, precision="highest")


@cache
def weights() -> tuple[list[np.ndarray], np.ndarray]:
    """The convolutions' kernels (He et al. 2015) and an orthonormal projection of all that they give to F numbers."""
    random = np.random.RandomState(SEED)  # the only generator of numpy's whose numbers never change
    kernels, inputs = [], 3
    for outputs in WIDTHS:
        shape = (4, 4, inputs, outputs)
        kernels.append((random.standard_normal(shape) * (2 / (16 * inputs)) ** 0.5).astype(np.float32))
        inputs = outputs
    left = SIDE >> len(WIDTHS)
    base, _ = np.linalg.qr(random.standard_normal((left * left * inputs, FEATURES)))
    return kernels, (base * np.sign(base[0])).astype(np.float32)


def random_features(pictures: np.ndarray) -> np.ndarray:
    """uint8 (B, side, side, 3) → float32 (B, F)."""
    return np.asarray(_compiled()(pictures))


def of_user(target: str) -> Features:
    """A function of the user's at `file.py:name`, checked at every call; with Inception's features this is FID."""
    from tpuswarm.train.user_code import blame, find_maker

    call = find_maker(target)

    def features(pictures: np.ndarray) -> np.ndarray:
        with blame(f"{target} failed"):
            given = call(pictures)
        try:
            found = np.asarray(given, np.float64)
        except (TypeError, ValueError, RuntimeError) as error:  # the last: torch's, of a tensor with a gradient
            raise InputError(f"{target} gave no array of numbers: {first_line(error)}") from error
        if found.ndim != 2 or len(found) != len(pictures) or not np.isfinite(found).all():
            raise InputError(
                f"{target} gave an array of shape {list(found.shape)} for {len(pictures)} pictures: a finite row of "
                "features for each of them is needed"
            )
        return found

    return features


@cache
def _compiled() -> Callable[[np.ndarray], jax.Array]:
    kernels, last = weights()
    return jax.jit(lambda x: project(kernels, last, x.astype(jnp.float32) / 127.5 - 1))


def _reduced(x_BxHxWx3: jax.Array) -> jax.Array:
    """To SIDE x SIDE, by means over squares; smaller pictures by repetition."""
    B, side = len(x_BxHxWx3), x_BxHxWx3.shape[1]
    if side < SIDE:
        return jnp.repeat(jnp.repeat(x_BxHxWx3, SIDE // side, 1), SIDE // side, 2)
    part = side // SIDE
    return x_BxHxWx3.reshape(B, SIDE, part, SIDE, part, 3).mean((2, 4))

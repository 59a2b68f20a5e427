"""How far a set of generated pictures is from a set of real ones, by the features of both."""

import numpy as np

NEIGHBOURS = 3
"""k of precision and recall."""


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
    """Between normal distributions of the same means and covariances (Heusel et al. 2017, 1706.08500, equation 6)."""
    difference = a_NxF.mean(0) - b_MxF.mean(0)
    a, b = (np.atleast_2d(np.cov(each, rowvar=False)) for each in (a_NxF, b_MxF))
    values, vectors = np.linalg.eigh(a)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    both = np.sqrt(np.clip(np.linalg.eigvalsh(root @ b @ root), 0, None)).sum()
    return float(difference @ difference + np.trace(a) + np.trace(b) - 2 * both)


def kernel(a_NxF: np.ndarray, b_MxF: np.ndarray) -> float:
    """Squared mean discrepancy under (x·y / F + 1)³ (Bińkowski et al. 2018, 1801.01401, section 4).

    Unbiased, and so below 0 at times.
    """
    size = a_NxF.shape[1]

    def between(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x @ y.T / size + 1) ** 3

    def within(x: np.ndarray) -> float:
        found = between(x, x)
        return float((found.sum() - np.trace(found)) / (len(x) * (len(x) - 1)))

    return within(a_NxF) + within(b_MxF) - 2 * float(between(a_NxF, b_MxF).mean())


def coverage(of_NxF: np.ndarray, by_MxF: np.ndarray) -> float:
    """Share of `by` no farther from one of `of` than that one's third nearest neighbour in its own set.

    Of the real pictures by the generated it is precision, the other way round recall (Kynkäänniemi et al. 2019,
    1904.06991, equation 1).
    """
    nearest = min(NEIGHBOURS, len(of_NxF) - 1)
    radii_N = np.partition(_apart(of_NxF, of_NxF), nearest, axis=1)[:, nearest]  # each one is its own nearest
    return float((_apart(by_MxF, of_NxF) <= radii_N).any(1).mean())


def _apart(a_NxF: np.ndarray, b_MxF: np.ndarray) -> np.ndarray:
    """Squared distances (N, M)."""
    return np.square(a_NxF).sum(1)[:, None] + np.square(b_MxF).sum(1) - 2 * a_NxF @ b_MxF.T

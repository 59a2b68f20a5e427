"""Writes pictures, and films of several, to files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.config.formatting import format_figure
from tpuswarm.errors import InputError

ENDINGS, FILMS = (".png", ".jpg", ".webp"), (".gif", ".png", ".webp")
"""Of files that a picture, and that a film, is written to."""
FRAME_MS = 40
"""Of a film."""


def check_picture(out: Path, film: bool) -> None:
    """Raise InputError for a file that cannot be one, before a model is read."""
    endings = FILMS if film else ENDINGS
    if out.suffix.lower() not in endings:
        raise InputError(f"--out {out} ends in none of {', '.join(endings)}; name a file that does")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} for --out {out}; make it first")


def write_pictures(made: Iterator[np.ndarray], out: Path) -> None:
    """Each uint8 (height, width, 3); more than one is a film that begins again. Raises InputError."""
    from PIL import Image

    first, *rest = (Image.fromarray(each) for each in made)
    film: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": FRAME_MS, "loop": 0} if rest else {}
    try:
        first.save(out, **film)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error


def write_code(w_D: np.ndarray, out: Path) -> Path:
    """A latent code beside its picture, as numpy reads it; the file. Raises InputError."""
    path = out.with_suffix(".npy")
    try:
        np.save(path, w_D)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def told(measures: Mapping[str, Any], features: str | None) -> str:
    """How far generated pictures are from real ones, in a sentence; features: by what of the user's, if by it."""
    by = f"the features of {features}" if features else "the features of a fixed random network, not FID's"
    distances = (
        f"Fréchet distance {format_figure(measures['frechet_distance'])}, kernel distance "
        f"{format_figure(measures['kernel_distance'])}, precision {measures['precision']:.2f}, "
        f"recall {measures['recall']:.2f}"
    )
    sets = f"{measures['made']:,} generated pictures beside {measures['reference']:,} real ones"
    return f"{sets}, {measures['held_out']:,} of them held out: {distances}; by {by}"

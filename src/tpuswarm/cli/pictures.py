"""Writes pictures, and films of several, to files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    import numpy as np

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


def write_pictures(made: "Iterator[np.ndarray]", out: Path) -> None:
    """Each uint8 (height, width, 3); more than one is a film that begins again. Raises InputError."""
    from PIL import Image

    first, *rest = (Image.fromarray(each) for each in made)
    film: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": FRAME_MS, "loop": 0} if rest else {}
    try:
        first.save(out, **film)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error

"""Write pictures and films to files, and describe how good they are."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuswarm.config.formatting import format_figure
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    import numpy as np

PICTURE_EXTENSIONS = (".png", ".jpg", ".webp")
FILM_EXTENSIONS = (".gif", ".png", ".webp")
FRAME_MS = 40


def check_file(out: Path, is_film: bool) -> None:
    """Raise InputError, before a model is loaded, if a file cannot be written."""
    extensions = FILM_EXTENSIONS if is_film else PICTURE_EXTENSIONS
    if out.suffix.lower() not in extensions:
        raise InputError(f"--out {out} needs one of the extensions {', '.join(extensions)}")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} for --out {out}; create it first")


def write(pictures: Iterator["np.ndarray"], out: Path) -> None:
    """Write a picture, uint8 (height, width, 3), or several as a film that loops."""
    from PIL import Image

    first, *rest = (Image.fromarray(picture) for picture in pictures)
    film: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": FRAME_MS, "loop": 0} if rest else {}
    try:
        first.save(out, **film)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error


def write_code(w_D: "np.ndarray", out: Path) -> Path:
    """Write a latent code beside its picture, as a file of numpy."""
    import numpy as np

    path = out.with_suffix(".npy")
    try:
        np.save(path, w_D)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def describe_measures(measures: Mapping[str, Any], features: str | None) -> str:
    """Describe how far generated pictures are from real ones. `features`: the user's own function, if any."""
    by = f"the features of {features}" if features else "the features of a fixed random network, not FID's"
    distances = (
        f"Fréchet distance {format_figure(measures['frechet_distance'])}, kernel distance "
        f"{format_figure(measures['kernel_distance'])}, precision {measures['precision']:.2f}, "
        f"recall {measures['recall']:.2f}"
    )
    sets = f"{measures['made']:,} generated and {measures['reference']:,} real pictures"
    return f"{sets}, {measures['held_out']:,} held out: {distances}; by {by}"

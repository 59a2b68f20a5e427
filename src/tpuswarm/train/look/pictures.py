"""Pictures in a run's folder: those that its model generates while it learns, and those of hooks."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.train.run.directory import writing

FOLDER = "pictures"
PICTURES, TEXTS = "pictures", "texts"
"""Keys in an evaluation's row on its way to the process that writes files: pictures by the end of their file name, and
texts of hooks."""
GENERATED_PATTERN = "[0-9]" * 8 + ".png"
"""Generated pictures by step, in a swarm by commit; those of hooks end in the hook's number."""


def write_picture(folder: Path, name: str, picture: np.ndarray) -> None:
    """Write a picture, uint8 (height, width, 3), into a run's folder; RunFailed if that fails."""
    path = folder / FOLDER / name
    with writing(path):
        from matplotlib.image import imsave  # takes half a second

        path.parent.mkdir(exist_ok=True)
        imsave(path, picture)


def to_picture(figure: Any) -> np.ndarray:
    """Convert a matplotlib figure to a picture, uint8 (height, width, 3), and close it in pyplot."""
    from PIL import Image

    file = BytesIO()
    figure.savefig(file, format="png")
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)
    return np.asarray(Image.open(file).convert("RGB"))


def read_pictures(folder: Path, max_count: int) -> list[tuple[int, bytes]]:
    """Return step and PNG file of generated pictures: the first, the last, and others at even distances."""
    files = sorted((folder / FOLDER).glob(GENERATED_PATTERN))
    indices = np.linspace(0, len(files) - 1, min(max_count, len(files))).round().astype(int)
    return [(int(files[index].stem), files[index].read_bytes()) for index in dict.fromkeys(indices)]

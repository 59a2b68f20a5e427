"""Pictures of a run: what its model makes as it learns, and what hooks return."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.train.run.directory import writing

FOLDER = "pictures"
PICTURES, TEXTS = "pictures", "texts"
"""Keys of an evaluation's row on its way to the process that writes it; they are in no file.

Pictures by the end of their file's name, and the texts of hooks.
"""
MADE = "[0-9]" * 8 + ".png"
"""Names of those that the model makes, by step, in a swarm by commit; those of hooks have the hook's number too."""


def write_picture(folder: Path, name: str, picture: np.ndarray) -> None:
    """Into the folder of a run; picture: uint8 (height, width, 3). Raises RunFailed."""
    place = folder / FOLDER / name
    with writing(place):
        from matplotlib.image import imsave  # half a second that no start waits for

        place.parent.mkdir(exist_ok=True)
        imsave(place, picture)


def to_picture(figure: Any) -> np.ndarray:
    """A matplotlib figure as a picture, uint8 (height, width, 3); one that pyplot holds is closed."""
    from PIL import Image

    file = BytesIO()
    figure.savefig(file, format="png")
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)
    return np.asarray(Image.open(file).convert("RGB"))


def made(folder: Path, most: int) -> list[tuple[int, bytes]]:
    """Step and PNG file of what the model of a run has made: the first, the last, and others as far apart."""
    found = sorted((folder / FOLDER).glob(MADE))
    chosen = dict.fromkeys(round(each) for each in np.linspace(0, len(found) - 1, min(most, len(found))))
    return [(int(found[number].stem), found[number].read_bytes()) for number in chosen]

"""Pictures on a terminal."""

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from tpuswarm.train.look.live import WIDEST


def mosaic(picture: np.ndarray, width: int, height: int) -> Text:
    """The upper part of a picture, uint8 (height, width, 3), as wide as the view: each letter shows two pixels."""
    step = max(1.0, picture.shape[1] / min(width, WIDEST))
    columns = (np.arange(int(picture.shape[1] / step)) * step + step / 2).astype(int)
    rows = (np.arange(min(int(picture.shape[0] / step), 2 * height)) * step + step / 2).astype(int)
    shown = picture[rows[: len(rows) // 2 * 2]][:, columns]
    text = Text(no_wrap=True)
    for above, below in zip(shown[::2], shown[1::2], strict=True):
        for up, down in zip(above, below, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*up), bgcolor=Color.from_rgb(*down)))
        text.append("\n")
    text.right_crop()
    return text

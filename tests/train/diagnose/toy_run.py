"""Short runs of the toy model."""

from pathlib import Path

from tests.train import toy
from tpuswarm import Trainer


def run_steps(folder, recipe=None, steps=30, **options):
    return Trainer(**{"devices": 1, "save_every": 10, **options}).steps(
        recipe or toy.recipe(), steps=steps, batch=8, run=folder
    )


def place(file, text):
    """Return FILE:LINE of the first line of `file` that holds `text`."""
    lines = Path(file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, start=1) if text in line)}"

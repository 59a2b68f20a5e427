"""Runs of the toy, and what was said of them and of other runs, for the tests of diagnostics."""

from pathlib import Path

from tests.train import toy
from tpuswarm import Trainer
from tpuswarm.train.run.directory import EVENTS, read_rows

STEPS = 30


def loop(folder, recipe=None, **options):
    return Trainer(**{"devices": 1, "save_every": 10, **options}).steps(
        recipe or toy.recipe(), steps=STEPS, batch=8, run=folder
    )


def said(folder, kind=None):
    """What was said on the way, each with its numbers."""
    found = [row for row in read_rows(folder / EVENTS) if row["event"] == "diagnostic"]
    return [row for row in found if kind in (None, row["kind"])]


def complaints(folder):
    """The kinds of what was said; but for starvation, which a busy machine may bring about."""
    return {row["kind"] for row in said(folder)} - {"starvation"}


def line_of(file, text):
    """The first line of `file` that holds `text`."""
    lines = Path(file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)

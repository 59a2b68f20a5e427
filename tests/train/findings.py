"""Train the toy model for a few steps and read the findings of its diagnostics."""

from pathlib import Path

from tests.train import toy
from tpuswarm import Trainer
from tpuswarm.train.run.directory import EVENTS, read_rows


def run_steps(folder, recipe=None, steps=30, **options):
    options = {"devices": 1, "save_every": 10, **options}
    return Trainer(**options).steps(recipe or toy.recipe(), steps=steps, batch=8, run=folder)


def place(file, text):
    """Return FILE:LINE of the first line of `file` that holds `text`."""
    lines = Path(file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, start=1) if text in line)}"


def read_findings(folder, kind=None):
    found = [row for row in read_rows(folder / EVENTS) if row["event"] == "diagnostic"]
    return [row for row in found if kind in (None, row["kind"])]


def complaints(folder):
    """Return the kinds of findings, without starvation, which a busy machine may cause."""
    return {row["kind"] for row in read_findings(folder)} - {"starvation"}

"""Print what a finished run writes, and the next command."""

from pathlib import Path

from tpuswarm.train.process.terminal import echo
from tpuswarm.train.recipe import Recipe, supports
from tpuswarm.train.run.directory import EVENTS, SAMPLE_EVENT, read_rows
from tpuswarm.train.storage.folders import shown

SAMPLE_LINES = 5


def print_next(run: Path, recipe: Recipe) -> None:
    """Print the beginning of a finished run's newest sample, if its model writes text, and the next command."""
    events = (event for event in read_rows(run / EVENTS) if event["event"] == SAMPLE_EVENT)
    samples = [event["text"] for event in events if "message" not in event]  # texts of hooks have a message
    if samples and (lines := samples[-1].strip("\n").splitlines()[:SAMPLE_LINES]):
        echo("a sample of its text:")
        for line in lines:
            echo(f"  {''.join(letter if letter.isprintable() else '?' for letter in line)}")
    if supports(recipe, "grids"):
        echo(f"next: `tpuswarm sample {shown(run)} --grid 4x4 --out grid.png`")
    elif samples:
        echo(f"next: `tpuswarm sample {shown(run)}`")
    else:
        echo(f"next: `tpuswarm page {shown(run)}`")

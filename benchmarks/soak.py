"""A swarm for twenty minutes in which members, aggregator and coordinator are killed at random."""

from benchmarks.goodput import COLUMNS, MEMBERS, SEED, measure
from benchmarks.report import Settings, Table

MINUTES, PAUSE = 20.0, 20.0


def run(settings: Settings) -> Table:
    """One row, as in the benchmark of the goodput."""
    seconds, pause = (60.0, 15.0) if settings.quick else (MINUTES * 60, PAUSE)
    row = ("members, aggregator and coordinator", *measure(seconds, pause, "mac").row())
    notes = [f"{MEMBERS} members; whatever was alive was killed every {pause:.0f} s on average, seed {SEED}."]
    return Table("Soak", COLUMNS, [row], notes)

"""Kill a swarm's processes at random, and damage the files of runs, for twenty minutes each."""

from collections.abc import Iterator

from tests import damaged_runs

from benchmarks.goodput import COLUMNS, KILL_SEED, MEMBER_COUNT, measure
from benchmarks.report import Settings, Table

SOAK_S, PAUSE_S = 1200.0, 20.0


def run(settings: Settings) -> Iterator[Table]:
    seconds, pause = (60.0, 15.0) if settings.quick else (SOAK_S, PAUSE_S)
    row = ("members, aggregator and coordinator", *measure(seconds, pause, "mac").row())
    notes = [f"{MEMBER_COUNT} members; a process was killed every {pause:.0f} s on average, seed {KILL_SEED}."]
    yield Table("Soak", COLUMNS, [row], notes)
    yield damaged_runs.run(settings)

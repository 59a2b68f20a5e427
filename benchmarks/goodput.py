"""Goodput of a swarm whose processes are killed: applied tokens as a share of processed ones."""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import SMALL, Kill, Swarm, torment
from benchmarks.report import Settings, Table
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

MEMBERS, CYCLE, SEED = 4, 20, 0
MINUTES, PAUSE = 15.0, 60.0
QUIET_MINUTES = 3.0
ARGUMENTS = (
    "gpt2-tiny", "--data", "fake", *SMALL, "--steps", "10M",
    "--members", str(MEMBERS), "--cycle", str(CYCLE), "--outer", "average",
)  # fmt: skip
COLUMNS = (
    "swarm", "minutes", "kills", "commits", "processed", "applied", "lost", "goodput", "tokens/s",
    "back after s, median (max)", "ledger",
)  # fmt: skip


def run(settings: Settings) -> Table:
    """Four members, a kill -9 a minute for fifteen minutes, beside the same swarm without kills."""
    minutes, quiet = (1.0, 0.5) if settings.quick else (MINUTES, QUIET_MINUTES)
    pause = 20.0 if settings.quick else PAUSE
    rows = [
        ("no kills", *measure(quiet * 60, None, "").row()),
        (f"a kill -9 of a member every {pause:.0f} s", *measure(minutes * 60, pause, "m").row()),
    ]
    notes = [
        f"{MEMBERS} members, cycle {CYCLE}, a gpt2-tiny of {' '.join(SMALL)}, average, seed {SEED} of the kills.",
        "Goodput is applied / (processed - outstanding); back: from the kill until the member, made anew, has a lease.",
    ]
    return Table("Goodput under kills", COLUMNS, rows, notes)


@dataclass(frozen=True)
class Measured:
    """What a swarm of local processes did in a while; tokens of its books."""

    took: float
    """Seconds."""
    kills: list[Kill]
    newest: int
    """The last commit."""
    processed: int
    applied: int
    lost: int
    settled: int
    problems: list[str]
    """What `ledger verify` found."""

    @property
    def goodput(self) -> float:
        """Applied tokens of those that are settled."""
        return self.applied / max(self.settled, 1)

    def row(self) -> tuple[str, ...]:
        """In the table."""
        back = [kill.back for kill in self.kills]
        return (
            f"{self.took / 60:.1f}",
            str(len(self.kills)),
            str(self.newest),
            f"{self.processed:,}",
            f"{self.applied:,}",
            f"{self.lost:,}",
            f"{self.goodput:.2%}",
            f"{self.applied / self.took:,.0f}",
            f"{statistics.median(back):.1f} ({max(back):.1f})" if back else "–",
            f"{len(self.problems)} problems: {self.problems[0]}" if self.problems else "sound",
        )


def measure(seconds: float, pause: float | None, names: str, arguments: Sequence[str] = ARGUMENTS) -> Measured:
    """pause: mean seconds between two kills of what begins with one of the letters in `names`."""
    rnd = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder) / "run", arguments)
        swarm.start()
        kills: list[Kill] = []
        try:
            swarm.wait(lambda: (swarm.status().get("version") or 0) >= 2)
            began, before = time.monotonic(), swarm.status()["tokens"]
            if pause is None:
                time.sleep(seconds)
            else:
                kills = torment(swarm, rnd, seconds, lambda: rnd.uniform(0.5, 1.5) * pause, names)
            took, after = time.monotonic() - began, swarm.status()["tokens"]
        finally:
            swarm.end()
        report = verify(Store(swarm.run), lambda text: None)
    processed, applied, lost = (after[name] - before[name] for name in ("processed", "applied", "lost"))
    settled = processed - (after["outstanding"] - before["outstanding"])
    return Measured(took, kills, report.newest or 0, processed, applied, lost, settled, report.problems)

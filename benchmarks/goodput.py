"""Goodput of a swarm whose processes are killed: the share of processed tokens that is applied."""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.swarm.chaos import SMALL, Kill, Swarm, torment

from benchmarks.report import Settings, Table
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

MEMBER_COUNT, CYCLE, KILL_SEED = 4, 20, 0
KILL_MINUTES, PAUSE_S = 15.0, 60.0
QUIET_MINUTES = 3.0
ARGUMENTS = (
    "gpt2-tiny", "--data", "fake", *SMALL, "--steps", "10M",
    "--members", str(MEMBER_COUNT), "--cycle", str(CYCLE), "--outer", "average",
)  # fmt: skip
COLUMNS = (
    "swarm", "minutes", "kills", "commits", "processed", "applied", "lost", "goodput", "tokens/s",
    "back after s, median (max)", "ledger",
)  # fmt: skip


def run(settings: Settings) -> Table:
    minutes, quiet = (1.0, 0.5) if settings.quick else (KILL_MINUTES, QUIET_MINUTES)
    pause = 20.0 if settings.quick else PAUSE_S
    rows = [
        ("no kills", *measure(quiet * 60, None, "").row()),
        (f"a kill -9 of a member every {pause:.0f} s", *measure(minutes * 60, pause, "m").row()),
    ]
    notes = [
        f"{MEMBER_COUNT} members, cycle {CYCLE}, gpt2-tiny with {' '.join(SMALL)}, average, kills by seed {KILL_SEED}",
        "goodput: applied / (processed - outstanding); back: from the kill to the lease of the member's new process",
    ]
    return Table("Goodput under kills", COLUMNS, rows, notes)


@dataclass(frozen=True)
class Measured:
    """Progress of a swarm of local processes, in tokens. problems: findings of `ledger verify`."""

    elapsed_s: float
    kills: list[Kill]
    newest: int
    processed: int
    applied: int
    lost: int
    settled: int
    problems: list[str]

    @property
    def goodput(self) -> float:
        """The share of settled tokens that is applied."""
        return self.applied / max(self.settled, 1)

    def row(self) -> tuple[str, ...]:
        back = [kill.back for kill in self.kills]
        return (
            f"{self.elapsed_s / 60:.1f}",
            str(len(self.kills)),
            str(self.newest),
            f"{self.processed:,}",
            f"{self.applied:,}",
            f"{self.lost:,}",
            f"{self.goodput:.2%}",
            f"{self.applied / self.elapsed_s:,.0f}",
            f"{statistics.median(back):.1f} ({max(back):.1f})" if back else "–",
            f"{len(self.problems)} problems: {self.problems[0]}" if self.problems else "sound",
        )


def measure(seconds: float, pause: float | None, names: str, arguments: Sequence[str] = ARGUMENTS) -> Measured:
    """Run a swarm. pause: mean seconds between kills of processes whose names begin with a letter in `names`."""
    rnd = random.Random(KILL_SEED)
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
            elapsed, after = time.monotonic() - began, swarm.status()["tokens"]
        finally:
            swarm.end()
        report = verify(Store(swarm.run), lambda text: None)
    processed, applied, lost = (after[name] - before[name] for name in ("processed", "applied", "lost"))
    settled = processed - (after["outstanding"] - before["outstanding"])
    return Measured(elapsed, kills, report.newest or 0, processed, applied, lost, settled, report.problems)

"""What a bookmark in a ledger costs, by the lives of members that the run has behind it. A few seconds.

The view is made up: a hundred members, each life of which had five pushes. Processor's time of this process.
"""

import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.report import Settings, Table
from benchmarks.resume import PER_ROW, ROWS, TERMS, timed
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Identity, Incarnation
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage.bookmark import EVERY, bookmark_name, due
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store

LIVES = (300, 3000, 30_000)
MEMBERS, PUSHES, REPEATS = 100, 5, 3


def viewed(lives: int) -> View:
    """A view after so many lives, at a version at which a bookmark may be due."""
    rnd, tokens = random.Random(0), ROWS * PER_ROW
    keys = [Incarnation(f"m{number % MEMBERS}", f"{rnd.getrandbits(128):032x}") for number in range(lives)]
    verdicts = {}
    for number, key in enumerate(keys):
        rows = Rows.of((number * ROWS, (number + 1) * ROWS))
        on = Decision(Identity(key, PUSHES), "applied", "staleness 0", rows, number // MEMBERS, tokens, 1 / MEMBERS)
        verdicts[key] = (on, number // MEMBERS + 1)
    version, first = 2**10 * EVERY, genesis(TERMS, 1)
    newest = replace(first, version=version, tokens=lives * tokens, changes=version)
    return View(
        newest=newest,
        counted=Rows.of((0, lives * ROWS)),
        landmarks=tuple(f"{rnd.getrandbits(256):064x}" for _ in range(1 + version // 50)),
        processed=dict.fromkeys(keys, PUSHES * tokens),
        verdicts=verdicts,
    )


def at(view: View, version: int) -> View:
    """The same at another version."""
    return replace(view, newest=replace(view.newest, version=version))


def run(settings: Settings) -> Table:
    """Each is written and read a few times; the fastest counts."""
    rows = []
    for lives in LIVES[:1] if settings.quick else LIVES:
        view = viewed(lives)
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(Store(folder))
            ledger.append(view.newest)
            written = min(timed(partial(ledger.bookmark, view)) for _ in range(REPEATS))
            size = (Path(folder) / bookmark_name(view.version)).stat().st_size
            read = min(timed(partial(ledger._bookmarked, [view.version])) for _ in range(REPEATS))
        every = next(n for n in range(EVERY, view.version, EVERY) if due(at(view, n)))
        seconds = (f"{written:.3f}", f"{1000 * written / every:.2f}", f"{read:.3f}")
        rows.append((f"{lives:,}", str(every), *seconds, f"{size / 1e6:.1f}"))
    columns = ("lives", "commits from one to the next", "written, CPU-s", "a commit's part, ms", "read, CPU-s", "MB")
    return Table("Bookmarks by lives of members", columns, rows, ["of three, the fastest"])

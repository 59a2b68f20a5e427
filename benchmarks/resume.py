"""What a run that goes on costs before it trains, by its length: of records that a ledger might hold. About 7 minutes.

The records and the names of the headers are those of a run in a local folder; arrays are only named. Processor's time
of this process, its reading threads included: it does not depend on what else the machine does.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import Settings, Table
from tpuswarm.swarm.core import transitions as core
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.choose import Staleness, choose
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage.bookmark import BOOKMARK_INTERVAL, FOLDER
from tpuswarm.swarm.storage.ledger import Ledger, header_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.ledger_follower import LedgerFollower

RUNS = ((20, 1000), (20, 10_000), (100, 1000))
"""Members, and commits."""
ROWS, PER_ROW = 64, 1024
TERMS = Terms(
    "run",
    Digests("layout", "config", "data", "code"),
    ROWS,
    PER_ROW,
    10**12,
    100 * ROWS,
    (),
    OuterRule("nesterov"),
)


def write(folder: Path, members: int, commits: int) -> None:
    """A ledger in which all members are in each commit; its bookmark is about to be followed by the next."""
    ledger, rnd = Ledger(Store(folder)), random.Random(0)
    names = [Incarnation(f"m{number}", f"{rnd.getrandbits(128):032x}") for number in range(members)]
    first = genesis(TERMS, 1)
    ledger.append(first)
    view, row = LedgerView.from_records(first), 0
    (folder / "headers").mkdir()
    for version in range(1, commits + 1):
        headers = []
        for each in names:
            rows, row = Rows.from_ranges((row, row + ROWS)), row + ROWS
            identity = Identity(each, version)
            headers.append(
                Header(identity, "run", version - 1, rows, ROWS * PER_ROW, 1, "plain", 1.0, True, ("0" * 64,))
            )
            (folder / header_name(identity)).touch()  # whoever goes on reads no more of it than its name
        decisions = tuple(choose(view, headers, (), Staleness()))
        record = replace(
            view.newest,
            version=version,
            parent=ledger.digest(view.newest),
            state=(f"{rnd.getrandbits(256):064x}",),
            outer=(f"{rnd.getrandbits(256):064x}",),
            decisions=decisions,
            tokens=view.tokens + sum(each.tokens for each in decisions),
            changes=version,
            processed=tuple((each, version * ROWS * PER_ROW) for each in sorted(names)),
            time=100.0 * version,
        )
        ledger.append(record)
        view = view.after(record)
        if version == commits - BOOKMARK_INTERVAL + 1:
            ledger.bookmark(view)


def coordinator(folder: Path) -> Any:
    """A new epoch, from what is stored."""
    ledger = Ledger(Store(folder))
    view = ledger.view()
    return core.start_epoch(TERMS, view, ledger.headers(view), 0.0, founded=False)


def measure(folder: Path) -> tuple[float, float, float]:
    """Seconds of a processor: a coordinator's, a supervisor's, and of the latter's first look for what may go."""
    follower = LedgerFollower(folder, 1.0)
    first = timed(lambda: coordinator(folder))
    second = timed(lambda: follower.new_records(may_exist=True))
    view = follower.view
    assert view is not None
    return first, second, timed(lambda: follower._clean(view))


def timed(action: Callable[[], Any]) -> float:
    """Seconds of a processor."""
    before = time.process_time()
    action()
    return time.process_time() - before


def run(settings: Settings) -> Table:
    """One run after the other, each from its bookmark and without one."""
    rows = []
    for members, commits in ((3, 120),) if settings.quick else RUNS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write(folder, members, commits)
            found = measure(folder)
            shutil.rmtree(folder / FOLDER)
            without = measure(folder)
        pairs = (f"{one:.2f} / {other:.2f}" for one, other in zip(found, without, strict=True))
        rows.append((f"{members:,}", f"{commits:,}", *pairs))
    return Table(
        "Going on with a long run",
        ("members", "commits", "coordinator, CPU-s", "supervisor, CPU-s", "its first look for old files, CPU-s"),
        rows,
        [
            f"with a bookmark {BOOKMARK_INTERVAL - 1} records back / from all records; all members in each commit; "
            "local folder",
            "the first look for old files comes a minute later, in a thread of its own",
        ],
    )

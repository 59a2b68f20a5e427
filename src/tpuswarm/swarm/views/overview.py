"""Summarize all commits of a run for its report, in the memory of a few."""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

import numpy as np

from tpuswarm.swarm.core.values import Fate
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.tables import Commit, to_commit

NEWEST_COUNT = 20
"""Newest commits that are shown in full."""
MAX_COLUMNS = 400
"""Width of the picture of all commits; with more commits, neighbors are averaged."""


class MemberTotals(NamedTuple):
    """A member's contributions: their number, and tokens by fate."""

    member: str
    contributions: int
    applied: int
    returned: int
    dropped: int
    void: int


class Overview:
    """A summary of this many commits, which `add` receives in order."""

    def __init__(self, commits: int):
        self.commits = commits
        self.newest: deque[Commit] = deque(maxlen=NEWEST_COUNT)
        self.others: dict[Fate, list[tuple[int, str]]] = {}
        """Version and member of each contribution that was not counted, by fate."""
        self._counts: dict[str, Counter[str]] = {}
        self._edges = np.linspace(0, commits, max(1, min(MAX_COLUMNS, commits)) + 1).round()
        """Column boundaries, in commits."""
        self._weights: dict[str, np.ndarray] = {}
        """float64[2, columns] for each member: the sum of its weights, and the number of commits with one."""
        self._added = 0

    def add(self, commit: Commit) -> None:
        """Add the next commit."""
        column = int(np.searchsorted(self._edges, self._added, side="right")) - 1
        weights = defaultdict[str, float](float)
        for verdict in commit.verdicts:
            counts = self._counts.setdefault(verdict.member, Counter())
            counts["contributions"] += 1
            counts[verdict.fate] += verdict.tokens
            if verdict.fate == "applied":
                weights[verdict.member] += verdict.weight
            else:
                self.others.setdefault(verdict.fate, []).append((commit.version, verdict.member))
        for member, weight in weights.items():
            own = self._weights.setdefault(member, np.zeros((2, len(self._edges) - 1)))
            own[:, column] += weight, 1
        self.newest.append(commit)
        self._added += 1

    @property
    def totals(self) -> list[MemberTotals]:
        """Totals of each member, by name."""
        fields = MemberTotals._fields[1:]
        return [MemberTotals(member, *map(own.__getitem__, fields)) for member, own in sorted(self._counts.items())]

    @property
    def weights(self) -> np.ndarray:
        """Mean weight in the commits that count the member, float64[members by name, columns]; NaN if none does."""
        nothing = np.zeros((2, len(self._edges) - 1))
        found = np.array([self._weights.get(total.member, nothing) for total in self.totals] or [nothing])
        total, count = found[:, 0], found[:, 1]
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def overview(store: Store) -> Overview:
    """Summarize all commits. Raise RunFailed if a record is damaged or missing."""
    ledger = Ledger(store)
    versions = ledger.contiguous_versions()
    made = Overview(len(versions))
    for record in ledger.records(versions):
        made.add(to_commit(record))
    return made

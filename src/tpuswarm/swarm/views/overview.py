"""What a report says of all commits of a run, in the memory of a few: they are taken in one after the other."""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

import numpy as np

from tpuswarm.swarm.core.values import Fate
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.tables import Commit, commit_of

COMMITS = 20
"""Newest ones that are shown as they are."""
COLUMNS = 400
"""Of the picture of all commits: more are averaged."""


class MemberTotals(NamedTuple):
    """What became of a member's contributions: their number, and tokens by fate."""

    member: str
    contributions: int
    applied: int
    returned: int
    dropped: int
    void: int


class Overview:
    """Of so many commits, of which `add` takes the next."""

    def __init__(self, commits: int):
        self.commits = commits
        self.newest: deque[Commit] = deque(maxlen=COMMITS)
        self.others: dict[Fate, list[tuple[int, str]]] = {}
        """Version and member of each contribution that was not counted, by fate."""
        self._counts: dict[str, Counter[str]] = {}
        self._edges = np.linspace(0, commits, max(1, min(COLUMNS, commits)) + 1).round()
        """Of the columns, in commits."""
        self._weights: dict[str, np.ndarray] = {}
        """Of each member float64[2, columns]: the sum of its weights, and in how many commits it has one."""
        self._added = 0

    def add(self, commit: Commit) -> None:
        """The next one."""
        column = int(np.searchsorted(self._edges, self._added, side="right")) - 1
        weights = defaultdict[str, float](float)
        for each in commit.verdicts:
            counts = self._counts.setdefault(each.member, Counter())
            counts["contributions"] += 1
            counts[each.fate] += each.tokens
            if each.fate == "applied":
                weights[each.member] += each.weight
            else:
                self.others.setdefault(each.fate, []).append((commit.version, each.member))
        for member, weight in weights.items():
            own = self._weights.setdefault(member, np.zeros((2, len(self._edges) - 1)))
            own[:, column] += weight, 1
        self.newest.append(commit)
        self._added += 1

    @property
    def totals(self) -> list[MemberTotals]:
        """What each member contributed, by name."""
        fields = MemberTotals._fields[1:]
        return [MemberTotals(member, *map(own.__getitem__, fields)) for member, own in sorted(self._counts.items())]

    @property
    def weights(self) -> np.ndarray:
        """float64[members, columns], members by name: mean weight in the commits that count it, NaN where none does."""
        nothing = np.zeros((2, len(self._edges) - 1))
        found = np.array([self._weights.get(each.member, nothing) for each in self.totals] or [nothing])
        total, there = found[:, 0], found[:, 1]
        return np.divide(total, there, out=np.full_like(total, np.nan), where=there > 0)


def overview(store: Store) -> Overview:
    """Of all commits. Raises RunFailed where a record is damaged or missing."""
    ledger = Ledger(store)
    versions = ledger.unbroken()
    made = Overview(len(versions))
    for record in ledger.records(versions):
        made.add(commit_of(record))
    return made

"""All commits of a run in the memory of a few."""

import random
import weakref

import numpy as np
import pytest

from tests.swarm.chains import Run
from tests.swarm.storage.test_bookmark import memory
from tpuswarm.swarm.storage import ledger
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.views import overview
from tpuswarm.swarm.views.overview import Overview
from tpuswarm.swarm.views.tables import Commit, Verdict

NAN = np.nan


@pytest.mark.parametrize(
    "columns, shown",
    [(3, [[0.75, NAN, 0.2], [0.5, NAN, 0.9]]), (400, [[0.5, 1, NAN, NAN, 0.2, NAN], [0.5, NAN, NAN, NAN, 0.8, 1]])],
)
def test_many_commits_are_averaged(monkeypatch, columns, shown):
    """A member whose two lives are in one commit has their sum there; what was not counted has no weight."""
    monkeypatch.setattr(overview, "COLUMNS", columns)
    commits = (
        [("a", 0.2), ("a", 0.3), ("b", 0.5)], [("a", 1.0), ("b", None)], [], [], [("a", 0.2), ("b", 0.8)], [("b", 1.0)]
    )  # fmt: skip
    made = Overview(len(commits))
    for version, weights in enumerate(commits):
        verdicts = [
            Verdict(name, "1", 1, "dropped" if weight is None else "applied", "", 1, 0, 8, weight or 0.0, 1.0)
            for name, weight in weights
        ]
        made.add(Commit(verdicts, version, 1, 0.0, "average", 1.0, 0.0, 0))
    np.testing.assert_allclose(made.weights, shown)
    assert made.others == {"dropped": [(1, "b")]}
    assert [each.version for each in made.newest] == list(range(6))


def test_a_long_run_is_not_held_in_memory(monkeypatch):
    run, ahead = Run(memory(), random.Random(0), arrays=False).grow(60), 8
    monkeypatch.setattr(ledger, "AHEAD", ahead)
    there, inner = weakref.WeakSet(), Ledger._record

    def read(self, version):
        found = inner(self, version)
        there.add(found[0])
        assert len(there) <= 2 * ahead
        return found

    monkeypatch.setattr(Ledger, "_record", read)
    assert overview.overview(run.store).commits == 61

"""Commits in tables and in the overview of a long run, compared with a naive recount of the records."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import Run, counted_naively, memory_store
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views import overview
from tpuswarm.swarm.views.overview import Overview
from tpuswarm.swarm.views.tables import Commit, Verdict, read_commits

NAN = np.nan


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 10))
def test_commits_and_totals_agree_with_a_naive_recount(source, commits):
    run = Run(memory_store(), source, arrays=False).grow(commits)
    counted = counted_naively(run.records)
    assert [
        (member.member, member.contributions, member.applied, member.returned, member.dropped, member.void)
        for member in overview.overview(run.store).totals
    ] == [(name, *counts.values()) for name, counts in sorted(counted["members"].items())]
    shown = read_commits(run.store, 5)
    assert [commit.version for commit in shown] == list(range(commits + 1))[-5:]
    for commit in shown:
        record = run.records[commit.version]
        for name in ("epoch", "time", "rule", "rate", "tokens"):
            assert getattr(commit, name) == getattr(record, name)
        for verdict, decision in zip(commit.verdicts, record.decisions, strict=True):
            identity = decision.identity
            assert (verdict.member, verdict.sequence) == (identity.incarnation.member, identity.sequence)
            for name in ("fate", "reason", "weight"):
                assert getattr(verdict, name) == getattr(decision, name)


def test_last_commits_are_shown_from_their_own_records(tmp_path, names_read):
    run = Run(Store(tmp_path), random.Random(0), arrays=False).grow(8)
    names_read.clear()
    assert [commit.version for commit in read_commits(run.store, 3)] == [6, 7, 8]
    assert sorted(names_read) == [commit_name(version) for version in (6, 7, 8)]
    run.store.delete(commit_name(2))
    with pytest.raises(RunFailed, match=r"commits/000002\.json is missing"):
        read_commits(run.store, 3)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(3, [[0.75, NAN, 0.2], [0.5, NAN, 0.9]]), (400, [[0.5, 1, NAN, NAN, 0.2, NAN], [0.5, NAN, NAN, NAN, 0.8, 1]])],
)
def test_overview_averages_many_commits(monkeypatch, columns, shown):
    """Two incarnations of a member in one commit are added up; dropped work has no weight."""
    monkeypatch.setattr(overview, "MAX_COLUMNS", columns)
    commits = (
        [("a", 0.2), ("a", 0.3), ("b", 0.5)], [("a", 1.0), ("b", None)], [], [], [("a", 0.2), ("b", 0.8)], [("b", 1.0)]
    )  # fmt: skip
    built = Overview(len(commits))
    for version, weights in enumerate(commits):
        verdicts = [
            Verdict(name, "1", 1, "dropped" if weight is None else "applied", "", 1, 0, 8, weight or 0.0, 1.0)
            for name, weight in weights
        ]
        built.add(Commit(verdicts, version, 1, 0.0, "average", 1.0, 0.0, 0))
    np.testing.assert_allclose(built.weights, shown)
    assert built.others == {"dropped": [(1, "b")]}
    assert [commit.version for commit in built.newest] == list(range(6))

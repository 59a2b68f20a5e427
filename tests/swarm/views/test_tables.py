"""Commits as they are shown, against a naive recount of the records."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import Run
from tests.swarm.storage.test_bookmark import memory
from tests.swarm.storage.test_ledger import counted_naively
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.overview import overview
from tpuswarm.swarm.views.tables import read_commits


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 10))
def test_commits_and_totals_agree_with_a_naive_recount(source, commits):
    made = Run(memory(), source, arrays=False).grow(commits)
    books = counted_naively(made.records)
    assert [
        (each.member, each.contributions, each.applied, each.returned, each.dropped, each.void)
        for each in overview(made.store).totals
    ] == [(name, *each.values()) for name, each in sorted(books["members"].items())]
    shown = read_commits(made.store, 5)
    assert [each.version for each in shown] == list(range(commits + 1))[-5:]
    for commit in shown:
        record = made.records[commit.version]
        assert (commit.epoch, commit.time, commit.rule, commit.rate, commit.tokens) == (
            record.epoch,
            record.time,
            record.rule,
            record.rate,
            record.tokens,
        )
        assert [(each.member, each.sequence, each.fate, each.reason, each.weight) for each in commit.verdicts] == [
            (each.identity.incarnation.member, each.identity.sequence, each.fate, each.reason, each.weight)
            for each in record.decisions
        ]


def test_of_the_last_commits_only_their_records_are_read(tmp_path, monkeypatch):
    run = Run(Store(tmp_path), random.Random(0), arrays=False).grow(8)
    read, inner = Counter(), Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: read.update([name]) or inner(self, name))
    assert [each.version for each in read_commits(run.store, 3)] == [6, 7, 8]
    assert read == Counter(commit_name(version) for version in (6, 7, 8))
    run.store.delete(commit_name(2))
    with pytest.raises(RunFailed, match=r"commits/000002\.json is missing"):
        read_commits(run.store, 3)

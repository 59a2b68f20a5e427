"""Bookmarks: the view from one and the records after it equals that of all records, and damaged ones are ignored."""

import random
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import Run, edit_file, memory_store, object_names, problems_of
from tests.swarm.world import World
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.values import Incarnation
from tpuswarm.swarm.storage.bookmark import (
    BOOKMARK_INTERVAL,
    INCARNATIONS_PER_DOUBLING,
    KEPT_COUNT,
    bookmark_name,
    outdated_bookmarks,
)
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name
from tpuswarm.swarm.storage.objects import payload_name
from tpuswarm.swarm.storage.retention import MIN_AGE_S, Holdings, deletable
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.storage.folders import copy_folder

DAY = 24 * 3600.0


def grown(store: Store, seed: int, commits: int, *marked: int) -> Run:
    run = Run(store, random.Random(seed), arrays=False)
    for version in (*marked, commits):
        run.grow(version - run.view.version)
        if version in marked:
            run.ledger.bookmark(run.view)
    return run


def whole(records) -> LedgerView:
    return LedgerView.from_records(records[0], records[1:])


def test_records_before_a_bookmark_are_not_read(tmp_path, names_read):
    run = grown(Store(tmp_path), 1, 14, 5, 10)
    undecided = run.push(run.members[0])
    names_read.clear()
    assert run.ledger.view() == run.view
    assert {name for name in names_read if name.startswith("commits/")} == {commit_name(n) for n in range(10, 16)}
    names_read.clear()
    assert run.ledger.headers(run.view) == [undecided]
    assert names_read == [header_name(undecided.identity)]


EDITS = {
    "another form": lambda it: it.update(form=1),
    "another record": lambda it: it.update(digest="0" * 64),
    "no rows": lambda it: it["sums"].update(counted={"ranges": []}),
    "no verdicts": lambda it: it.update(verdicts=[]),
    "wrong ranges": lambda it: it["verdicts"][0].__setitem__(5, [[3, 1]]),
    "no landmarks": lambda it: it["sums"].update(landmarks=[]),
    "extra idle version": lambda it: it["sums"].update(idle=[0, *it["sums"]["idle"]]),
}


@pytest.mark.parametrize("damage", [*EDITS, "unreadable", "torn", "of another version", "of another run"])
def test_damaged_bookmark_is_ignored_for_the_one_before(tmp_path, damage, names_read):
    run, name = grown(Store(tmp_path), 2, 10, 4, 8), bookmark_name(8)
    if damage in EDITS:
        edit_file(run.store, name, EDITS[damage])
    elif damage == "unreadable":
        run.store.path(name).unlink()
        run.store.path(name).symlink_to(name)
    else:
        other = grown(memory_store(), 5, 8, 8).store
        contents = {"of another version": run.store.read(bookmark_name(4)), "of another run": other.read(name)}
        run.store.put(name, contents.get(damage, b"torn"))
    names_read.clear()
    assert run.ledger.view() == run.view
    assert commit_name(5) in names_read and commit_name(3) not in names_read
    run.store.put(bookmark_name(4), b"torn")
    assert run.ledger.view() == run.view and commit_name(3) in names_read


def test_bookmark_is_void_once_its_record_changed(tmp_path, names_read):
    """An older copy of the records was restored, and the run continued from it."""
    run = grown(Store(tmp_path), 6, 8, 8)
    for version in range(5, 9):
        run.store.delete(commit_name(version))
    ledger = Ledger(Store(tmp_path))
    records = run.records[:5]
    assert ledger.view() == whole(records)
    for _ in range(5):
        newest = records[-1]
        after = replace(newest, version=newest.version + 1, decisions=(), updates=(), time=-1.0)
        records.append(replace(after, parent=ledger.digest(newest)))
        ledger.append(records[-1])
    names_read.clear()
    assert ledger.view() == whole(records) and commit_name(0) in names_read
    assert any(bookmark_name(8) in problem for problem in problems_of(ledger.store))


@given(st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_new_bookmark_outlives_all_but_the_last_before_it(there, version):
    left = {*there, version} - {*outdated_bookmarks(sorted(there), version)}
    below = sorted(other for other in there if other < version)
    assert left == {version, *below[1 - KEPT_COUNT :], *(other for other in there if other > version)}


def test_old_bookmarks_go_and_records_stay(store):
    run = grown(store, 13, 10, 3, 6, 9)
    assert run.ledger.bookmarks() == [6, 9] and run.ledger.versions() == list(range(11))
    assert Ledger(store).view() == run.view and Ledger(store).headers(run.view) == []
    assert verify(store, lambda _: None).newest == 10


@pytest.fixture
def two_machines(loopback, tmp_path, monkeypatch):
    """A run in a bucket, as two machines with their own copies see it."""
    url, stores = f"gs://bucket/runs/{uuid.uuid4()}", []
    for machine in ("one", "two"):
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / machine))
        stores.append(Store(copy_folder(url)))
    return stores


def test_machine_with_an_old_or_damaged_copy_of_a_bucket_sees_the_run(two_machines):
    one, two = two_machines
    run = grown(one, 14, 7, 3, 6)
    assert Ledger(two).view() == run.view and two.local_path(bookmark_name(6)).exists()
    run.grow(2).ledger.bookmark(run.view)
    run.grow(2)
    assert Ledger(two).view() == run.view and Ledger(two).bookmarks() == [6, 9]
    two.local_path(bookmark_name(9)).write_bytes(b"torn")
    assert Ledger(two).view() == run.view and verify(one, lambda _: None).newest == 11


def test_copy_of_a_record_that_left_the_bucket_is_ignored(two_machines):
    """An older state of the bucket was restored, except its bookmarks."""
    one, two = two_machines
    run = grown(one, 15, 8, 8)
    assert Ledger(two).view() == run.view
    for version in range(5, 9):
        one.delete(commit_name(version))
    assert Ledger(two).view().version == 4


def test_verify_finds_a_bookmark_that_contradicts_the_records(tmp_path):
    """Even with every digest right; the rest of the report stays the same."""
    run = grown(Store(tmp_path), 10, 12, 6, 12)
    before = verify(run.store, lambda _: None)
    for version in (6, 12):
        edit = lambda it: it["sums"].update(dropped=10**6, counted={"ranges": [[0, 10**6]]})  # noqa: E731
        edit_file(run.store, bookmark_name(version), edit)
    found = verify(run.store, lambda _: None)
    assert found.problems == [
        *(f"{bookmark_name(n)} contradicts the records; remove it: nothing is lost with it" for n in (6, 12)),
        *before.problems,
    ]
    assert replace(found, problems=[]) == replace(before, problems=[])


@settings(max_examples=25)
@given(st.integers(0, 10**9), st.integers(1, 130), st.sampled_from([0, 4, 30]), st.integers(1, 60))
def test_restart_changes_nothing_that_may_be_deleted(seed, commits, limit, back):
    source = random.Random(seed)
    run = Run(memory_store(), source, arrays=False)
    for _ in range(commits):
        run.push(source.choice(run.members), finite=source.random() > 0.2)
        run.commit()
    run.ledger.bookmark(whole(run.records[: source.randint(1, commits) + 1]))
    before, after = Holdings(limit), Holdings(limit)
    before.add(run.view, run.records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpuswarm.swarm.storage.retention.RESCAN_COUNT", back)
        view = run.ledger.view()
        assert view == run.view
        after.follow(run.ledger, view)
    accepted = {header_name(header.identity) for header in run.headers}.__contains__
    names = [*object_names(*run.records), *(payload_name(header.identity, 0) for header in run.headers)]
    gone = deletable(before, dict.fromkeys(names, 2 * DAY), accepted)
    assert deletable(after, dict.fromkeys(names, 2 * DAY), accepted) == gone
    early = deletable(after, dict.fromkeys(names, MIN_AGE_S + 1), accepted)
    assert set(early) <= set(gone), "an object that only older records name waits for a day"


def test_run_goes_on_where_no_bookmark_can_be_written(capsys):
    world = World(seed=3, members=2, horizon=24)

    def refused(view):
        raise RunFailed(f"views/{view.version}.json could not be written")

    world.ledger.bookmark = refused
    assert len(world.run().counted) >= world.horizon
    assert "no bookmark at commit 2: views/2.json could not be written" in capsys.readouterr().err


def test_larger_bookmarks_are_written_less_often():
    run, most = Run(memory_store(), random.Random(19), arrays=False), INCARNATIONS_PER_DOUBLING
    for lives, factor in [(0, 1), (most - 1, 1), (most, 2), (3 * most, 4)]:
        reported = {Incarnation("m0", f"{number:032x}"): 1 for number in range(lives)}
        versions = range(9 * BOOKMARK_INTERVAL)
        views = [replace(run.view, newest=replace(run.view.newest, version=at), processed=reported) for at in versions]
        due = [view.version for view in views if run.ledger.bookmark_due(view)]
        every = factor * BOOKMARK_INTERVAL
        assert due == [*range(every, 9 * BOOKMARK_INTERVAL, every)], lives

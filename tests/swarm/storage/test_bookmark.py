"""Bookmarks change what is read and nothing else: the view from one and the records after it is that of all records."""

import json
import os
import random
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import Run
from tests.swarm.storage.test_ledger import sealed
from tests.swarm.world import World
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.core.view import Broken, View
from tpuswarm.swarm.engines.inproc import Faults
from tpuswarm.swarm.storage.bookmark import EVERY, KEPT, LIVES, bookmark_name, outlived
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name
from tpuswarm.swarm.storage.objects import payload_name
from tpuswarm.swarm.storage.retention import SETTLING, Holdings, clean, deletable
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.bucket.mirror import folder_of

DAY = 24 * 3600.0


def memory() -> Store:
    return Store(f"memory://{uuid.uuid4()}")


def grown(store: Store, seed: int, commits: int, *marked: int) -> Run:
    """With bookmarks at some versions."""
    run = Run(store, random.Random(seed), arrays=False)
    for version in (*marked, commits):
        run.grow(version - run.view.version)
        if version in marked:
            run.ledger.bookmark(run.view)
    return run


def believed(ledger: Ledger) -> View | None:
    return ledger._bookmarked(ledger.versions())


def whole(records) -> View:
    return View.of(records[0], records[1:])


def names_read(monkeypatch) -> list[str]:
    """The files that are read from now on."""
    read, inner = [], Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: read.append(name) or inner(self, name))
    return read


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**9),
    members=st.integers(1, 4),
    kills=st.integers(0, 8),
    payloads=st.integers(0, 3),
    race_at=st.none() | st.floats(1, 30),
    limit=st.integers(0, 4),
    poison=st.sets(st.integers(0, 23), max_size=2),
    part=st.floats(0, 1),
)
def test_from_a_bookmark_of_any_history_one_comes_to_the_same_view(
    seed, members, kills, payloads, race_at, limit, poison, part
):
    world = World(
        seed=seed, members=members, faults=Faults(lost=0.05, twice=0.1), random_kills=kills, lost_payloads=payloads,
        race_at=race_at, staleness=Staleness(limit), poison=poison,
    )  # fmt: skip
    world.run()
    ledger = Ledger(memory())
    records = []
    for record in world.ledger.records:  # with the digests of this ledger
        records.append(replace(record, parent=ledger.digest(records[-1]) if records else ""))
        assert ledger.append(records[-1]) == "created"
    for header in world.ledger.stored.values():
        ledger.create_header(header)
    middle = round(part * (len(records) - 1))
    before = whole(records[: middle + 1])
    ledger.bookmark(before)
    assert believed(ledger) == before
    view = ledger.view()
    assert view == whole(records)
    decided = {each.identity for record in records for each in record.decisions}
    assert {header.identity for header in ledger.headers(view)} == world.ledger.stored.keys() - decided
    for version in range(len(records)):
        assert view.changes(version) == records[version].changes
        assert view.staleness(version) == records[-1].changes - records[version].changes


def test_what_a_bookmark_stands_for_is_not_read_again(tmp_path, monkeypatch):
    run = grown(Store(tmp_path), 1, 14, 5, 10)
    undecided = run.push(run.members[0])
    read = names_read(monkeypatch)
    assert run.ledger.view() == run.view
    assert {name for name in read if name.startswith("commits/")} == {commit_name(n) for n in range(10, 16)}
    read.clear()
    assert run.ledger.headers(run.view) == [undecided]
    assert read == [header_name(undecided.identity)]


def changed(run: Run, version: int, change) -> None:
    """Another content for a bookmark, with the right digest."""
    path = run.store.path(bookmark_name(version))
    value = json.loads(path.read_bytes())["record"]
    change(value)
    path.write_bytes(sealed(value))


HARMS = {
    "half": lambda run, path: path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2]),
    "empty": lambda run, path: path.write_bytes(b""),
    "foreign": lambda run, path: path.write_bytes(b'{"record":{},"sha256":"x"}\n'),
    "of another form": lambda run, path: changed(run, 8, lambda it: it.update(form=1)),
    "with a field more": lambda run, path: changed(run, 8, lambda it: it.update(extra=1)),
    "without a field": lambda run, path: changed(run, 8, lambda it: it["sums"].pop("dropped")),
    "of another record": lambda run, path: changed(run, 8, lambda it: it.update(digest="0" * 64)),
    "without rows": lambda run, path: changed(run, 8, lambda it: it["sums"].update(counted={"ranges": []})),
    "without verdicts": lambda run, path: changed(run, 8, lambda it: it.update(verdicts=[])),
    "with ranges that are none": lambda run, path: changed(
        run, 8, lambda it: it["verdicts"][0].__setitem__(5, [[3, 1]])
    ),
    "without landmarks": lambda run, path: changed(run, 8, lambda it: it["sums"].update(landmarks=[])),
    "with an idle version more": lambda run, path: changed(
        run, 8, lambda it: it["sums"].update(idle=[0, *it["sums"]["idle"]])
    ),
    "that cannot be read": lambda run, path: (path.unlink(), path.symlink_to(path)),
    "under another name": lambda run, path: path.write_bytes(run.store.read(bookmark_name(4))),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_bookmark_that_is_not_right_is_not_believed(tmp_path, harm, monkeypatch):
    run = grown(Store(tmp_path), 2, 10, 4, 8)
    HARMS[harm](run, tmp_path / bookmark_name(8))
    read = names_read(monkeypatch)
    assert run.ledger.view() == run.view
    assert commit_name(5) in read and commit_name(3) not in read, "the one before it is"
    HARMS["half"](run, tmp_path / bookmark_name(4))
    assert run.ledger.view() == run.view and commit_name(3) in read


def test_no_flipped_bit_is_believed(tmp_path):
    run = grown(Store(tmp_path), 3, 6, 6)
    path = tmp_path / bookmark_name(6)
    right = path.read_bytes()
    for bit in random.Random(0).sample(range(len(right) * 8), 300):
        torn = bytearray(right)
        torn[bit // 8] ^= 1 << bit % 8
        path.write_bytes(torn)
        assert believed(run.ledger) is None
    assert run.ledger.view() == run.view


def test_a_bookmark_of_another_run_is_not_believed(tmp_path):
    """Not even of one with the same members and rows."""
    run, other = (grown(Store(tmp_path / name), seed, 8, 8) for name, seed in (("mine", 4), ("other", 5)))
    run.store.put(bookmark_name(8), other.store.read(bookmark_name(8)))
    assert believed(run.ledger) is None and run.ledger.view() == run.view


def test_a_bookmark_is_void_once_its_record_is_another(tmp_path):
    """As after a copy of the first records was restored and the run went on from there."""
    run = grown(Store(tmp_path), 6, 8, 8)
    for version in range(5, 9):
        run.store.delete(commit_name(version))
    again = Ledger(Store(tmp_path))
    assert again.view() == whole(run.records[:5]), "its record is gone"
    records = run.records[:5]
    for _ in range(5):
        newest = records[-1]
        records.append(
            replace(
                newest, version=newest.version + 1, decisions=(), updates=(), parent=again.digest(newest), time=-1.0
            )
        )
        again.append(records[-1])
    assert believed(again) is None and again.view() == whole(records)
    assert any(bookmark_name(8) in problem for problem in verify(again.store, lambda _: None).problems)


def test_the_same_view_gives_the_same_bookmark_however_it_came_about(tmp_path):
    """So it does not matter which of two coordinators wrote it last."""
    run = grown(Store(tmp_path), 7, 9, 4)
    run.ledger.bookmark(Ledger(run.store).view())
    by_one = run.store.read(bookmark_name(9))
    run.ledger.bookmark(whole(run.records))
    assert run.store.read(bookmark_name(9)) == by_one


@given(st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_a_new_one_and_the_one_before_it_stay_and_so_do_later_ones(there, version):
    left = {*there, version} - {*outlived(sorted(there), version)}
    assert {each for each in there if each > version} == {each for each in left if each > version}
    below = [each for each in there if each < version]
    assert {each for each in left if each <= version} == {version, *sorted(below)[1 - KEPT :]}


def test_old_bookmarks_go_and_records_stay(tmp_path):
    run = grown(Store(tmp_path), 8, 12, 3, 6, 9, 12)
    assert run.ledger.bookmarks() == [9, 12]
    assert run.ledger.versions() == list(range(13)) and verify(run.store, lambda _: None).newest == 12


def test_in_every_kind_of_place(store):
    run = grown(store, 13, 10, 3, 6, 9)
    assert Ledger(store).bookmarks() == [6, 9] and Ledger(store).view() == run.view
    assert Ledger(store).headers(run.view) == []


def test_on_another_machine_whose_copy_of_a_bucket_is_old(loopback, tmp_path, monkeypatch):
    """Bookmarks that went there since are not looked at here; a copy that is damaged is not believed."""
    url = f"gs://bucket/runs/{uuid.uuid4()}"

    def on(machine: str) -> Store:
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / machine))
        return Store(folder_of(url))

    run, other = grown(on("one"), 14, 7, 3, 6), on("two")
    assert Ledger(other).view() == run.view and other.here(bookmark_name(6)).exists()
    run.grow(2)
    run.ledger.bookmark(run.view)
    run.grow(2)
    assert Ledger(other).view() == run.view and Ledger(other).bookmarks() == [6, 9]
    other.here(bookmark_name(9)).write_bytes(b"torn")
    assert Ledger(other).view() == run.view and verify(run.store, lambda _: None).newest == 11


def test_the_copy_of_a_record_that_the_bucket_has_no_longer_is_not_believed(loopback, tmp_path, monkeypatch):
    """An older state of the bucket was restored, but for its bookmarks; a machine has kept the bookmark's record."""
    url = f"gs://bucket/runs/{uuid.uuid4()}"
    stores = []
    for machine in ("one", "two"):
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / machine))
        stores.append(Store(folder_of(url)))
    run = grown(stores[0], 15, 8, 8)
    assert Ledger(stores[1]).view() == run.view
    for version in range(5, 9):
        stores[0].delete(commit_name(version))
    assert Ledger(stores[1]).view().version == 4


def test_a_listing_that_is_behind_does_no_harm(tmp_path, monkeypatch):
    """It hides what was written a moment ago, and shows what was deleted."""
    run = grown(Store(tmp_path), 9, 12, 4, 8)
    inner = Store.names

    def behind(self, prefix):
        found = [name for name in inner(self, prefix) if name < f"{prefix}000010"]
        return sorted([*found, bookmark_name(9)]) if prefix == "views/" else found

    monkeypatch.setattr(Store, "names", behind)
    assert run.ledger.view() == run.view


def test_verify_names_a_bookmark_that_cannot_be_read(tmp_path):
    run = grown(Store(tmp_path), 16, 8, 8)
    path = tmp_path / bookmark_name(8)
    path.unlink(), path.symlink_to(path)
    assert any(bookmark_name(8) in problem for problem in verify(run.store, lambda _: None).problems)


def test_verify_names_a_push_that_was_passed_over(tmp_path):
    run = grown(Store(tmp_path), 17, 6)
    header = run.headers[0]
    passed = replace(header, identity=replace(header.identity, sequence=0))
    run.ledger.create_header(passed)
    said = f"{header_name(passed.identity)} has no verdict, but a later push of its member has one"
    assert said in verify(run.store, lambda _: None).problems


def test_verify_believes_no_bookmark(tmp_path):
    """One that says what the records do not, with every digest right, is found; and the rest is what it was."""
    run = grown(Store(tmp_path), 10, 12, 6, 12)
    before = verify(run.store, lambda _: None)
    for version in (6, 12):
        changed(run, version, lambda it: it["sums"].update(dropped=10**6, counted={"ranges": [[0, 10**6]]}))
    found = verify(run.store, lambda _: None)
    assert found.problems == [
        *(f"{bookmark_name(n)} does not say what the records say; remove it: nothing is lost with it" for n in (6, 12)),
        *before.problems,
    ]
    assert replace(found, problems=[]) == replace(before, problems=[])


def test_a_push_is_decided_after_those_before_it(tmp_path):
    """So the newest verdict on an incarnation stands for all before it."""
    run = grown(memory(), 11, 3)
    push = run.push(run.members[0])
    newest = run.view.newest
    decided = next(each for record in run.records for each in record.decisions)
    for late in (decided.identity, replace(decided.identity, sequence=0)):
        decision = replace(decided, identity=late, fate="returned", weight=0.0)
        record = replace(newest, version=4, parent=run.ledger.digest(newest), decisions=(decision,), updates=())
        with pytest.raises(
            Broken, match=rf"record 4 decides push {late.sequence} of .*, of which push \d+ was already"
        ):
            run.view.after(record)
    assert not run.view.has_decided(push.identity) and run.view.has_decided(Identity(push.identity.incarnation, 1))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 130), st.sampled_from([0, 4, 30]), st.data())
def test_what_may_go_is_the_same_after_a_restart(source, commits, limit, data):
    """Whatever is read anew of the records: it is enough to know what stays."""
    run = Run(memory(), source, arrays=False)
    for _ in range(commits):
        run.push(source.choice(run.members), finite=source.random() > 0.2)
        run.commit()
    run.ledger.bookmark(whole(run.records[: data.draw(st.integers(1, commits)) + 1]))
    before, after = Holdings(limit), Holdings(limit)
    before.add(run.view, run.records)
    view = run.ledger.view()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpuswarm.swarm.storage.retention.BACK", data.draw(st.integers(1, 60)))
        after.follow(run.ledger, view)
    accepted = {header_name(header.identity) for header in run.headers}.__contains__
    names = [f"objects/{digest}.safetensors" for record in run.records for digest in record.objects]
    names += [payload_name(header.identity, 0) for header in run.headers]
    gone = deletable(before, dict.fromkeys(names, 2 * DAY), accepted)
    assert deletable(after, dict.fromkeys(names, 2 * DAY), accepted) == gone
    early = deletable(after, dict.fromkeys(names, SETTLING + 1), accepted)
    assert set(early) <= set(gone), "what an older record names waits for a day"


def test_what_the_last_life_could_not_remove_yet_goes_as_soon_as_it_would_have(tmp_path):
    run = Run(Store(tmp_path), random.Random(12)).grow(40)
    run.ledger.bookmark(run.view)
    at = SETTLING + 60
    for file in tmp_path.rglob("objects/*"):
        os.utime(file, (file.stat().st_atime - at, file.stat().st_mtime - at))
    held, view = Holdings(4), run.ledger.view()
    held.follow(run.ledger, view)
    named = {f"objects/{digest}.safetensors" for record in run.records for digest in record.objects}
    assert named & set(clean(run.store, held)) and not held.named & set(clean(run.store, held))
    stored = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("objects/*")}
    assert held.named == stored, "what went is not remembered"


def test_how_stale_a_push_from_the_future_is_nobody_says():
    """Its version is lost, as after an older state of the storage was restored."""
    view = grown(memory(), 18, 3).view
    with pytest.raises(Broken, match="there is no version 4: the newest is 3"):
        view.staleness(4)


def test_a_storage_that_takes_no_bookmark_ends_no_run(capsys):
    world = World(seed=3, members=2, horizon=24)

    def refused(view):
        raise RunFailed(f"views/{view.version}.json could not be written")

    world.ledger.bookmark = refused
    assert len(world.run().counted) >= world.horizon
    assert "no bookmark at commit 2: views/2.json could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("lives, every", [(0, EVERY), (LIVES - 1, EVERY), (LIVES, 2 * EVERY), (3 * LIVES, 4 * EVERY)])
def test_a_coordinator_leaves_one_every_so_often(lives, every):
    """The more rarely the longer they are: what a commit pays for them is bounded."""
    run = Run(memory(), random.Random(19), arrays=False)
    reported = {Incarnation("m0", f"{number:032x}"): 1 for number in range(lives)}

    def due(version):
        return run.ledger.bookmark_due(
            replace(run.view, newest=replace(run.view.newest, version=version), processed=reported)
        )

    assert [version for version in range(9 * EVERY) if due(version)] == [*range(every, 9 * EVERY, every)]
    assert lives / every <= LIVES / EVERY

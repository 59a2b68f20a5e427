"""What a computer keeps of fleets: documents, histories, keepers in the background; damaged, full, private."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.fleet.cloud_model import Cloud
from tests.fleet.keepers import A, begin, keeper, ready, run, store
from tpuswarm.cloud.errors import Changed
from tpuswarm.errors import InputError
from tpuswarm.fleet.keeping import fleets
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.document import (
    Damaged,
    KeeperLease,
    LocalBucket,
    path_of,
    state_folder,
)
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import Keeper
from tpuswarm.train.process.computer import this_computer


def test_damaged_state_is_a_sentence(tmp_path):
    cloud = Cloud()
    begin(cloud)
    bucket = cloud.bucket("state")
    bucket.write(path_of("gpt2"), b"{broken", 1)
    with pytest.raises(Damaged, match=r"gs://state/tpuswarm/fleets/gpt2\.json is damaged \(7 bytes\): `tpuswarm up`"):
        store(cloud).load()


def test_what_this_computer_keeps_of_fleets_is_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    LocalBucket(state_folder() / "documents").write("a.json", b"lines of jobs", 0)
    assert (tmp_path / "state/tpuswarm").stat().st_mode & 0o777 == 0o700
    (tmp_path / "state/tpuswarm").chmod(0o755)
    assert state_folder().stat().st_mode & 0o777 == 0o700


def test_one_keeper_in_the_background_is_enough(tmp_path, monkeypatch):
    """Where one leads already none is started; a command that leads for a moment is none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cloud = Cloud()
    begin(cloud)
    fleet = fleets.Fleet("gpt2", "google", "model", None)
    started = []
    with (
        subprocess.Popen(
            [sys.executable, "-c", "input()", "keep"], stdin=subprocess.PIPE, start_new_session=True
        ) as keeps,
        subprocess.Popen([sys.executable, "-c", "input()", "keep"], stdin=subprocess.PIPE) as in_terminal,
        subprocess.Popen([sys.executable, "-c", "input()", "up"], stdin=subprocess.PIPE) as ends,
    ):
        monkeypatch.setattr("subprocess.Popen", lambda words, **about: started.append(words))
        for pid, expected in ((ends.pid, 1), (in_terminal.pid, 2), (keeps.pid, 2)):
            lease = KeeperLease("x", "here", pid, 1, cloud.now, this_computer())
            store(cloud).change(lambda found, lease=lease: replace(found, lease=lease))
            fleets.detach(fleet, store(cloud), None)
            assert len(started) == expected
        for each in (keeps, in_terminal, ends):
            each.kill()
    fleets.detach(fleet, store(cloud), None)
    assert len(started) == 3


def test_two_fleets_of_one_name_in_two_projects_are_told_apart(tmp_path, monkeypatch):
    """As when it was rehearsed first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rehearsed, paid = fleets.Fleet("a", "rehearsal", "rehearsal", None), fleets.Fleet("a", "google", "mine", None)
    for each in (rehearsed, paid):
        each.remember()
    with pytest.raises(InputError, match=r"there are 2 fleets: name one of mine/a, rehearsal/a"):
        fleets.find("a")
    assert (fleets.find("mine/a")[0], fleets.find("rehearsal/a")[0]) == (paid, rehearsed)
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda words, **about: started.append(words))
    fleets.detach(paid, store(Cloud()), None)
    assert started[0][-2:] == ["keep", "mine/a"]


def test_files_of_one_computer_are_a_bucket_too(tmp_path):
    bucket = LocalBucket(tmp_path)
    assert bucket.read("a/b.json") is None
    assert bucket.write("a/b.json", b"one\ntwo", 0) == 1
    with pytest.raises(Changed):
        bucket.write("a/b.json", b"other", 0)
    assert bucket.write("a/b.json", b"three", 1) == 2
    assert bucket.read("a/b.json") == (b"three", 2)
    bucket.delete("a/b.json")
    assert bucket.read("a/b.json") is None


def test_a_history_that_cannot_be_kept_is_said_and_nothing_else(tmp_path):
    cloud = Cloud()
    begin(cloud)
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history.db")
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    run(Keeper(cloud, store(cloud), history, clock, threads=1), cloud, 600)
    assert len(ready(cloud)) == 4 and history.trouble and "File exists" in history.trouble
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database at all" * 100)
    assert History(broken).memory() is None and History(broken).events() == []
    run(keeper(cloud, tmp_path), cloud, 30)


def test_events_of_a_machine_are_remembered(tmp_path):
    cloud = Cloud()
    begin(cloud)
    run(keeper(cloud, tmp_path), cloud, 600)
    cloud.preempt((A, "v2-usc1f-0"))
    run(keeper(cloud, tmp_path / "x"), cloud, 30)
    run(keeping := keeper(cloud, tmp_path), cloud, 600)
    del keeping
    kinds = [each.kind for each in History(tmp_path / "history.db").events("v2-usc1f-0")]
    assert kinds[:2] == ["asked", "ready"] and "ready" in kinds[2:]

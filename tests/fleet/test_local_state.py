"""What a computer stores about fleets: private, bounded, and separate for each fleet and person."""

import errno
import io
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.fleet.fake_cloud import FakeCloud
from tests.fleet.loop import ManagedFleet
from tpuswarm.cli.console import make_console
from tpuswarm.cli.fleet.progress import FleetProgress
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import FleetState
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.keeper import Keeper, rotate_log
from tpuswarm.fleet.spec import desired_from_file
from tpuswarm.fleet.store import document, fleets, history
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.train.process.computer import computer_id, state_folder

start_process = subprocess.Popen


@pytest.fixture
def background_keepers(tmp_path, monkeypatch) -> list[list[str]]:
    """The command lines of background keepers, none of which is really started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    started: list[list[str]] = []
    monkeypatch.setattr(fleets.subprocess, "Popen", lambda words, **_: started.append(words) or Mock(pid=0))
    return started


def test_background_keeper_is_started_unless_one_leads(tmp_path, background_keepers):
    managed = ManagedFleet(tmp_path)
    fleet = Fleet("gpt2", "google", "model", None)

    def detach(pid: int) -> bool:
        """Return whether a keeper was started while a process of this id leads."""
        before = len(background_keepers)
        managed.change_document(lease=document.KeeperLease("x", "here", pid, 1, managed.cloud.now, computer_id()))
        fleets.start_background_keeper(fleet, managed.store, None)
        return len(background_keepers) > before

    for command, in_background, expected in (("up", False, True), ("keep", False, True), ("keep", True, False)):
        words = ["sh", "-c", "echo; read line", command]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with start_process(words, start_new_session=in_background, **pipes) as process:
            process.stdout.readline()  # its command line is empty for a moment after Popen returns
            assert detach(process.pid) == expected
            process.stdin.close()
    assert detach(process.pid), "the keeper has ended"


@pytest.mark.parametrize("is_reused", [False, True])
def test_background_keeper_of_a_deleted_fleet_is_ended(tmp_path, monkeypatch, is_reused):
    """A keeper whose local cloud has stopped would wait for it for ever; another keeper may have its number now."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fleet = Fleet("a", "rehearsal", "rehearsal", None)
    fleets.end_background_keeper(fleet)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_process(["sh", "-c", "echo; read line", "keep"], **pipes) as process:
        process.stdout.readline()
        with monkeypatch.context() as patch:
            patch.setattr(fleets.subprocess, "Popen", lambda words, **_: process)
            if is_reused:
                patch.setattr(fleets, "process_start", lambda pid: "7", raising=False)
            fleets.start_background_keeper(fleet, fleet.store(FakeCloud()), None)
        fleets.end_background_keeper(fleet)
        if is_reused:
            process.stdin.close()
        assert process.wait(60) == (1 if is_reused else -signal.SIGTERM)


def test_fleets_of_one_name_in_two_projects_are_distinguished(background_keepers):
    rehearsed, paid = Fleet("a", "rehearsal", "rehearsal", None), Fleet("a", "google", "mine", None)
    for fleet in (rehearsed, paid):
        fleet.remember()
    with pytest.raises(InputError, match=r"there are 2 fleets: name one of mine/a, rehearsal/a"):
        fleets.find_fleet("a")
    assert (fleets.find_fleet("mine/a")[0], fleets.find_fleet("rehearsal/a")[0]) == (paid, rehearsed)
    fleets.start_background_keeper(paid, paid.store(FakeCloud()), None)
    assert background_keepers[0][-2:] == ["keep", "mine/a"]


def test_local_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = state_folder()
    assert folder == tmp_path / "tpuswarm" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert state_folder().stat().st_mode & 0o777 == 0o700


def test_old_finished_jobs_are_forgotten_but_not_their_run_numbers():
    def job(name: str, run: int, phase="done") -> Job:
        return Job(name, "small", "true", "preempted", (Assignment("small", run=run, phase=phase),))

    made = document.with_job(document.Document("a", "google", "p", Desired("a-1", ()), ()), job("long", 3, "running"))
    for number in range(document.MAX_ENDED_JOBS + 5):
        made = document.with_job(made, job(f"job-{number}", 40 - number if number < 5 else 1))
    names = [job.name for job in made.jobs]
    assert names[0] == "long" and "job-0" not in names and f"job-{document.MAX_ENDED_JOBS + 4}" in names
    assert len(names) == document.MAX_ENDED_JOBS + 2 and made.last_run == 40
    assert len(document.with_job(made, replace(made.jobs[1], line="false")).jobs) == len(names)


def test_oldest_events_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_EVENTS", 10)
    stored = history.History(tmp_path / "history.db")
    for number in range(25):
        stored.save(FleetState(), [Event(float(number), "small", "m", "asked", "why")], float(number))
    assert [event.at for event in stored.events()] == [float(number) for number in range(15, 25)]


def test_keeper_moves_a_long_log_aside_and_touches_no_other_file(tmp_path, monkeypatch):
    log, other = tmp_path / "keeper.log", tmp_path / "other.log"
    other.write_text("y" * 500)
    with log.open("a", buffering=1) as file:
        monkeypatch.setattr(sys, "stdout", file)
        for _ in range(6):
            print("x" * 40)
            rotate_log(log, 100)
            rotate_log(other, 100)
    assert log.stat().st_size <= 100 and other.stat().st_size == 500
    assert (tmp_path / "keeper.log.1").read_text() == ("x" * 40 + "\n") * 3


class Disk(io.StringIO):
    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_full_disk_loses_a_keepers_output_but_not_the_keeper(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    watching = FleetProgress(make_console())
    for _ in range(5):
        watching.print_note("x" * 40)
    disk.is_full = False
    watching.print_note("y")
    assert disk.getvalue() == "y\n"


class Person:
    """Somebody with a computer of their own, who creates a TPU without a swarm.toml."""

    def __init__(self, name: str, folder: Path, cloud: FakeCloud, monkeypatch):
        self.name, self.folder, self.cloud, self._monkeypatch = name, folder / name, cloud, monkeypatch

    def log_in(self) -> None:
        self._monkeypatch.setenv("XDG_STATE_HOME", str(self.folder / "state"))
        self._monkeypatch.setattr(fleets, "current_user", lambda: f"{self.name}@laptop")

    def up(self, adopt: str | None = None, bucket: str | None = None) -> tuple[document.DocumentStore, str]:
        """Do what `up --type v2-8` does; return the document's store and the note for the person."""
        self.log_in()
        file = desired_from_file.file_from_options(desired_from_file.TpuOptions("v2-8", ["us-central1-f"]))
        fleet = Fleet(file.name, "google", "shared", bucket)
        store = fleet.store(self.cloud)
        found, _, note = fleets.inspect_fleet(fleet, store, self.cloud, file, adopt)
        before = found.desired if found else None
        fleets.store_desired(fleet, store, file, fleets.merge_desired(file, fleet.mark, before, True, None), before)
        clock = Clock(wall=lambda: self.cloud.now, steady=lambda: self.cloud.now)
        keeper = Keeper(self.cloud, store, history.History(self.folder / "history.db"), clock, threads=1)
        for _ in range(40):
            keeper.tick()
            self.cloud.advance(10)
        return store, note


@pytest.fixture
def people(tmp_path, cloud, monkeypatch) -> list[Person]:
    return [Person(name, tmp_path, cloud, monkeypatch) for name in ("ann", "bob")]


def test_machines_of_another_person_are_taken_over_only_by_their_id(cloud, people):
    ann, bob = people
    ann.up()
    (machine,) = cloud.existing.values()
    with pytest.raises(InputError, match=f"document is elsewhere: choose another name.*--adopt {machine.fleet}"):
        bob.up()
    with pytest.raises(InputError, match="no machine carries the id v2-8-zzz"):
        bob.up(adopt="v2-8-zzz")
    assert list(cloud.existing.values()) == [machine] and not cloud.deleted
    store, _ = bob.up(adopt=machine.fleet)
    assert store.load().desired.fleet == machine.fleet and len(cloud.existing) == 1
    with pytest.raises(InputError, match="there is nothing to adopt"):
        bob.up(adopt="v2-8-zzz")


def test_fleet_in_a_shared_bucket_names_who_changed_it_last(people):
    ann, bob = people
    assert ann.up(bucket="shared")[1] == "" and ann.up(bucket="shared")[1] == ""
    assert re.search(r"was last changed by ann@laptop, \d+ s ago: it may be in use", bob.up(bucket="shared")[1])


def test_change_made_while_a_command_waits_for_confirmation_is_not_undone(people):
    """Another computer's key merges; any other change, such as the keeper's `down` at a limit, stops the command."""

    def with_key(wanted: Desired, key: str) -> Desired:
        return replace(wanted, pools=tuple(desired_from_file.add_ssh_key(pool, key) for pool in wanted.pools))

    store, _ = people[0].up()
    shown = store.load().desired
    store.change(lambda found: replace(found, desired=with_key(found.desired, "ssh-ed25519 BBBB")))
    fleets.change_desired(store, replace(with_key(shown, "ssh-ed25519 AAAA"), revision=2), shown)
    keys = store.load().desired.pools[0].spec.metadata["ssh-keys"]
    assert "AAAA" in keys and "BBBB" in keys
    with pytest.raises(InputError, match="was changed while this command asked: repeat it"):
        fleets.change_desired(store, replace(shown, revision=2), shown)
    shown = store.load().desired
    store.change(lambda found: replace(found, desired=replace(found.desired, down="dollars are spent")))
    with pytest.raises(InputError, match="was changed while this command asked: repeat it"):
        fleets.change_desired(store, replace(shown, revision=3), shown)
    assert store.load().desired.down == "dollars are spent"


def test_each_home_has_its_own_mark_in_fleet_ids(people):
    marks = []
    for person in (*people, people[0]):
        person.log_in()
        marks.append((document.state_folder_mark(), Fleet("v2-8", "google", "shared", None).mark))
    assert marks[0] == marks[2] != marks[1] and marks[0][1] != marks[1][1]

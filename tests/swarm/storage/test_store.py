"""Files that appear whole or not at all: in folders, in memory, in a bucket on loopback."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.storage.store import Missing, Store


def test_name_is_created_once_and_replaced_by_put(store):
    assert [store.create("objects/a", data) for data in (b"one", b"two", b"one")] == [True, False, False]
    assert store.read("objects/a") == b"one"
    store.put("objects/a", b"whole")
    assert store.read("objects/a") == b"whole"
    with store.temporary("objects/b") as part:
        part.write_bytes(b"from a file")
        store.put_file("objects/b", part)
    assert store.read("objects/b") == b"from a file"
    assert not part.exists()


def test_listing_and_deleting(store):
    assert store.names("") == store.names("commits/") == []
    for name in ("commits/000002.json", "commits/000010.json", "commits/deep/x", "headers/m-1", "headers/n-1"):
        store.put(name, b"")
    assert store.names("commits/") == ["commits/000002.json", "commits/000010.json", "commits/deep/x"]
    assert store.names("headers/m") == ["headers/m-1"]
    assert len(store.names("")) == 5
    assert all(-5 < age < 60 for age in store.ages("").values())
    assert store.exists("headers/m-1") and not store.exists("headers") and not store.exists("headers/z")
    store.delete("headers/m-1")
    store.delete("headers/m-1")
    assert store.names("headers/") == ["headers/n-1"]
    with pytest.raises(Missing, match=r"^headers/m-1 is missing from .*restore a copy"):
        store.read("headers/m-1")


def test_one_of_two_racing_threads_creates_a_name(store):
    rounds = 20
    barrier, interval = threading.Barrier(2, timeout=60), sys.getswitchinterval()

    def create(who):
        own = Store(store.root)
        for number in range(rounds):
            barrier.wait()
            yield own.create(f"commits/{number:06d}.json", bytes([who]))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(lambda who: [*create(who)], (0, 1))
    finally:
        sys.setswitchinterval(interval)
    assert [one + other for one, other in zip(first, second, strict=True)] == [1] * rounds
    for number in range(rounds):
        assert store.read(f"commits/{number:06d}.json") == bytes([second[number]])


def test_large_files_go_to_a_bucket_in_parts(loopback):
    store, data = Store("gs://bucket/large"), bytes(51 * 2**20)  # parts begin at 50 MB
    assert store.create("a", data)
    refused = loopback.refused
    assert not store.create("a", b"1" + data)
    assert loopback.refused == refused + 1 and store.read("a") == data


def test_lost_answer_of_a_bucket_looks_like_another_writer(loopback):
    store = Store("gs://bucket/lost")
    loopback.lose_answers = 1
    assert not store.create("commits/000001.json", b"ours")
    assert store.read("commits/000001.json") == b"ours"


@pytest.mark.parametrize("root", ["s3://bucket/run", "http://host/run"])
def test_other_places_are_refused(root):
    with pytest.raises(InputError, match="a run is a local folder or gs://BUCKET/FOLDER, not"):
        Store(root)


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/../b", ".hidden", "a/", "/a"])
def test_names_outside_the_store_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name for a stored file"):
        Store(tmp_path).put(name, b"")


def test_temporary_files_are_not_listed_and_are_removed_when_old(tmp_path):
    store = Store(tmp_path)
    left = tmp_path / "objects" / ".a.0123.part"
    left.parent.mkdir()
    left.write_bytes(b"torn")
    assert store.names("") == []
    store.sweep(3600)
    assert left.exists()
    os.utime(left, (1, 1))
    store.sweep(3600)
    assert not left.exists()


def test_place_that_cannot_be_written_is_reported(loopback, tmp_path, monkeypatch):
    with pytest.raises(RunFailed, match=r"gs://nowhere/run: there is no such bucket"):
        Store("gs://nowhere/run").create("a", b"")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(RunFailed, match=r"a in .*file could not be written: .*start the same command again"):
        Store(tmp_path / "file").create("a", b"")

    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunFailed, match=r"its file system has no hard links; use a folder on another one"):
        Store(tmp_path / "run").create("a", b"")
    assert list((tmp_path / "run").iterdir()) == []


CRASH = """
import itertools, json, os, sys
from pathlib import Path
from tpuswarm.swarm.storage.store import Store

STEPS = ("open", "fsync", "link", "unlink", "replace", "mkdir", "utime", "close")

def die_at_step(number):
    steps = itertools.count(1)
    def step():
        if next(steps) == number:
            os._exit(7)
    def wrap(real):
        def call(*args, **kwargs):
            step()
            try:
                return real(*args, **kwargs)
            finally:
                step()
        return call
    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))

def rounds(what):
    for number in range(1, 1000):
        store = Store(Path(sys.argv[1]) / what / str(number))
        write = store.create if what == "create" else store.put
        if what == "replace":
            store.put("commits/1", b"old" * 1000)
        child = os.fork()
        if child == 0:
            die_at_step(number)
            write("commits/1", b"new" * 1000)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = store.read("commits/1").decode() if store.exists("commits/1") else ""
        again = write("commits/1", b"new" * 1000)
        whole = len(found) in (0, 3000) and store.read("commits/1") == b"new" * 1000
        yield status, found[:3], whole, again, store.names("")
        if status == 0:
            break

print(json.dumps({what: list(rounds(what)) for what in ("create", "put", "replace")}))
"""


def test_process_killed_at_any_step_leaves_the_old_or_the_new_file(tmp_path):
    """Before and after every call that touches the disk."""
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for what, rounds in json.loads(done.stdout).items():
        before = "old" if what == "replace" else ""
        assert len(rounds) > 10 and rounds[-1][0] == 0
        for status, found, whole, again, names in rounds:
            assert status in (0, 7) and whole and found in ("new", before) and names == ["commits/1"]
            assert again == ((found == "") if what == "create" else None)
        assert {found for _, found, *_ in rounds} == {"new", before}


def test_content_is_on_disk_before_its_name_and_the_name_before_the_answer(tmp_path, monkeypatch):
    steps = []

    def fsync(handle):
        steps.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink().suffix}")
        real(handle)

    real, link, replace = os.fsync, os.link, os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda *paths: (steps.append("name"), link(*paths)))
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("name"), replace(*paths)))
    store = Store(tmp_path)
    store.create("a.json", b"1")
    assert not store.create("a.json", b"2")
    store.put("b.json", b"3")
    assert steps == ["sync .part", "name", "sync "] * 3
    steps.clear()
    store.create("new/folder/a.json", b"4")
    assert steps == ["sync ", "sync ", "sync .part", "name", "sync "]


FULL = """
import sys
from pathlib import Path
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store

store = Store(Path(sys.argv[1]) / "run")
objects = Objects(store)
print(store.create("a", b"1" * 1000))

def write_in_pieces(name, data):
    with objects.writing_array((2_000_000,)) as (out, finish):
        out[:] = 1
        finish()

for write in (store.create, store.put, write_in_pieces):
    try:
        write("b", b"2" * 8_000_000)
    except RunFailed as error:
        print(error)
print(store.names(""), sum(path.is_file() for path in Path(sys.argv[1]).rglob("*")))
print(store.create("b", b"3" * 1000))
"""


def test_full_disk_is_reported_and_leaves_nothing_behind(on_small_disk):
    """Also where a memory map is written, which must not end in a bus error."""
    first, *messages, left, after = on_small_disk(FULL)
    assert (first, after) == ("True", "True") and left == "['a'] 1"
    assert len(messages) == 3 and all("b in " in message for message in messages[:2])
    for message in messages:
        assert message.endswith("could not be written: the disk is full; make room and start the same command again")

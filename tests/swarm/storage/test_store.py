"""Files that appear whole or not at all: in folders, in memory, in a bucket on loopback."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.storage.store import Missing, Store


def test_a_name_is_created_once(store):
    assert store.create("commits/000001.json", b"one")
    assert not store.create("commits/000001.json", b"two")
    assert not store.create("commits/000001.json", b"one")
    assert store.read("commits/000001.json") == b"one"


def test_what_is_named_by_its_content_is_put_again_in_peace(store):
    store.put("objects/a", b"damaged")
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


def test_what_is_missing_is_named(store):
    with pytest.raises(Missing, match=r"^commits/000007\.json is missing from .*restore a copy"):
        store.read("commits/000007.json")


def test_only_folders_have_paths(store, tmp_path):
    path = store.path("objects/a")
    assert path == (tmp_path / "run/objects/a" if not store.root.startswith(("gs:", "memory:")) else None)


def test_threads_race_for_names_and_one_wins(store):
    rounds = 200 if store.root.startswith("memory") else 20
    won = [[], []]

    def run(who):
        mine = Store(store.root)
        for number in range(rounds):
            barrier.wait()
            won[who].append(mine.create(f"commits/{number:06d}.json", bytes([who])))

    barrier, interval = threading.Barrier(2), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    for number, (first, second) in enumerate(zip(*won, strict=True)):
        assert first != second
        assert store.read(f"commits/{number:06d}.json") == bytes([0 if first else 1])


def test_large_files_in_a_bucket(loopback):
    """Above 50 MB they go up in parts."""
    store, data = Store("gs://bucket/large"), bytes(51 * 2**20)
    assert store.create("a", data)
    refused = loopback.refused
    assert not store.create("a", b"1" + data)
    assert loopback.refused == refused + 1 and store.read("a") == data


def test_a_lost_answer_of_a_bucket_looks_like_another_writer(loopback):
    store = Store("gs://bucket/lost")
    loopback.lose_answers = 1
    assert not store.create("commits/000001.json", b"ours")
    assert store.read("commits/000001.json") == b"ours"


def test_a_bucket_that_is_not_there_is_named(loopback):
    with pytest.raises(RunFailed, match=r"a in gs://nowhere/run could not be written: there is no such bucket"):
        Store("gs://nowhere/run").create("a", b"")


@pytest.mark.parametrize("root", ["s3://bucket/run", "http://host/run"])
def test_other_places_are_refused(root):
    with pytest.raises(InputError, match=r"cannot hold a run: only local folders and gs://"):
        Store(root)


def test_file_urls_are_folders(tmp_path):
    assert Store(f"file://{tmp_path}/run").path("a") == tmp_path / "run" / "a"


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/../b", ".hidden", "a/", "/a"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name for a stored file"):
        Store(tmp_path).put(name, b"")


def test_temporary_files_are_no_names_and_are_swept_when_old(tmp_path):
    store = Store(tmp_path)
    left = tmp_path / "objects" / ".a.0123.part"
    left.parent.mkdir()
    left.write_bytes(b"torn")
    assert store.names("") == []
    store.sweep(60)
    assert left.exists()
    os.utime(left, (1, 1))
    store.sweep(60)
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunFailed, match=r"a in .*run could not be written: .*start the same command again"):
        Store(tmp_path / "run").create("a", b"")


def test_a_file_system_without_links_is_named(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunFailed, match=r"its file system has no hard links; use a folder on another one"):
        Store(tmp_path).create("a", b"")
    assert list(tmp_path.iterdir()) == []


CRASH = """
import json, os, sys
from pathlib import Path
from tpuswarm.swarm.storage.store import Store

what, root = sys.argv[1], Path(sys.argv[2])
STEPS = ("open", "fsync", "link", "unlink", "replace", "mkdir", "utime", "close")

def watch(die_at):
    calls = []
    def wrap(name, real):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) * 2 - 1 == die_at:
                os._exit(7)
            try:
                return real(*args, **kwargs)
            finally:
                if len(calls) * 2 == die_at:
                    os._exit(7)
        return call
    for name in STEPS:
        setattr(os, name, wrap(name, getattr(os, name)))

rounds = []
for die_at in range(1, 1000):
    store = Store(root / str(die_at))
    if what == "put again":
        store.put("commits/1", b"old" * 1000)
    child = os.fork()
    if child == 0:
        watch(die_at)
        (store.create if what == "create" else store.put)("commits/1", b"new" * 1000)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = store.read("commits/1").decode()[:3] if store.exists("commits/1") else "none"
    whole = not store.exists("commits/1") or len(store.read("commits/1")) == 3000
    again = store.create("commits/1", b"new" * 1000) if what == "create" else store.put("commits/1", b"new" * 1000)
    right = store.read("commits/1") == b"new" * 1000
    rounds.append([status, found, whole, again, right, store.names("")])
    if status == 0:
        break
print(json.dumps(rounds))
"""


@pytest.mark.parametrize("what", ["create", "put", "put again"])
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new(tmp_path, what):
    """Before and after every call that touches the disk."""
    done = subprocess.run([sys.executable, "-c", CRASH, what, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert len(rounds) > 10 and rounds[-1][0] == 0
    for status, found, whole, again, right, names in rounds:
        assert status in (0, 7) and whole and right and names == ["commits/1"]
        assert found in ("new", "old" if what == "put again" else "none")
        assert again == ((found == "none") if what == "create" else None)
    assert {found for _, found, *_ in rounds} == {"new", "old" if what == "put again" else "none"}


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
    assert steps == ["sync .part", "name", "sync "]
    steps.clear()
    assert not store.create("a.json", b"2")
    assert steps == ["sync .part", "name", "sync "]
    steps.clear()
    store.put("b.json", b"3")
    assert steps == ["sync .part", "name", "sync "]
    steps.clear()
    store.create("new/folder/a.json", b"4")
    assert steps == ["sync ", "sync ", "sync .part", "name", "sync "]


RACE = """
import json, multiprocessing, sys
from tpuswarm.swarm.storage.store import Store

def run(who, root, rounds, barrier, answers):
    store, won = Store(root), []
    for number in range(rounds):
        barrier.wait()
        won.append(store.create(f"commits/{number:06d}.json", bytes([who]) * 5000))
    answers.put((who, won))

context = multiprocessing.get_context("fork")
barrier, answers, rounds = context.Barrier(2), context.Queue(), int(sys.argv[2])
processes = [context.Process(target=run, args=(who, sys.argv[1], rounds, barrier, answers)) for who in (0, 1)]
for process in processes:
    process.start()
print(json.dumps(dict(answers.get(timeout=100) for _ in processes)))
"""


def test_processes_race_for_names_and_one_wins(tmp_path):
    rounds = 300
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path), str(rounds)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    won = json.loads(done.stdout)
    for number, (first, second) in enumerate(zip(won["0"], won["1"], strict=True)):
        assert first != second, f"round {number}"
        data = (tmp_path / f"commits/{number:06d}.json").read_bytes()
        assert data == bytes([0 if first else 1]) * 5000
    assert len(list((tmp_path / "commits").iterdir())) == rounds
    assert 0 < sum(won["0"]) < rounds


FULL = """
import sys
from pathlib import Path
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.store import Store
store = Store(Path(sys.argv[1]) / "run")
print(store.create("a", b"1" * 1000))
for write in (store.create, store.put):
    try:
        write("b", b"2" * 8_000_000)
    except RunFailed as error:
        print(error)
print(store.names(""), sum(path.is_file() for path in Path(sys.argv[1]).rglob("*")))
print(store.create("b", b"3" * 1000))
"""


def test_a_full_disk_is_named_and_leaves_nothing_behind(on_small_disk):
    made, create, put, left, after = on_small_disk(FULL)
    assert (made, after) == ("True", "True")
    for sentence in (create, put):
        assert "b in " in sentence
        assert sentence.endswith("could not be written: the disk is full; make room and start the same command again")
    assert left == "['a'] 1"

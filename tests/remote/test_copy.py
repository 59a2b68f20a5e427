"""Copies to and from machines: files, folders, identical files, lost connections."""

import asyncio
import os
import shutil
import time

import asyncssh
import pytest

from tpuswarm.cloud.rehearsal.machines.root import SKELETON
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.remote.copy import _walk, download, split_location, upload
from tpuswarm.remote.host import HostUnreachable

LONG_AGO = 1_700_000_000


def test_colon_makes_it_a_path_of_a_machine():
    for text, parts in {
        "node-1:data/x": ("node-1", "data/x"),
        "node-1/2:x": ("node-1/2", "x"),
        "small:": ("small", ""),
        "all:~/x": ("all", "x"),
        "data": (None, "data"),
        "./a:b": (None, "./a:b"),
        "/tmp/x:y": (None, "/tmp/x:y"),
    }.items():
        assert split_location(text) == parts


@pytest.fixture
def over(machines):
    return lambda work, *args, **options: machines.run(lambda connections: work(connections, *args, **options))


def test_file_sent_twice_at_once_arrives_intact(machines, tmp_path):
    """The same command in two windows."""
    source = tmp_path / "large"
    source.write_bytes(os.urandom(12_000_000))
    host = machines.hosts[0]

    async def both():
        async with machines.connections() as first, machines.connections() as second:
            begun = asyncio.Event()
            one = asyncio.create_task(upload(first, host, source, "large", lambda count: begun.set()))
            await begun.wait()
            return await asyncio.gather(one, upload(second, host, source, "large"))

    assert asyncio.run(both()) == [1, 1]
    assert (machines[0].home / "large").read_bytes() == source.read_bytes()


def test_copy_ignores_what_the_shell_prints_as_it_starts(machines, over, tmp_path):
    source = tmp_path / "file"
    source.write_text("whole")
    (machines[0].root / "etc/chatty-shell").touch()
    try:
        assert over(upload, machines[0].host, source, "chatty/") == 1
        assert over(download, machines[0].host, "chatty/file", tmp_path / "back") == 1
    finally:
        (machines[0].root / "etc/chatty-shell").unlink()
    assert (tmp_path / "back").read_text() == "whole"


def test_host_cannot_choose_where_a_file_goes(tmp_path):
    class Bad:
        async def readdir(self, folder):
            attributes = asyncssh.SFTPAttrs(permissions=0o100644, size=1, mtime=1)
            return [asyncssh.SFTPName("../../.ssh/authorized_keys", attrs=attributes)]

    async def names():
        return [name async for name in _walk(Bad(), "runs", [])]

    with pytest.raises(RunFailed, match=r"a host sent an invalid file name '\.\./\.\./\.ssh/authorized_keys' in runs/"):
        asyncio.run(names())


def test_folder_is_copied_there_and_back(machines, over, tmp_path):
    source = tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "deep/run.sh").write_text("#!/bin/sh")
    (source / "deep/run.sh").chmod(0o755)
    (source / "a").write_bytes(os.urandom(3_000_000))
    for path in (source / "a", source / "deep/run.sh"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    machine = machines[0]
    assert over(upload, machine.host, source, "copies/") == 2
    there = machine.home / "copies/data"
    assert (there / "a").read_bytes() == (source / "a").read_bytes() and os.access(there / "deep/run.sh", os.X_OK)
    inode = (there / "a").stat().st_ino
    over(upload, machine.host, source, "copies/")
    assert (there / "a").stat().st_ino == inode, "an identical file is not written again"
    (source / "a").write_bytes(b"other")
    over(upload, machine.host, source, "copies/")
    assert over(download, machine.host, "copies/data", tmp_path / "back") == 2
    assert (tmp_path / "back/a").read_bytes() == (source / "a").read_bytes()
    assert (tmp_path / "back/deep/run.sh").stat().st_mtime == int((source / "deep/run.sh").stat().st_mtime)
    with pytest.raises(InputError, match=r"^node-0/0 has no file or folder nowhere$"):
        over(download, machine.host, "nowhere", tmp_path)
    with pytest.raises(RunFailed, match=r"^node-0/0: "):
        over(upload, machine.host, source / "a", "copies/data/a/")


@pytest.mark.parametrize("direction", ["upload", "download"])
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
def test_file_that_is_replaced_within_a_second_is_copied_again(machines, over, tmp_path, direction, is_broken):
    """Its size and its second are those of the copy, and of the part that a broken copy leaves."""
    machine, name = machines[0], f"replaced-{direction}-{is_broken}"
    here, there = tmp_path / name, machine.home / name
    source, target = (here, there) if direction == "upload" else (there, here)
    second = int(time.time())

    def write(byte):
        source.write_bytes(byte * 5_000_000)
        os.utime(source, ns=(0, second * 10**9 + byte[0]))

    def copy(on_bytes=lambda count: None):
        order = (here, name) if direction == "upload" else (name, here)
        over(upload if direction == "upload" else download, machine.host, *order, on_bytes)

    seen = []

    def cut(count):
        seen.append(count)
        if sum(seen) == 2 << 20:
            machines.disconnect(0)

    write(b"a")
    if is_broken:
        with pytest.raises(HostUnreachable):
            copy(cut)
    else:
        copy()
    write(b"b")
    copy()
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_run_that_trains_is_copied_with_its_newest_whole_checkpoint(machines, over, tmp_path, direction):
    """Each file that is copied lets it write a row, and save and prune once, three times in all."""
    machine, local = machines[0], tmp_path / direction
    run = local if direction == "upload" else machine.home / "live"
    saved = []

    def save():
        folder = run / "checkpoints" / f"{len(saved):08d}"
        (folder / "state").mkdir(parents=True)
        for name in ("state/a", "state/b", "manifest.json"):
            (folder / name).write_text(f"{len(saved)} {name}")
        saved.append(folder)
        with (run / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"step": 1}\n' * 300_000)

    def train(count):
        if len(saved) < 4:
            save()
            shutil.rmtree(saved[-2])

    save()
    if direction == "upload":
        over(upload, machine.host, run, "copied", train)
        copy = machine.home / "copied"
    else:
        over(download, machine.host, "live", local, train)
        copy = local
    newest = copy / "checkpoints" / saved[-1].name
    names = [path.relative_to(newest).as_posix() for path in sorted(newest.rglob("*")) if path.is_file()]
    assert names == ["manifest.json", "state/a", "state/b"]
    assert all((newest / name).read_text() == f"{len(saved) - 1} {name}" for name in names)
    rows = (copy / "metrics.jsonl").read_bytes()
    assert rows and (run / "metrics.jsonl").read_bytes().startswith(rows)
    assert not list(copy.rglob("*.part"))


def test_broken_copy_leaves_no_half_file_and_continues(machines, over, tmp_path):
    source = tmp_path / "big"
    source.write_bytes(os.urandom(20_000_000))
    os.utime(source, (LONG_AGO, LONG_AGO))
    machine, seen = machines[0], []

    def cut(count):
        seen.append(count)
        if sum(seen) == 8 << 20:
            machines.disconnect(0)

    with pytest.raises(HostUnreachable, match=r"the same command resumes"):
        over(upload, machine.host, source, "big", on_bytes=cut)
    assert not (machine.home / "big").exists()
    again = []
    over(upload, machine.host, source, "big", on_bytes=again.append)
    assert again[0] >= 6 << 20 and (machine.home / "big").read_bytes() == source.read_bytes()
    assert [path.name for path in machine.home.iterdir() if path.name not in SKELETON] == ["big"]

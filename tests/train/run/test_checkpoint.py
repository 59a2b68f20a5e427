"""Checkpoints are restored bit by bit on any devices; damaged ones are skipped."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.train import toy
from tpuswarm import Trainer
from tpuswarm.errors import RunFailed
from tpuswarm.train.process.atomic import partial_path
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.run import checkpoint, checkpoint_writer
from tpuswarm.train.run.checkpoint import (
    MANIFEST,
    checkpoint_folders,
    newest_intact,
    read_arrays,
    read_unpruned,
    restore,
)
from tpuswarm.train.run.checkpoint_writer import Checkpoints, set_aside
from tpuswarm.train.run.schema import METRICS


def state(value=1.0, count=8):
    mesh = make_mesh(jax.devices()[:count])
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return {
        "w": jax.device_put(jnp.arange(64.0).reshape(16, 4) * value, split),
        "opt": (jax.device_put(jnp.int32(7), whole), None, {"half": jax.device_put(jnp.ones(3, jnp.bfloat16), whole)}),
        "key": jax.device_put(jax.random.key(3), whole),
        "keys": jax.device_put(jax.random.split(jax.random.key(4), 16), split),
        "whole": jax.device_put(jnp.arange(64.0).reshape(16, 4), whole),
        "rbg": jax.device_put(jax.random.key(5, impl="rbg"), whole),
    }


def abstract(like):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)


def save_steps(folder, steps, keep=3):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state(step), {"wall_s": float(step)})
    checkpoints.wait()
    assert checkpoints.last_save_s > 0
    checkpoints.close()


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def steps_in(folder):
    return sorted(int(path.parent.name) for path in folder.glob(f"*/{MANIFEST}"))


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_steps(folder, (1, 2, 3))
    return folder


@pytest.fixture
def folder(saved_steps, tmp_path):
    return shutil.copytree(saved_steps, tmp_path / "checkpoints")


@pytest.mark.parametrize(("smallest", "cut"), [(checkpoint_writer.MIN_SLICE_BYTES, 0), (32, 8)])
def test_only_large_arrays_are_saved_in_slices(tmp_path, monkeypatch, smallest, cut):
    """Each slice needs its own program; a first save on TPUs would compile for minutes."""
    compiled = []

    def listen(event, seconds, **facts):
        compiled.extend([facts["fun_name"]] if event.endswith("backend_compile_duration") else [])

    monkeypatch.setattr(checkpoint_writer, "MIN_SLICE_BYTES", smallest)
    checkpoints, expected = Checkpoints(tmp_path, 1), state()
    jax.monitoring.register_event_duration_secs_listener(listen)
    checkpoints.save(1, expected, {})
    jax.monitoring.unregister_event_duration_listener(listen)
    checkpoints.close()
    saved, _ = newest_intact(tmp_path)
    np.testing.assert_array_equal(restore(saved, abstract(expected))["whole"], expected["whole"])
    assert sum("slice" in name for name in compiled) == cut


@pytest.mark.parametrize("count", [1, 2, 8])
def test_state_comes_back_on_any_number_of_devices(saved_steps, count):
    saved, passed = newest_intact(saved_steps)
    assert saved is not None and (saved.step, saved.about, passed) == (3, {"wall_s": 3.0}, [])
    expected = state(3, count)
    for got, want in zip(jax.tree.leaves(restore(saved, abstract(expected))), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype and got.sharding.is_equivalent_to(want.sharding, got.ndim)
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)


def test_another_model_is_refused(saved_steps):
    like = abstract(state())
    wider = jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=like["w"].sharding)
    for change, difference in (
        ({"more": like["w"]}, "more"),
        ({"w": wider}, "w"),
        ({"rbg": like["key"]}, r"rbg \(uint32 \(4,\) there, uint32 \(2,\) here\)"),
    ):
        with pytest.raises(RunFailed, match=f"a different model.*1 arrays differ, the first {difference}"):
            restore(newest_intact(saved_steps)[0], {**like, **change})


def test_last_ones_stay_and_unfinished_ones_go(tmp_path):
    (tmp_path / "00000001" / "state").mkdir(parents=True)
    save_steps(tmp_path, (2, 3, 4), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_best_one_goes_only_once_the_next_best_is_whole(tmp_path, monkeypatch):
    go, digest, pinned = threading.Event(), checkpoint_writer.file_digest, []
    checkpoints = Checkpoints(tmp_path, keep=1)

    def slow_digest(path):
        assert "00000003" not in path.parts or go.wait(300)
        return digest(path)

    def pin(step):
        checkpoints.pin(step, lambda: pinned.append((step, steps_in(tmp_path))))

    monkeypatch.setattr(checkpoint_writer, "file_digest", slow_digest)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    pin(1)
    checkpoints.save(2, state(2), {})  # it may prune while the next one is to be pinned
    checkpoints.save(3, state(3), {})
    pin(3)
    checkpoints.check()
    assert steps_in(tmp_path) == [1, 2] and pinned == [(1, [1])]
    go.set()
    checkpoints.close()
    assert pinned == [(1, [1]), (3, [1, 3])] and steps_in(tmp_path) == [3]
    monkeypatch.setattr(checkpoint_writer, "file_digest", lambda path: path.with_name("gone").read_bytes())
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, state(4), {})
    with pytest.raises(RunFailed, match="could not be written"):
        pin(4)
        checkpoints.wait()
    checkpoints.close()
    assert len(pinned) == 2, "a failed save is not the best"


def test_one_flipped_bit_in_any_file_makes_the_one_before_be_used(folder):
    random = np.random.default_rng(0)
    files = sorted(path for path in (folder / "00000003").rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 5
    for file in files:
        good = file.read_bytes()
        data, bit = bytearray(good), int(random.integers(len(good) * 8))
        data[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(data)
        saved, passed = newest_intact(folder)
        file.write_bytes(good)
        if file.name == MANIFEST and saved is not None and saved.step == 3:
            continue  # the name of its own digest is another
        assert saved is not None and saved.step == 2, file
        assert len(passed) == 1 and "00000003 is damaged" in passed[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: next(path for path in (folder / "state").rglob("*") if path.is_file()).unlink(), "is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "did not finish"),
        (lambda folder: (folder / MANIFEST).write_text('{"step": 3, "fi'), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest cannot be read"),
        (
            lambda folder: edit(folder / MANIFEST, '"wall_s": 3.0', '"wall_s": 7.0'),
            "manifest does not match its digest",
        ),
    ],
    ids=["missing file", "no manifest", "torn manifest", "other manifest", "other value in the manifest"],
)
def test_damaged_checkpoint_is_named_and_written_anew(folder, damage, words):
    damage(folder / "00000003")
    saved, passed = newest_intact(folder)
    assert saved is not None and saved.step == 2 and len(passed) == 1 and words in passed[0]
    save_steps(folder, [3])
    saved, passed = newest_intact(folder)
    assert saved is not None and saved.step == 3 and not passed


def test_one_that_is_damaged_while_it_is_read_is_skipped_too(folder):
    def read(saved):
        if saved.step == 3:
            (saved.folder / "state" / "_METADATA").write_text("{}")  # after its digest was checked
        return read_arrays(saved)

    saved, arrays, notes = read_unpruned(lambda: newest_intact(folder), read)
    assert saved.step == 2 and arrays["whole"].size == 64 and "00000003 is damaged" in notes[0]


def test_reader_gets_the_newest_when_what_it_listed_is_pruned_meanwhile(folder, monkeypatch):
    listed = []

    def list_and_go_on(where):
        listed.append(checkpoint_folders(where))
        if len(listed) == 1:
            save_steps(folder, [4])
            shutil.rmtree(folder / "00000003")
        return listed[-1]

    monkeypatch.setattr(checkpoint, "checkpoint_folders", list_and_go_on)
    saved, passed = newest_intact(folder, is_live=True)
    assert saved is not None and (saved.step, passed) == (4, [])


def test_damaged_ones_newer_than_the_restored_one_make_room_for_new_ones(folder):
    (folder / "00000003" / "state" / "_METADATA").write_text("{}")
    (folder / "00000004").mkdir()  # never finished
    saved, _ = newest_intact(folder)
    assert saved is not None and saved.step == 2
    set_aside(folder, saved)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001", "00000002", "00000003.damaged"]
    save_steps(folder, [3], keep=1)
    saved, passed = newest_intact(folder)
    assert saved is not None and (saved.step, passed) == (3, [])


def test_nothing_starts_over_when_all_are_damaged(folder, tmp_path):
    assert newest_intact(tmp_path / "none") == (None, [])
    for path in folder.glob("*/state/_METADATA"):
        path.write_text("{}")
    saved, passed = newest_intact(folder)
    assert saved is None and len(passed) == 3
    with pytest.raises(RunFailed, match=r"every checkpoint in .* is damaged \(00000003, 00000002, 00000001\).*--run"):
        set_aside(folder, saved)
    assert len(list(folder.iterdir())) == 3


def test_rows_are_on_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    """A power cut leaves only what is synchronized."""
    fsync, on_disk, found = os.fsync, b"", []

    def synchronize(handle):
        nonlocal on_disk
        path = Path(f"/proc/self/fd/{handle}").readlink()
        fsync(handle)
        if path.name == METRICS:
            on_disk = path.read_bytes()
        if path.name == partial_path(Path(MANIFEST)).name:
            steps = [json.loads(line)["step"] for line in on_disk.splitlines()]
            found.append((int(path.parent.name), steps[: int(path.parent.name)]))

    monkeypatch.setattr(os, "fsync", synchronize)
    Trainer(devices=1, save_every=5).fit(toy.recipe(), steps=20, batch=8, run=tmp_path / "run")
    assert found[-1][0] == 20 and all(steps == [*range(1, step + 1)] for step, steps in found)


def test_save_without_room_fails_and_leaves_the_one_before(tmp_path, monkeypatch):
    """Replicas on several devices need room once."""
    copies = {"w": jax.device_put(jnp.ones(1000), NamedSharding(make_mesh(jax.devices()), PartitionSpec()))}
    free = iter((SimpleNamespace(free=4000), SimpleNamespace(free=3999)))
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: next(free))
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, copies, {})
    checkpoints.wait()
    with pytest.raises(RunFailed, match=r"00000002 could not be written: it needs 0\.0 MiB, only 0\.0 MiB free"):
        checkpoints.save(2, copies, {})
    checkpoints.close()
    assert newest_intact(tmp_path)[0].step == 1 and [path.name for path in tmp_path.iterdir()] == ["00000001"]


FULL_DISK = """
import gc, os, shutil, sys
from pathlib import Path
import jax
from tests.train.run.test_checkpoint import Checkpoints, RunFailed
disk, state = Path(sys.argv[1]), {f"{key}": jax.random.normal(jax.random.key(key), 300) for key in range(200)}
for pages in range(10, 30):  # the arrays fit, their files do not
    with (disk / "rest").open("wb") as rest:
        free = os.statvfs(disk)
        room = 200 * 300 * 4 + pages * free.f_bsize
        os.posix_fallocate(rest.fileno(), 0, free.f_bavail * free.f_bsize - room)
    checkpoints = Checkpoints(disk / "checkpoints", keep=1)
    try:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        print("saved")
    except RunFailed as error:
        print(error)
    checkpoints.close()
    gc.collect()  # asyncio reports errors that nobody has read
    (disk / "rest").unlink()
    shutil.rmtree(disk / "checkpoints")
"""


@pytest.mark.slow
def test_disk_that_fills_during_a_save_is_reported_in_one_sentence(on_small_disk):
    """Other writes of the save are still under way then."""
    ends = on_small_disk(FULL_DISK, 64)
    full = [end for end in ends if "could not be written: the disk is full; make room and start the same" in end]
    assert len(full) > 5 and {*ends} <= {*full, "saved"}


BUSY = """
import subprocess, sys
from pathlib import Path
from tests.train import toy
from tests.train.run.test_checkpoint import MANIFEST
from tests.waiting import until
from tpuswarm import Every, Trainer
from tpuswarm.train.run.directory import read_rows
run = Path(sys.argv[1]) / "run"
old = run / "checkpoints/00000010"

def mount(step):
    if step.row["step"] == 12:
        until((old / MANIFEST).exists)
        subprocess.run(["mount", "--bind", old / "state", old / "state"], check=True)
    if step.row["step"] == 32:
        subprocess.run(["umount", old / "state"], check=True)

Trainer(devices=1, save_every=5, keep=1, hooks=[Every(1, mount)]).fit(toy.recipe(), steps=40, batch=8, run=run)
notes = (row["message"] for row in read_rows(run / "events.jsonl") if row["event"] == "note")
print(*(note for note in notes if "could not be removed" in note), sep="\\n")
print(*(path.name for path in (run / "checkpoints").iterdir()))
"""


def test_old_checkpoint_that_cannot_be_removed_ends_nothing(on_small_disk):
    note, left = on_small_disk(BUSY, 64)
    assert note.endswith(
        "00000010 could not be removed: Device or resource busy; training continues, and each save tries again"
    )
    assert left == "00000040", "as soon as it can be"


def test_link_to_a_checkpoint_is_left_alone(tmp_path):
    """A user has moved it to another disk."""
    save_steps(tmp_path / "checkpoints", (1, 2), keep=2)
    (tmp_path / "checkpoints" / "00000001").rename(tmp_path / "other disk")
    (tmp_path / "checkpoints" / "00000001").symlink_to(tmp_path / "other disk")
    checkpoints, warnings = Checkpoints(tmp_path / "checkpoints", keep=1), []
    checkpoints.warn = warnings.append
    checkpoints.save(3, state(3), {})
    checkpoints.close()
    assert len(warnings) == 1 and "00000001 could not be removed: it is a link" in warnings[0]
    assert steps_in(tmp_path / "checkpoints") == [1, 3] and (tmp_path / "other disk" / MANIFEST).exists()

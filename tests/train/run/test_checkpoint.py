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

from tpuswarm.errors import RunFailed
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.checkpoint import Checkpoints, Saved, newest, restore


def state(value=1.0, count=8):
    mesh = make_mesh(jax.devices()[:count])
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "w": jax.device_put(jnp.arange(64.0).reshape(16, 4) * value, split),
        "opt": (jax.device_put(jnp.int32(7), whole), None, {"half": jax.device_put(jnp.ones(3, jnp.bfloat16), whole)}),
    }


def abstract(like):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)


def saved_run(folder: Path, steps=(1, 2, 3), keep=3):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state(step), {"wall_s": float(step)})
    checkpoints.wait()
    seconds = checkpoints.seconds
    checkpoints.close()
    return seconds


def test_what_comes_back_is_what_was_saved(tmp_path):
    assert saved_run(tmp_path) > 0
    saved, passed = newest(tmp_path)
    assert saved is not None and (saved.step, saved.about, passed) == (3, {"wall_s": 3.0}, [])
    back = restore(saved, abstract(state()))
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(state(3)), strict=True):
        assert got.dtype == want.dtype and got.sharding == want.sharding
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_it_comes_back_on_another_number_of_devices(tmp_path, count):
    saved_run(tmp_path)
    saved, _ = newest(tmp_path)
    back = restore(saved, abstract(state(count=count)))
    assert len(back["w"].sharding.device_set) == count
    np.testing.assert_array_equal(back["w"], state(3)["w"])


@pytest.mark.parametrize("count", [1, 2, 8])
def test_typed_keys_come_back_of_their_kind_and_where_they_belong(tmp_path, count):
    """One, a batch of them that is split over the devices, and one of another implementation than the default."""

    def keys(count):
        like = state(count=count)
        whole, split = like["opt"][0].sharding, like["w"].sharding
        return {
            "one": jax.device_put(jax.random.key(3), whole),
            "many": jax.device_put(jax.random.split(jax.random.key(4), 16), split),
            "other": jax.device_put(jax.random.key(5, impl="rbg"), whole),
        }

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, keys(8), {})
    checkpoints.close()
    saved, _ = newest(tmp_path)
    wanted = keys(count)
    back = restore(saved, abstract(wanted))
    for name, key in back.items():
        assert key.dtype == wanted[name].dtype and key.sharding.is_equivalent_to(wanted[name].sharding, key.ndim)
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(wanted[name]))
    with pytest.raises(RunFailed, match=r"the first other \(uint32 \(4,\) there, uint32 \(2,\) here\)"):
        restore(saved, abstract(wanted | {"other": wanted["one"]}))


def test_the_last_n_stay(tmp_path):
    saved_run(tmp_path, steps=range(1, 6), keep=2)
    assert [int(folder.name) for folder in checkpoint.checkpoint_folders(tmp_path)] == [5, 4]


def test_the_best_one_goes_only_when_the_next_best_is_whole(tmp_path, monkeypatch):
    checkpoints, told = Checkpoints(tmp_path, keep=1), []
    go, digest = threading.Event(), checkpoint._digest

    def slow(path):
        assert "00000003" not in path.parts or go.wait(60)
        return digest(path)

    def there():
        return sorted(int(path.parent.name) for path in tmp_path.glob(f"*/{checkpoint.MANIFEST}"))

    def pin(step):
        checkpoints.pin(step, lambda: told.append((step, there())))

    monkeypatch.setattr(checkpoint, "_digest", slow)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    pin(1)
    checkpoints.save(2, state(2), {})  # still under way, it may prune when the next one is to be pinned
    checkpoints.save(3, state(3), {})
    pin(3)
    checkpoints.check()
    assert there() == [1, 2] and [step for step, _ in told] == [1]
    go.set()
    checkpoints.close()
    assert told == [(1, [1]), (3, [1, 3])] and there() == [3]


def test_one_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    checkpoints, told = Checkpoints(tmp_path, keep=1), []
    monkeypatch.setattr(checkpoint, "_digest", lambda path: path.with_name("gone").read_bytes())
    checkpoints.save(1, state(1), {})
    with pytest.raises(RunFailed, match="could not be written"):
        checkpoints.pin(1, lambda: told.append(1))
        checkpoints.wait()
    checkpoints.close()
    assert told == []


def test_one_flipped_bit_anywhere_makes_the_one_before_be_used(tmp_path):
    saved_run(tmp_path / "good")
    random = np.random.default_rng(0)
    files = sorted(path for path in (tmp_path / "good" / "00000003").rglob("*") if path.is_file())
    assert len(files) > 5
    for number, file in enumerate(files):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "good", copy)
        victim = copy / file.relative_to(tmp_path / "good")
        data = bytearray(victim.read_bytes())
        if not data:
            continue
        bit = int(random.integers(len(data) * 8))
        data[bit // 8] ^= 1 << (bit % 8)
        victim.write_bytes(data)
        saved, passed = newest(copy)
        if victim.name == checkpoint.MANIFEST and saved is not None and saved.step == 3:
            continue  # a flip in white space or in the wall time leaves every digest right
        assert saved is not None and saved.step == 2, victim
        assert len(passed) == 1 and "00000003 is damaged" in passed[0]


@pytest.mark.parametrize("harm", ["missing file", "no manifest", "torn manifest", "manifest of nothing"])
def test_other_damage_is_named(tmp_path, harm):
    saved_run(tmp_path)
    folder = tmp_path / "00000003"
    manifest = folder / checkpoint.MANIFEST
    if harm == "missing file":
        next(path for path in (folder / "state").rglob("*") if path.is_file()).unlink()
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        manifest.write_text(manifest.read_text()[:40])
    else:
        manifest.write_text("[]")
    saved, passed = newest(tmp_path)
    assert saved is not None and saved.step == 2
    words = {"missing file": "is missing", "no manifest": "did not finish"}.get(harm, "manifest cannot be read")
    assert words in passed[0]


def test_nothing_whole_is_nothing(tmp_path):
    assert newest(tmp_path / "none") == (None, [])
    saved_run(tmp_path, steps=[1])
    (tmp_path / "00000001" / checkpoint.MANIFEST).unlink()
    saved, passed = newest(tmp_path)
    assert saved is None and len(passed) == 1


def test_damaged_ones_newer_than_the_one_gone_on_from_do_not_push_new_ones_out(tmp_path):
    saved_run(tmp_path, steps=[1, 500], keep=2)
    (tmp_path / "00000500" / "state" / "_METADATA").write_text("{}")
    (tmp_path / "00000400").mkdir()  # never finished
    saved, _ = newest(tmp_path)
    assert saved is not None and saved.step == 1
    checkpoint.set_aside(tmp_path, saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000500.damaged"]
    saved_run(tmp_path, steps=[2, 3], keep=1)
    saved, passed = newest(tmp_path)
    assert saved is not None and (saved.step, passed) == (3, [])


def test_unfinished_ones_go_with_the_next_save(tmp_path):
    (tmp_path / "00000001" / "state").mkdir(parents=True)
    saved_run(tmp_path, steps=[2])
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_when_all_are_damaged_nothing_is_begun_again(tmp_path):
    saved_run(tmp_path, steps=[1, 2])
    for name in ("00000001", "00000002"):
        (tmp_path / name / "state" / "_METADATA").write_text("{}")
    with pytest.raises(RunFailed, match=r"every checkpoint in .* is damaged \(00000002, 00000001\).*--run"):
        checkpoint.set_aside(tmp_path, newest(tmp_path)[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_replicas_need_no_room_of_their_own(tmp_path, monkeypatch):
    whole = NamedSharding(make_mesh(jax.devices()), PartitionSpec())
    copies = {"w": jax.device_put(jnp.ones(1000), whole)}
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    checkpoint._require_room(tmp_path, copies)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=3999))
    with pytest.raises(RunFailed, match=r"only 0\.0 MiB free"):
        checkpoint._require_room(tmp_path, copies)


def test_a_damaged_checkpoint_of_the_same_step_is_written_anew(tmp_path):
    saved_run(tmp_path)
    (tmp_path / "00000003" / checkpoint.MANIFEST).unlink()
    saved_run(tmp_path, steps=[3])
    saved, passed = newest(tmp_path)
    assert saved is not None and saved.step == 3 and not passed


def test_another_model_is_refused(tmp_path):
    saved_run(tmp_path)
    saved, _ = newest(tmp_path)
    other = abstract(state())
    with pytest.raises(RunFailed, match=r"a different model.*1 arrays differ, the first (more|w)"):
        restore(saved, {**other, "more": other["w"]})
    wider = jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=other["w"].sharding)
    with pytest.raises(RunFailed, match=r"a different model.*1 arrays differ, the first (more|w)"):
        restore(saved, {**other, "w": wider})


FULL = """
import sys, jax.numpy as jnp
from pathlib import Path
from types import SimpleNamespace
from tpuswarm.errors import RunFailed
from tpuswarm.train.run.checkpoint import Checkpoints, newest
checkpoints = Checkpoints(Path(sys.argv[1]), 3)
checkpoints.save(1, {"w": jnp.ones(1000)}, {})
checkpoints.wait()
try:
    checkpoints.save(2, {"w": jnp.arange(4_000_000.0)}, {})
    checkpoints.wait()
except RunFailed as error:
    print(error)
print(newest(Path(sys.argv[1]))[0].step)
"""


def test_a_full_disk_is_named_and_leaves_the_one_before(on_small_disk):
    message, step = on_small_disk(FULL, 8)
    assert "00000002 could not be written: it needs 15.3 MiB, only " in message
    assert step == "1"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_atomically(path, json.dumps([1]))

    def broken(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, json.dumps([2]))
    assert json.loads(path.read_text()) == [1]


def test_inspect_says_what_it_found(tmp_path):
    saved_run(tmp_path, steps=[4])
    assert isinstance(checkpoint.inspect(tmp_path / "00000004"), Saved)

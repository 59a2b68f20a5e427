"""A run in a bucket can be resumed, read and controlled from any computer."""

import os
import signal
import threading
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.storage.conftest import CONFIG, URL, read_steps, start_run
from tests.waiting import until
from tpuswarm import Trainer, supervised
from tpuswarm.cli.train import profile as cli
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.look.profile import request_trace, take_request, trace_folders
from tpuswarm.train.run.best import Best, best_checkpoint, write_best
from tpuswarm.train.run.checkpoint import newest_intact, restore
from tpuswarm.train.run.checkpoint_writer import Checkpoints, set_aside
from tpuswarm.train.run.directory import Run, read_rows
from tpuswarm.train.run.life import read_life
from tpuswarm.train.run.listing import read_status
from tpuswarm.train.storage.bucket import Bucket, BucketFailed
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import ROWS, copy_folder, is_url
from tpuswarm.train.storage.record import read_record
from tpuswarm.train.storage.sync import STOP, send_request


def test_run_is_resumed_from_another_disk(use_disk):
    run = start_run()
    secrets = ("token", "invites.json", "listen.pem")
    for name in secrets:
        (run.folder / name).write_text("secret")
    (run.folder / "status.json").write_text("from one")
    run.close()
    use_disk("two")
    download_run(URL)  # commands read the configuration first
    run = Run(copy_folder(URL))
    assert run.config() == CONFIG and read_steps(run.folder) == [1, 2, 3]
    assert not any((run.folder / name).exists() for name in secrets)
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    (run.folder / "status.json").write_text("from two")
    run.close()
    use_disk("one")  # which holds an older copy
    folder = download_run(URL)
    assert read_steps(folder) == [1, 2, 3, 4] and (folder / "status.json").read_text() == "from two"
    assert b"secret" not in b"".join(Bucket(URL).read(name) for name in Bucket(URL).listed(""))


@pytest.mark.parametrize("last", [3, 9], ids=["shorter", "longer"])
def test_rows_cut_on_resume_are_replaced_in_the_bucket(use_disk, last):
    start_run(5).close()
    run = Run(copy_folder(URL))
    assert run.cut_metrics(2) == 3
    for step in range(3, last + 1):
        run.write_metrics({"step": step, "loss": 0.125 + step})
    run.close()
    use_disk("two")
    rows = list(read_rows(download_run(URL) / ROWS))
    assert [row["step"] for row in rows] == list(range(1, last + 1)) and rows[-1]["loss"] == 0.125 + last


def test_file_replaced_with_its_size_and_time_is_uploaded(use_disk):
    run = start_run()
    for text in ("one", "two"):
        (run.folder / "notes.txt").write_text(text)
        os.utime(run.folder / "notes.txt", (1e9, 1e9))
        run._sync.upload()
    run.close()
    use_disk("two")
    assert (download_run(URL) / "notes.txt").read_text() == "two"


def test_many_pieces_are_merged(use_disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.storage.copy.MAX_PARTS", 4)
    run = start_run(1)
    for step in range(2, 12):
        run.write_metrics({"step": step, "tokens": 2 * step, "loss": 1.0})
        run._sync.upload()
    assert len(files()[ROWS].parts) <= 4
    run.close()
    use_disk("two")
    assert read_steps(download_run(URL)) == [*range(1, 12)]


def files():
    found = read_record(Bucket(URL))
    assert found
    return found.record.files


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, {"w": jnp.full(3, float(step))}, {})


def test_newest_and_best_checkpoints_are_in_the_bucket(use_disk):
    run = start_run()
    checkpoints, best = Checkpoints(run.checkpoints, keep=1), Best("eval_loss")
    for step in (1, 2, 3):
        save(checkpoints, step)
        if best.update({"step": step, "eval_loss": abs(step - 1.5)}):
            checkpoints.pin(step, partial(write_best, run.folder, best.row))
        checkpoints.wait()
        run._sync.upload()
    checkpoints.close()
    run.close()
    use_disk("two")
    folder = download_run(URL, whole=True)
    saved, damaged = newest_intact(folder / "checkpoints")
    assert saved and saved.step == 3 and not damaged and best_checkpoint(folder).step == 1
    assert restore(saved, {"w": jnp.zeros(3)})["w"].tolist() == [3.0, 3.0, 3.0]
    again = Run(folder)
    again.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    again.close()
    assert {name.split("/")[1] for name in files() if name.startswith("checkpoints/")} == {"00000001", "00000003"}


def test_damaged_checkpoint_is_not_taken_for_the_newest(use_disk):
    run = start_run()
    checkpoints = Checkpoints(run.checkpoints, keep=2)
    for step in (1, 2):
        save(checkpoints, step)
        checkpoints.wait()
    checkpoints.close()
    (run.checkpoints / "00000002" / "manifest.json").write_text("{}")
    set_aside(run.checkpoints, newest_intact(run.checkpoints)[0])
    assert (run.checkpoints / "00000002.damaged").exists()
    run.close()
    use_disk("two")
    saved, _ = newest_intact(download_run(URL, whole=True) / "checkpoints")
    assert saved and saved.step == 1


def test_pruned_checkpoint_stays_until_a_newer_one_is_downloaded(use_disk):
    """Another process may be reading it while `status` and pages refresh the copy."""
    run = start_run()
    checkpoints = Checkpoints(run.checkpoints, keep=1)

    def steps_elsewhere(step, whole):
        use_disk("one")
        save(checkpoints, step)
        checkpoints.wait()
        run._sync.upload()
        use_disk("two")
        saved, damaged = newest_intact(download_run(URL, whole) / "checkpoints")
        return saved.step, damaged, len(list((copy_folder(URL) / "checkpoints").glob("*/manifest.json")))

    assert [steps_elsewhere(step, whole=step != 2) for step in (1, 2, 3)] == [(1, [], 1), (1, [], 1), (3, [], 1)]
    checkpoints.close()
    run.close()


def test_best_checkpoint_is_named_only_once_it_is_uploaded(use_disk, monkeypatch):
    """A machine that dies while it uploads a new best one leaves the best one before."""
    monkeypatch.setattr("tpuswarm.train.storage.sync.UPLOAD_INTERVAL_S", 3600.0)
    run = start_run()
    checkpoints, copy = Checkpoints(run.checkpoints, keep=1), run._sync._copy

    def save_best(step):
        save(checkpoints, step)
        checkpoints.pin(step, partial(write_best, run.folder, {"step": step, "eval_loss": 1 / step}))
        checkpoints.wait()

    save_best(1)
    run._sync.upload()
    save_best(2)
    put_file = copy.bucket.put_file

    def fail_on_checkpoints(name, path):
        if "checkpoints" in path.parts:
            raise BucketFailed("the machine is gone")
        return put_file(name, path)

    with monkeypatch.context() as patch, pytest.raises(BucketFailed, match="is gone"):
        patch.setattr(copy.bucket, "put_file", fail_on_checkpoints)
        run._sync.upload()
    checkpoints.close()
    use_disk("two")
    found = best_checkpoint(download_run(URL, whole=True)).step
    run.close()
    assert found == 1


def test_run_starts_from_the_parameters_of_a_run_in_a_bucket(use_disk, tmp_path):
    first = Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=URL)
    use_disk("two")
    frozen = supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)
    child = Trainer(devices=1).fit(frozen, steps=1, batch=8, run=tmp_path / "child", init_from=URL)
    jax.tree.map(np.testing.assert_array_equal, child.state.params, first.state.params)


def test_other_computer_reads_a_running_run_and_asks_it_for_a_trace_and_to_stop(
    use_disk, frequent_renewals, monkeypatch, capsys
):
    run = start_run()
    run._sync.upload()
    use_disk("two")
    folder = download_run(URL)
    seen = read_status(folder)
    assert (seen.run, seen.state, seen.step) == (URL, "running", 3)
    asked = request_trace(folder, 3, "m1")
    assert until(lambda: take_request(run.folder)) == (3, "m1", asked) and take_request(folder) is None
    signals = []
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append(number))
    assert send_request(folder, STOP, "").host
    until(lambda: signal.SIGINT in signals)
    assert "`tpuswarm stop` on another computer stops this run" in capsys.readouterr().err
    run.write_event("stopped", message="as asked")
    run.close()
    assert read_life(download_run(URL)).state == "stopped"


def test_trace_is_reported_once_all_of_it_is_here(use_disk, frequent_renewals, monkeypatch, capsys):
    """The event arrives before the trace, which is too large for a plain download."""
    monkeypatch.setattr("tpuswarm.train.storage.copy.MAX_SMALL_BYTES", 2**12)
    monkeypatch.setattr(cli, "BUCKET_POLL_INTERVAL_S", 0.05)
    run = start_run()
    run._sync.upload()
    use_disk("two")
    copy = copy_folder(URL)
    xplane = "tensorboard/plugins/profile/now/host.xplane.pb"

    def train():
        until(lambda: take_request(run.folder))
        run.write_event("profile", message="trace of steps 4 to 6 in tensorboard; to open it: x")
        run._sync.upload()
        until(lambda: "steps 4 to 6" in (copy / "events.jsonl").read_text())
        path = run.folder / xplane
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(2**12 + 1))
        run._sync.upload()

    trains = threading.Thread(target=train)
    trains.start()
    cli.profile(URL, 3)
    assert trace_folders(copy) == [(copy / xplane).parent] and (copy / xplane).stat().st_size == 2**12 + 1
    assert f"trace of steps 4 to 6 in {copy}/tensorboard" in capsys.readouterr().out
    trains.join()
    run.close()
    use_disk("three")
    cli.profile(URL)
    assert str((copy_folder(URL) / xplane).parent) in capsys.readouterr().out


def test_other_requests_change_no_file_and_end_no_run(use_disk, frequent_renewals, monkeypatch):
    run = start_run()
    inbox = f"asked/{run._sync._owned.record.owner.id}/"

    def contents():
        return {path.name: path.read_bytes() for path in run.folder.iterdir() if not path.name.startswith(".")}

    def deliver(data):
        Bucket(URL).put(f"{inbox}profile-request.json", data)
        until(lambda: not Bucket(URL).exists(f"{inbox}profile-request.json"))

    before = contents()
    for name in ("token", "config.toml", "sub/metrics.jsonl"):
        Bucket(URL).put(inbox + name, b"another")
    deliver(b"\xff")
    fails = Mock(side_effect=OSError(28, "No space left"))
    with monkeypatch.context() as patch:
        patch.setattr("tpuswarm.train.storage.sync.write_atomically", fails)
        deliver(b"{}")
        until(lambda: fails.called)
    deliver(b"is heard")
    until((run.folder / "profile-request.json").exists)
    run.check()
    assert contents() == {**before, "profile-request.json": b"is heard"}
    run.close()


def test_missing_runs_and_buckets_and_wrong_urls_are_named(use_disk):
    run = Run(copy_folder(URL))
    run.abandon()
    assert Bucket(URL).listed("") == {} and not run.folder.exists()
    with pytest.raises(InputError, match=f"there is no run at {URL}; `tpuswarm train RECIPE --run {URL}` begins one"):
        download_run(URL)
    with pytest.raises(RunFailed, match="there is no such bucket"):
        Run(copy_folder("gs://nowhere/a"))
    with pytest.raises(InputError, match="gs://nowhere/a: there is no such bucket"):
        download_run("gs://nowhere/a")
    with pytest.raises(InputError, match="gs://BUCKET/FOLDER"):
        is_url("gs://bucket")


def test_run_that_a_failed_start_has_removed_ends_without_another_error(use_disk):
    run = start_run()
    run.remove()
    run.abandon()
    assert Bucket(URL).listed("") == {} and not run.folder.exists()


def test_new_run_in_place_of_a_deleted_one_has_nothing_of_it(use_disk):
    commit = "commits/000001.json"
    start_run().close()
    Store(copy_folder(URL)).create(commit, b"of the first")
    use_disk("two")
    assert read_steps(download_run(URL)) == [1, 2, 3] and Store(copy_folder(URL)).exists(commit)
    for name in Bucket(URL).listed(""):
        Bucket(URL).delete(name)
    with pytest.raises(InputError, match=r"was deleted, and .* is its last copy. Delete the copy"):
        start_run()
    use_disk("three")
    start_run(1).close()
    use_disk("two")
    assert read_steps(download_run(URL)) == [1] and not Store(copy_folder(URL)).exists(commit)
    Store(copy_folder(URL)).create(commit, b"of the second")
    use_disk("three")
    assert read_steps(download_run(URL)) == [1] and Store(copy_folder(URL)).read(commit) == b"of the second"


@pytest.mark.parametrize("fault", ["deleted", "denied"])
def test_run_that_lost_its_bucket_fails_and_resumes_once_it_is_back(
    server, use_disk, short_lease, frequent_renewals, fault
):
    run = start_run()
    denied = "me@example.com does not have storage.objects.create access to the bucket"
    server.gone, server.denied = fault == "deleted", denied if fault == "denied" else ""
    run.upload_soon()
    for thread in run._sync._threads:
        thread.join()
    why = "there is no such bucket; create it" if fault == "deleted" else f".*{denied}"
    with pytest.raises(RunFailed, match=f"{URL}: {why}"):
        run.check()
    store = Store(copy_folder(URL))
    with pytest.raises(RunFailed, match=f"{URL}: {why}"):
        store.create("commits/000001.json", b"{}")
    with pytest.raises(RunFailed, match=f"{URL}: {why}"):
        run.close()
    assert read_steps(copy_folder(URL)) == [1, 2, 3], "what was trained is still on this disk"
    server.gone, server.denied = False, ""
    again = Run(copy_folder(URL))
    again.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    again.close()
    use_disk("two")
    assert read_steps(download_run(URL)) == [1, 2, 3, 4]


def test_rows_of_members_are_appended_and_cut_like_those_of_the_run(use_disk):
    def write(run: Run, step: int) -> None:
        for member in ("m0", "m1"):
            run.write_metrics({"step": step, "tokens": 2, "loss": 1.0, "member": member, "version": 0})
        run._sync.upload()

    run = start_run(0)
    write(run, 1)
    use_disk("two")
    own = download_run(URL) / "members" / "m1" / ROWS
    inode, first = own.stat().st_ino, own.read_bytes()
    for step in (2, 3):
        write(run, step)
        assert download_run(URL) and read_steps(own.parent) == [*range(1, step + 1)]
    assert own.stat().st_ino == inode and own.read_bytes().startswith(first)
    (run.folder / ROWS).write_bytes(b"".join((run.folder / ROWS).read_bytes().splitlines(keepends=True)[:2]))
    run._sync.upload()
    assert download_run(URL) and read_steps(own.parent) == [1]
    run.close()


def test_hidden_files_of_a_checkpoint_are_part_of_it(use_disk):
    """zarr writes such files; other hidden files of a run stay on this disk."""
    run = start_run()
    folder = run.checkpoints / "00000001" / "w"
    folder.mkdir(parents=True)
    for path in (
        folder / ".zarray",
        run.folder / ".note",
        run.folder / ".notes" / "a",
        folder.parent / "manifest.json",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    run.close()
    use_disk("two")
    copy = download_run(URL, whole=True)
    assert (copy / "checkpoints/00000001/w/.zarray").exists()
    assert not (copy / ".note").exists() and not (copy / ".notes").exists()

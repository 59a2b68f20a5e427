"""A run in a bucket: it goes on from another disk, and any computer can look at it."""

import json
import shutil
import threading
import time
from functools import partial

import pytest

from tests.train.bucket.far_run import CONFIG, URL, begin, steps
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.bucket import lease
from tpuswarm.train.bucket.mirror import LARGE, ROWS, Mirror, bring, folder_of, is_url
from tpuswarm.train.bucket.stored import Bucket
from tpuswarm.train.run.checkpoint import Checkpoints
from tpuswarm.train.run.directory import Run, read_rows
from tpuswarm.train.run.life import read_life
from tpuswarm.train.run.listing import status


def test_another_disk_goes_on(served, disk):
    run = begin()
    (run.folder / "token").write_text("secret")
    run.close()
    disk("two")
    bring(URL)  # as a command does that reads the configuration first
    run = Run(folder_of(URL))
    assert run.config() == CONFIG and steps(run.folder) == [1, 2, 3] and not (run.folder / "token").exists()
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    run.close()
    disk("one")  # which has a copy of its own, from before
    assert steps(bring(URL)) == [1, 2, 3, 4]
    assert b"secret" not in b"".join(Bucket(URL).read(name) for name in Bucket(URL).listed(""))


def test_rows_after_a_checkpoint_are_cut_in_the_bucket_too(served, disk):
    run = begin(5)
    run._tended._mirror.push(lambda: None)
    assert run.cut_metrics(2) == 3
    run.write_metrics({"step": 3, "tokens": 6, "loss": 7.0})
    run.close()
    disk("two")
    folder = bring(URL)
    assert steps(folder) == [1, 2, 3] and [*read_rows(folder / "metrics.jsonl")][-1]["loss"] == 7.0


def test_rows_that_are_cut_and_grown_again_before_they_are_sent(served, disk):
    """A run that resumes may write more than was cut before anything is sent: no old bytes stay among the new ones."""
    begin(5).close()
    run = Run(folder_of(URL))
    assert run.cut_metrics(2) == 3
    for step in range(3, 10):
        run.write_metrics({"step": step, "loss": 0.125 + step})
    run.close()
    disk("two")
    assert steps(bring(URL)) == list(range(1, 10))


def test_many_pieces_become_one(served, disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.mirror.MERGED", 4)
    run = begin(1)
    for step in range(2, 12):
        run.write_metrics({"step": step, "tokens": 2 * step, "loss": 1.0})
        run._tended._mirror.push(lambda: None)
    names = [name for name in Bucket(URL).listed("pieces/metrics.jsonl/")]
    run.close()
    assert len(names) < 4
    disk("two")
    assert steps(bring(URL)) == [*range(1, 12)]


def test_a_checkpoint_is_there_with_its_manifest_or_not_at_all(served, disk):
    import jax.numpy as jnp

    run = begin()
    saves = Checkpoints(run.checkpoints, keep=1)
    for step in (1, 2):
        saves.save(step, {"w": jnp.full(3, float(step))}, {})
        saves.wait()
        run._tended._mirror.push(lambda: None)
    saves.close()
    run.close()
    there = Bucket(URL).listed("checkpoints/")
    assert {name.split("/")[1] for name in there} == {"00000002"}
    disk("two")
    from tpuswarm.train.run.checkpoint import newest, restore

    saved, passed = newest(bring(URL, whole=True) / "checkpoints")
    assert saved and saved.step == 2 and not passed
    assert restore(saved, {"w": jnp.zeros(3)})["w"].tolist() == [2.0, 2.0, 2.0]


def test_the_best_checkpoint_comes_and_stays_too(served, disk):
    """Or the next machine, which has the newest alone, would remove it from the bucket."""
    import jax.numpy as jnp

    from tpuswarm.train.run.best import Best, kept_best, write_best

    run = begin()
    saves, best = Checkpoints(run.checkpoints, keep=1), Best("eval_loss")
    for step in (1, 2, 3):
        saves.save(step, {"w": jnp.full(3, float(step))}, {})
        if best.better({"step": step, "eval_loss": abs(step - 1.5)}):
            saves.pin(step, partial(write_best, run.folder, best.row))
        saves.wait()
    saves.close()
    run.close()
    disk("two")
    assert kept_best(bring(URL, whole=True)).step == 1
    again = Run(folder_of(URL))
    again.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    again.close()
    assert {name.split("/")[1] for name in Bucket(URL).listed("checkpoints/")} == {"00000001", "00000003"}


def test_the_best_checkpoint_is_named_only_where_it_is(served, disk, monkeypatch):
    """Where the machine is gone before the newer one is sent, the one before is named there, and is there."""
    import jax.numpy as jnp

    from tpuswarm.train.run.best import kept_best, write_best

    monkeypatch.setattr("tpuswarm.train.bucket.tended.SENT", 3600.0)
    run = begin()
    saves, pushes = Checkpoints(run.checkpoints, keep=1), run._tended._mirror

    def save(step):
        saves.save(step, {"w": jnp.full(3, float(step))}, {})
        saves.pin(step, partial(write_best, run.folder, {"step": step, "eval_loss": 1 / step}))
        saves.wait()

    save(1)
    pushes.push(lambda: None)
    save(2)

    def gone(name, path):
        if name.startswith("checkpoints/"):
            raise OSError("the machine is gone")
        return put(name, path)

    put = pushes.bucket.put_file
    with monkeypatch.context() as patch, pytest.raises(OSError, match="is gone"):
        patch.setattr(pushes.bucket, "put_file", gone)
        pushes.push(lambda: None)
    saves.close()
    disk("two")
    found = kept_best(bring(URL, whole=True)).step
    run.close()
    assert found == 1


def test_a_run_begins_with_the_parameters_of_one_in_a_bucket(served, disk, tmp_path):
    import jax
    import numpy as np
    import optax

    from tests.train import toy
    from tpuswarm import Trainer, supervised

    first = Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=URL)
    disk("two")
    still = supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)
    child = Trainer(devices=1).fit(still, steps=1, batch=8, run=tmp_path / "child", init_from=URL)
    jax.tree.map(np.testing.assert_array_equal, child.state.params, first.state.params)
    with pytest.raises(InputError, match="there is no run at gs://bucket/runs/none"):
        Trainer(devices=1).fit(still, steps=1, batch=8, run=tmp_path / "no", init_from="gs://bucket/runs/none")
    other = supervised(
        lambda key: {"w": np.zeros(3, np.float32)}, lambda p, b, k: p["w"].sum(), optax.sgd(0.1), {"x": np.ones(3)}
    )
    with pytest.raises(InputError, match=f"^{URL} holds a different model"):
        Trainer(devices=1).fit(other, steps=1, batch=1, run=tmp_path / "no", init_from=URL)


def test_it_is_looked_at_and_stopped_from_elsewhere(served, disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.05)
    run = begin()
    run._tended._mirror.push(lambda: None)
    disk("two")
    folder = bring(URL)
    seen = status(folder)
    assert (seen.run, seen.state, seen.step) == (URL, "running", 3)
    from tpuswarm.train.bucket.asking import ask_to_stop
    from tpuswarm.train.look.profile import request, take_request

    asked = request(folder, 3, "m1")
    taken: list = []
    end = time.monotonic() + 20
    while not taken and time.monotonic() < end:
        time.sleep(0.02)
        taken = [each for each in [take_request(run.folder)] if each]
    assert taken == [(3, "m1", asked)] and take_request(folder) is None
    heard = []
    monkeypatch.setattr("os.kill", lambda pid, number: heard.append(number))
    assert ask_to_stop(folder).host
    end = time.monotonic() + 20
    while not heard and time.monotonic() < end:
        time.sleep(0.02)
    assert heard
    run.write_event("stopped", message="as asked")
    run.close()
    assert read_life(bring(URL)).state == "stopped"


def test_a_trace_is_said_to_be_here_once_it_is(served, disk, monkeypatch, capsys):
    """Its event comes before it here, and it is larger than what a command brings of itself."""
    from tpuswarm.cli import profile as cli
    from tpuswarm.train.look.profile import take_request, traces

    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.05)
    monkeypatch.setattr(cli, "LOOK_FAR", 0.05)
    run = begin()
    run._tended._mirror.push(lambda: None)
    disk("two")
    copy = folder_of(URL)
    xplane = "plugins/profile/now/host.xplane.pb"

    def train():
        end = time.monotonic() + 60
        while not take_request(run.folder) and time.monotonic() < end:
            time.sleep(0.02)
        run.write_event("profile", message="trace of steps 4 to 6 in tensorboard; to open it: x")
        run._tended._mirror.push(lambda: None)
        while "steps 4 to 6" not in (copy / "events.jsonl").read_text() and time.monotonic() < end:
            time.sleep(0.02)
        at = run.folder / "tensorboard" / xplane
        at.parent.mkdir(parents=True)
        at.write_bytes(bytes(LARGE + 1))
        run._tended._mirror.push(lambda: None)

    trains = threading.Thread(target=train)
    trains.start()
    cli.profile(URL, 3)
    [trace] = traces(copy)
    assert (copy / "tensorboard" / xplane).stat().st_size == LARGE + 1 and trace.name == "now"
    assert f"trace of steps 4 to 6 in {copy}/tensorboard" in capsys.readouterr().out
    trains.join()
    run.close()
    disk("three")
    cli.profile(URL)
    assert str(folder_of(URL) / "tensorboard" / xplane).removesuffix("/host.xplane.pb") in capsys.readouterr().out


def test_whatever_else_is_asked_changes_no_file_and_ends_no_run(served, disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.05)
    run = begin()
    asked = f"asked/{run._tended._lease.owner}/"

    def put(name, data):
        Bucket(URL).put(asked + name, data)
        end = time.monotonic() + 20
        while Bucket(URL).listed(asked) and time.monotonic() < end:
            time.sleep(0.02)
        assert not Bucket(URL).listed(asked)

    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.name != ".mirror.json"}
    for name in ("token", "config.toml", "sub/metrics.jsonl"):
        put(name, b"another")
    put("profile-request.json", b"\xff")
    with monkeypatch.context() as full:

        def fails(path, text):
            raise OSError(28, "No space left on device")

        full.setattr("tpuswarm.train.bucket.tended.write_atomically", fails)
        put("profile-request.json", b"{}")
    put("profile-request.json", b"is heard")
    run.check()
    after = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.name != ".mirror.json"}
    assert after == {**before, "profile-request.json": b"is heard"}
    run.close()


def test_a_file_whose_first_piece_is_not_listed_stays_as_it_was_brought(served, disk):
    run = begin(2)
    run._tended._mirror.push(lambda: None)
    run.write_metrics({"step": 3, "tokens": 6, "loss": 0.3})
    run.close()
    disk("two")
    assert steps(bring(URL)) == [1, 2, 3]
    first = next(name for name in Bucket(URL).listed("pieces/metrics.jsonl/") if "/000000000000000-" in name)
    data = Bucket(URL).read(first)
    Bucket(URL).delete(first)
    assert steps(bring(URL)) == [1, 2, 3]
    Bucket(URL).put(first, data)
    assert steps(bring(URL)) == [1, 2, 3]


def test_nothing_is_left_of_what_never_became_a_run(served, disk):
    run = Run(folder_of(URL))
    run.abandon()
    assert Bucket(URL).listed("") == {} and not run.folder.exists()
    with pytest.raises(InputError, match=f"there is no run at {URL}; `tpuswarm train --run {URL}` begins one"):
        bring(URL)


def test_a_copy_is_brought_up_to_date_where_another_computer_has_gone_on(served, disk):
    """Also of files that this one had written itself."""
    run = begin()
    (folder_of(URL) / "status.json").write_text("from one")
    run.close()
    disk("two")
    again = Run(folder_of(URL))
    (folder_of(URL) / "status.json").write_text("from two")
    again.close()
    disk("one")
    assert (bring(URL) / "status.json").read_text() == "from two"


def test_a_run_that_is_begun_anew_in_the_place_of_a_deleted_one_has_nothing_of_it(served, disk):
    """Not on the disk that had trained the deleted one, nor where it was looked at: the record of a swarm neither."""
    begin().close()
    Store(folder_of(URL)).create("commits/000001.json", b"of the first")
    disk("two")
    assert steps(bring(URL)) == [1, 2, 3] and Store(folder_of(URL)).read("commits/000001.json") == b"of the first"
    disk("one")
    Mirror(folder_of(URL)).clear()
    begin(1).close()
    disk("two")
    assert steps(bring(URL)) == [1] and not Store(folder_of(URL)).exists("commits/000001.json")
    Store(folder_of(URL)).create("commits/000001.json", b"of the second")
    disk("one")
    assert steps(bring(URL)) == [1] and Store(folder_of(URL)).read("commits/000001.json") == b"of the second"


def test_a_bucket_that_is_not_there_is_named(served, disk):
    with pytest.raises(RunFailed, match="there is no such bucket"):
        Run(folder_of("gs://nowhere/a"))
    with pytest.raises(InputError, match="gs://nowhere/a: there is no such bucket, or you may not look into it"):
        bring("gs://nowhere/a")


@pytest.mark.parametrize("what", ["deleted", "denied"])
def test_a_bucket_that_is_taken_away_in_the_middle_is_said_and_gone_on_from(served, disk, monkeypatch, what):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 0.2)
    run = begin()
    denied = "me@example.com does not have storage.objects.create access to the bucket."
    served.gone, served.denied = what == "deleted", denied if what == "denied" else ""
    run._tended.soon()
    for thread in run._tended._threads:
        thread.join(60)
    why = "there is no such bucket; create it" if what == "deleted" else f".*{denied}"
    with pytest.raises(RunFailed, match=f"{URL} could not be reached: {why}"):
        run.check()
    store = Store(folder_of(URL))
    with pytest.raises(RunFailed, match=f"commits/000001.json in {URL} could not be written: {why}"):
        store.create("commits/000001.json", b"{}")
    with pytest.raises(RunFailed, match="could not be reached"):
        run.close()
    assert steps(folder_of(URL)) == [1, 2, 3], "what was trained is still on this disk"
    served.gone, served.denied = False, ""
    again = Run(folder_of(URL))
    again.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    again.close()
    disk("two")
    assert steps(bring(URL)) == [1, 2, 3, 4]


def test_an_outage_is_waited_out(served, disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.stored.PAUSE", 0.01)
    there, left = Bucket(URL), [3]
    there.put("a", b"1")
    read = there._fs.cat_file

    def cut(path):
        if left[0]:
            left[0] -= 1
            raise ConnectionError("cut")
        return read(path)

    monkeypatch.setattr(there._fs, "cat_file", cut)
    assert there.read("a") == b"1"
    left[0] = 1
    with pytest.raises(ConnectionError):  # one that has never answered may be wrong
        Bucket("gs://bucket/b").read("a")


@pytest.mark.parametrize("url", ["s3://b/run", "gs://bucket", "http://x/y"])
def test_other_urls_are_refused(url):
    with pytest.raises(InputError, match="gs://BUCKET/FOLDER"):
        is_url(url)


def test_members_rows_are_found_again(served, disk):
    run = begin(0)
    for member in ("m0", "m1"):
        rows = run.folder / "members" / member / "metrics.jsonl"
        rows.parent.mkdir(parents=True)
        row = {"step": 1, "tokens": 2, "loss": 1.0, "member": member, "version": 0}
        rows.write_text(json.dumps(row) + "\n")
        run.write_metrics(row)
    run.close()
    shutil.rmtree(run.folder)
    assert steps(bring(URL) / "members" / "m1") == [1]


def test_rows_of_members_are_added_as_they_come_and_cut_where_the_runs_are(served, disk):
    def wrote(run: Run, step: int) -> None:
        for member in ("m0", "m1"):
            run.write_metrics({"step": step, "tokens": 2, "loss": 1.0, "member": member, "version": 0})
        run._tended._mirror.push(lambda: None)

    run = begin(0)
    wrote(run, 1)
    disk("two")
    own = bring(URL) / "members" / "m1" / ROWS
    first = own.stat().st_ino, own.read_bytes()
    for step in (2, 3):
        wrote(run, step)
        assert bring(URL) and steps(own.parent) == [*range(1, step + 1)]
    assert own.stat().st_ino == first[0] and own.read_bytes().startswith(first[1])
    (run.folder / ROWS).write_bytes(b"".join((run.folder / ROWS).read_bytes().splitlines(keepends=True)[:2]))
    run._tended._mirror.push(lambda: None)
    assert bring(URL) and steps(own.parent) == [1]
    run.close()

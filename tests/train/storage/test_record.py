"""One process at a time owns a run in a bucket."""

import json
import shutil
import threading

import pytest

from tests.train.storage.conftest import CONFIG, URL, crash, read_steps, start_run
from tests.waiting import until
from tpuswarm.errors import InputError
from tpuswarm.train.run.directory import Run
from tpuswarm.train.storage import record, sync
from tpuswarm.train.storage.bucket import Bucket, BucketFailed
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import folder_of
from tpuswarm.train.storage.record import File, Lost, OwnedRecord, Part, read_record
from tpuswarm.train.storage.sync import delete_file


def test_second_machine_is_refused_while_the_owner_renews(use_disk, frequent_renewals, monkeypatch):
    monkeypatch.setattr(record, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(record, "TERM_S", 120)
    run = start_run()
    use_disk("two")
    with pytest.raises(InputError, match=f"{URL} is in use by process .* stop it first with `tpuswarm stop {URL}`"):
        Run(folder_of(URL))
    with pytest.raises(InputError, match="is in use by process"):
        run._sync.upload()
        delete_file(URL, "config.toml")
    run.close()
    Run(folder_of(URL)).close()


def test_refused_incomplete_run_is_released_at_once(use_disk, monkeypatch):
    monkeypatch.setattr(record, "TERM_S", 600.0)
    start_run().close()
    delete_file(URL, "config.toml")
    use_disk("two")
    for _ in range(2):
        with pytest.raises(InputError, match=r"has metrics.jsonl but no config.toml"):
            Run(folder_of(URL))


def test_stale_run_is_taken_over_and_a_released_one_at_once(use_disk, short_lease, monkeypatch):
    bucket = Bucket(URL)
    first, second = OwnedRecord(bucket), OwnedRecord(bucket)
    assert first.acquire().owner.id == ""
    assert second.acquire().owner == first.record.owner
    with pytest.raises(Lost, match=f"{URL} was taken over by process"):
        first.renew()
    second.renew()
    second.release()
    monkeypatch.setattr(record, "TERM_S", 600.0)
    assert OwnedRecord(bucket).acquire().owner == second.record.owner


def test_owner_whose_answers_are_lost_still_owns_the_run(server, use_disk):
    bucket = Bucket(URL)
    owned = OwnedRecord(bucket)
    owned.acquire()
    for _ in range(3):
        server.lose_answers = 1
        owned.renew()
    found = read_record(bucket)
    assert found and found.record == owned.record
    bucket.delete(record.RECORD)
    with pytest.raises(Lost, match="was deleted"):
        owned.renew()


def test_former_owner_changes_nothing_of_the_new_owner(use_disk, short_lease, monkeypatch):
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", 600.0)  # this computer is asleep or offline
    first = start_run()

    def write_checkpoint(step):
        path = folder_of(URL) / "checkpoints" / f"{step:08}"
        path.mkdir(parents=True)
        (path / "arrays").write_bytes(b"arrays")
        (path / "manifest.json").write_text("{}")

    write_checkpoint(10)
    first._sync.upload()
    write_checkpoint(20)
    shutil.rmtree(folder_of(URL) / "checkpoints" / "00000010")
    use_disk("two")
    monkeypatch.setattr("tpuswarm.train.storage.record.is_process_alive", lambda computer, pid: None)
    second = Run(folder_of(URL))
    second.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    write_checkpoint(30)
    second.close()
    before = Bucket(URL).read(record.RECORD)
    with pytest.raises(Lost):
        first._sync.upload()
    first.close()
    assert Bucket(URL).read(record.RECORD) == before
    use_disk("three")
    folder = bring(URL, whole=True)
    assert read_steps(folder) == [1, 2, 3, 4] and (folder / "checkpoints/00000030/arrays").exists()


def test_run_is_renewed_while_an_upload_blocks(use_disk, frequent_renewals, monkeypatch):
    run, unblock = start_run(), threading.Event()
    put_file = Bucket.put_file

    def wait(self, name, path):
        unblock.wait(120)
        return put_file(self, name, path)

    monkeypatch.setattr(Bucket, "put_file", wait)
    (folder_of(URL) / "status.json").write_text("more")
    run.upload_soon()

    def renewals():
        return read_record(Bucket(URL)).record.owner.renewals

    first = renewals()
    until(lambda: renewals() >= first + 3)
    unblock.set()
    run.close()


def test_objects_that_no_record_names_are_swept_by_the_next_owner(use_disk, short_lease, monkeypatch):
    run = start_run()
    lost = run._sync._owned.new_object("metrics.jsonl")
    Bucket(URL).create(lost, b"uploaded, but never named")
    run.close()
    run = Run(folder_of(URL))
    until(lambda: not Bucket(URL).exists(lost))
    run.close()
    use_disk("two")
    assert read_steps(bring(URL)) == [1, 2, 3]


def test_damaged_record_is_named(use_disk):
    start_run().close()
    Bucket(URL).put(record.RECORD, b"{")
    with pytest.raises(BucketFailed, match=f"{URL}/run.json is damaged .* restore an earlier version of that object"):
        Run(folder_of(URL))


def test_record_of_many_files_stays_small(use_disk):
    owned = OwnedRecord(Bucket(URL))
    owned.acquire()
    names = [f"checkpoints/{step:08d}/arrays-{number}" for step in range(200) for number in range(10)]
    owned.change(lambda _: {name: File((Part(owned.new_object(name), 7),), 1.0) for name in names})
    assert Bucket(URL).listed("")[record.RECORD].size < 50 * len(names)
    assert read_record(Bucket(URL)).record == owned.record
    Bucket(URL).put(record.RECORD, Bucket(URL).read(record.RECORD)[:-9])
    with pytest.raises(BucketFailed, match=r"run.json is damaged"):
        read_record(Bucket(URL))


def test_removal_of_a_run_spares_the_next_one(server, use_disk, short_lease, monkeypatch):
    """A removal that is late deletes nothing of a process that has taken the run over, or begun a new one."""
    run = start_run()
    run._sync.upload()
    listed, removing = Bucket.listed, []

    def begin_anew(self, prefix):
        found = listed(self, prefix)
        if not removing:
            removing.append(True)
            other = OwnedRecord(Bucket(URL))
            other.acquire()
        return found

    monkeypatch.setattr(Bucket, "listed", begin_anew)
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", 600.0)
    before = listed(Bucket(URL), "").keys()
    with pytest.raises(Lost):
        run._sync._copy.clear(run._sync._owned)
    assert listed(Bucket(URL), "").keys() == before
    crash(run)


def write_as_earlier_versions_did(ended: bool):
    bucket = Bucket(URL)
    rows = [json.dumps({"step": step, "tokens": 2, "loss": 1.0}).encode() + b"\n" for step in (1, 2, 3)]
    import tomli_w

    objects = {"files/born": b"0123456789abcdef", "files/config.toml": tomli_w.dumps(CONFIG).encode()}
    at = 0
    for row in rows:
        objects[f"pieces/metrics.jsonl/{at:015d}-{at + len(row):015d}"] = row
        at += len(row)
    objects["pieces/metrics.jsonl/000000000000000-000000000000003"] = rows[0][:3]  # of a send that was repeated
    objects |= {f"checkpoints/00000003/{name}": name.encode() for name in ("arrays", "manifest.json")}
    objects["checkpoints/00000004/arrays"] = b"not sent to its end"
    lease = {"owner": "a", "host": "far", "pid": 7, "at": 1.0, "ended": ended, "computer": "another"}
    objects["lease/00000041.json"] = json.dumps(lease).encode()
    objects["files/"] = b""  # as the console makes folders
    for name, data in objects.items():
        bucket.put(name, data)


@pytest.mark.parametrize("ended", [True, False])
def test_run_of_an_earlier_version_is_read_and_goes_on(use_disk, short_lease, ended):
    write_as_earlier_versions_did(ended)
    folder = bring(URL, whole=True)
    assert read_steps(folder) == [1, 2, 3] and (folder / "checkpoints/00000003/arrays").read_bytes() == b"arrays"
    assert (sync.owner_elsewhere(folder) is None) == ended
    use_disk("two")
    run = Run(folder_of(URL))
    assert run.config() == CONFIG and not (run.folder / "checkpoints/00000004").exists()
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    run.close()
    use_disk("three")
    folder = bring(URL, whole=True)
    assert read_steps(folder) == [1, 2, 3, 4] and (folder / "checkpoints/00000003/arrays").exists()

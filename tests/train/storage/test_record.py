"""One process at a time owns a run in a bucket, and rows that only one disk has are kept."""

import json
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.train.storage.conftest import CONFIG, URL, crash, read_steps, start_run
from tests.waiting import until
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.run.directory import Run
from tpuswarm.train.storage import index, record, sync
from tpuswarm.train.storage.bucket import Bucket, BucketFailed
from tpuswarm.train.storage.copy import RunCopy, download_run, refreshed_folder
from tpuswarm.train.storage.folders import copy_folder
from tpuswarm.train.storage.record import File, Lost, OwnedRecord, Part, read_record
from tpuswarm.train.storage.sync import delete_file


def test_second_machine_is_refused_while_the_owner_renews(use_disk, frequent_renewals, monkeypatch):
    monkeypatch.setattr(record, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(record, "OWNER_TIMEOUT_S", 120)
    run = start_run()
    use_disk("two")
    with pytest.raises(InputError, match=f"{URL} is in use by process .* stop it first with `tpuswarm stop {URL}`"):
        Run(copy_folder(URL))
    with pytest.raises(InputError, match="is in use by process"):
        run._sync.upload()
        delete_file(URL, "config.toml")
    run.close()
    Run(copy_folder(URL)).close()


def test_refused_incomplete_run_is_released_at_once(use_disk, monkeypatch):
    monkeypatch.setattr(record, "OWNER_TIMEOUT_S", 600.0)
    start_run().close()
    delete_file(URL, "config.toml")
    use_disk("two")
    for _ in range(2):
        with pytest.raises(InputError, match=r"has metrics.jsonl but no config.toml"):
            Run(copy_folder(URL))


def test_stale_run_is_taken_over_and_a_released_one_at_once(use_disk, short_lease, monkeypatch):
    bucket = Bucket(URL)
    first, second = OwnedRecord(bucket), OwnedRecord(bucket)
    assert first.acquire().owner.id == ""
    assert second.acquire().owner == first.record.owner
    with pytest.raises(Lost, match=f"{URL} was taken over by process"):
        first.renew()
    second.renew()
    second.release()
    monkeypatch.setattr(record, "OWNER_TIMEOUT_S", 600.0)
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


def test_run_is_renewed_while_an_upload_blocks(use_disk, frequent_renewals, monkeypatch):
    run, unblock = start_run(), threading.Event()
    put_file = Bucket.put_file

    def wait(self, name, path):
        unblock.wait(120)
        return put_file(self, name, path)

    monkeypatch.setattr(Bucket, "put_file", wait)
    (copy_folder(URL) / "status.json").write_text("more")
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
    run = Run(copy_folder(URL))
    until(lambda: not Bucket(URL).exists(lost))
    run.close()
    use_disk("two")
    assert read_steps(download_run(URL)) == [1, 2, 3]


def test_record_of_many_files_stays_small(use_disk):
    owned = OwnedRecord(Bucket(URL))
    owned.acquire()
    names = [f"checkpoints/{step:08d}/arrays-{number}" for step in range(200) for number in range(10)]
    owned.change(lambda _: {name: File((Part(owned.new_object(name), 7),), 1.0) for name in names})
    assert Bucket(URL).listed("")[record.RECORD].size < 50 * len(names)
    assert read_record(Bucket(URL)).record == owned.record
    Bucket(URL).put(record.RECORD, Bucket(URL).read(record.RECORD)[:-9])
    with pytest.raises(BucketFailed, match=r"run.json is damaged .* restore an earlier version of that object"):
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
    objects["pieces/metrics.jsonl/000000000000000-000000000000003"] = rows[0][:3]  # a repeated upload
    objects |= {f"checkpoints/00000003/{name}": name.encode() for name in ("arrays", "manifest.json")}
    objects["checkpoints/00000004/arrays"] = b"not sent to its end"
    lease = {"owner": "a", "host": "far", "pid": 7, "at": 1.0, "ended": ended, "computer": "another"}
    objects["lease/00000041.json"] = json.dumps(lease).encode()
    objects["files/"] = b""  # the console creates such folders
    for name, data in objects.items():
        bucket.put(name, data)


@pytest.mark.parametrize("ended", [True, False])
def test_run_of_an_earlier_version_is_read_and_goes_on(use_disk, short_lease, ended):
    write_as_earlier_versions_did(ended)
    folder = download_run(URL, whole=True)
    assert read_steps(folder) == [1, 2, 3] and (folder / "checkpoints/00000003/arrays").read_bytes() == b"arrays"
    assert (sync.owner_elsewhere(folder) is None) == ended
    use_disk("two")
    run = Run(copy_folder(URL))
    assert run.config() == CONFIG and not (run.folder / "checkpoints/00000004").exists()
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.2})
    run.close()
    use_disk("three")
    folder = download_run(URL, whole=True)
    assert read_steps(folder) == [1, 2, 3, 4] and (folder / "checkpoints/00000003/arrays").exists()


def crashed_run() -> Run:
    """Return a run whose rows 4 to 7 are only on this disk."""
    run = start_run(3)
    (run.folder / "status.json").write_text("finished")
    run._sync.upload()
    for step in range(4, 8):
        run.write_metrics({"step": step, "tokens": 8, "loss": 0.1})
    crash(run)
    return run


def refused_start(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunCopy, "_download_acquired", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        Run(copy_folder(URL))


@pytest.mark.parametrize("between", ["nothing", "interrupted start here", "interrupted start elsewhere", "deletion"])
def test_rows_that_were_not_uploaded_are_kept(use_disk, short_lease, monkeypatch, between):
    crashed_run()
    if between == "interrupted start here":
        for _ in range(2):
            refused_start(monkeypatch)
    if between in ("interrupted start elsewhere", "deletion"):
        use_disk("two")
        monkeypatch.setattr("tpuswarm.train.storage.record.is_process_alive", lambda computer, pid: None)
        if between == "deletion":
            delete_file(URL, "status.json")
        else:
            refused_start(monkeypatch)
        use_disk("one")
    Run(copy_folder(URL)).close()
    use_disk("three")
    assert read_steps(download_run(URL)) == [*range(1, 8)]


def test_last_copy_of_a_deleted_run_is_never_removed(use_disk):
    start_run().close()
    for name in Bucket(URL).listed(""):
        Bucket(URL).delete(name)
    for _ in range(3):
        with pytest.raises(InputError, match=r"was deleted, and .* is its last copy"):
            Run(refreshed_folder(URL))
        with pytest.raises(InputError, match="there is no run at"):
            download_run(URL)
    assert read_steps(copy_folder(URL)) == [1, 2, 3]


def test_last_copy_of_an_earlier_version_is_never_removed(use_disk):
    start_run().close()
    folder = copy_folder(URL)
    (folder / index.INDEX).unlink()
    earlier = {"owner": "a", "files": {}, "pieces": {}, "saved": [], "born": "1"}
    (folder / index.EARLIER_INDEX).write_text(json.dumps(earlier))
    for name in Bucket(URL).listed(""):
        Bucket(URL).delete(name)
    with pytest.raises(InputError, match="is its last copy"):
        Run(refreshed_folder(URL))
    assert read_steps(folder) == [1, 2, 3]


def test_objects_that_a_deletion_left_are_no_part_of_the_next_run(use_disk, short_lease):
    run = start_run(3)
    run._sync.upload()
    crash(run)
    Bucket(URL).delete(record.RECORD)  # a deletion that was cut short
    use_disk("two")
    start_run(5).close()
    use_disk("three")
    assert read_steps(download_run(URL)) == [1, 2, 3, 4, 5]


def test_removed_copy_ends_the_run_and_removes_nothing_in_the_bucket(use_disk):
    run = start_run(3)
    run._sync.upload()
    shutil.rmtree(run.folder)
    with pytest.raises(RunFailed, match=r"the copy of .*, was deleted"):
        run._sync.upload()
    crash(run)
    use_disk("two")
    assert read_steps(download_run(URL)) == [1, 2, 3]


def test_former_owner_is_asked_nothing(use_disk, short_lease, monkeypatch):
    run = start_run()
    run._sync.upload()
    crash(run)
    use_disk("two")
    monkeypatch.setattr("tpuswarm.train.storage.record.is_process_alive", lambda computer, pid: None)
    folder = refreshed_folder(URL)
    assert sync.owner_elsewhere(folder)
    run = Run(folder)
    download_run(URL)
    assert sync.owner_elsewhere(folder) is None
    run.close()


def test_reader_whose_clock_is_fast_sees_the_owner(use_disk):
    run = start_run()
    run._sync.upload()
    use_disk("two")
    program = (
        "import time\nnow = time.time\ntime.time = lambda: now() + 600\n"
        "from tpuswarm.train.storage.copy import download_run\n"
        "from tpuswarm.train.storage.sync import owner_elsewhere\n"
        f"print(owner_elsewhere(download_run('{URL}')).pid)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown == f"{os.getpid()}\n"
    run.close()


def test_run_is_renewed_while_it_is_downloaded(use_disk, short_lease, frequent_renewals, monkeypatch):
    start_run(3).close()
    pull, downloading, unblock = RunCopy._pull, threading.Event(), threading.Event()

    def wait(self, *given):
        if threading.current_thread().name == "slow":
            downloading.set()
            unblock.wait(120)
        pull(self, *given)

    monkeypatch.setattr(RunCopy, "_pull", wait)
    folder, runs = copy_folder(URL), []
    slow = threading.Thread(target=lambda: runs.append(Run(folder)), name="slow")
    slow.start()
    assert downloading.wait(60)
    use_disk("two")
    try:
        with pytest.raises(InputError, match="is in use by process"):
            Run(copy_folder(URL))
    finally:
        unblock.set()
        slow.join()
    runs[0].close()


def test_outage_does_not_count_as_standing_still(use_disk, monkeypatch):
    """The owner could not renew meanwhile either."""
    first, now, looks = OwnedRecord(Bucket(URL)), [0.0], []
    first.acquire()

    def look(bucket, retry_for_s=None):
        looks.append(now[0])
        now[0] += 2 * record.OWNER_TIMEOUT_S if len(looks) == 3 else 0.0  # the third is answered after an outage
        if len(looks) == 5:
            first.renew()
        return read_record(bucket)

    monkeypatch.setattr(record, "read_record", look)
    monkeypatch.setattr(record, "boot_time", lambda: now[0])
    monkeypatch.setattr(record, "time", SimpleNamespace(sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)))
    with pytest.raises(InputError, match="is in use by process"):
        OwnedRecord(Bucket(URL)).acquire()


@pytest.mark.parametrize("fails", ["index", "file"])
def test_failed_last_upload_is_an_error(use_disk, monkeypatch, fails):
    run = start_run(3)
    run._sync.upload()
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    place = "copy.write_index" if fails == "index" else "copy.RunCopy._upload"
    error = OSError(28, "No space") if fails == "index" else PermissionError(13, "no")
    monkeypatch.setattr(f"tpuswarm.train.storage.{place}", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(RunFailed, match="start the same command again on this machine"):
        run.close()


def test_record_of_a_file_that_is_replaced_meanwhile_is_read_again(use_disk):
    start_run().close()
    bucket, answers = Bucket(URL), []

    def read(name):
        answers.append(name)
        return None if len(answers) == 2 else bucket.read_if_there(name)

    assert record.read_file(read, "config.toml") and read_record(bucket)


def test_rows_that_were_not_uploaded_go_where_another_has_built_on_the_run(use_disk, short_lease):
    crashed_run()
    use_disk("two")
    run = Run(copy_folder(URL))
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.5})
    run.close()
    use_disk("one")
    Run(copy_folder(URL)).close()
    assert read_steps(copy_folder(URL)) == [1, 2, 3, 4]

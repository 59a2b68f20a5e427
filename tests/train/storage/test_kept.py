"""What a disk has, and nobody has built on since, is not lost: whatever ends its process, whatever others do."""

import json
import shutil
import threading
from types import SimpleNamespace

import pytest

from tests.train.storage.conftest import URL, crash, read_steps, start_run
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.run.directory import Run
from tpuswarm.train.storage import index, record, sync
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.copy import RunCopy, bring, folder_for
from tpuswarm.train.storage.folders import folder_of
from tpuswarm.train.storage.record import OwnedRecord, read_record
from tpuswarm.train.storage.sync import delete_file


def crashed_run() -> Run:
    """A run of which rows 4 to 7 are on this disk alone."""
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
        Run(folder_of(URL))


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
    Run(folder_of(URL)).close()
    use_disk("three")
    assert read_steps(bring(URL)) == [*range(1, 8)]


def test_rows_that_were_not_uploaded_go_where_another_has_built_on_the_run(use_disk, short_lease):
    crashed_run()
    use_disk("two")
    run = Run(folder_of(URL))
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.5})
    run.close()
    use_disk("one")
    Run(folder_of(URL)).close()
    assert read_steps(folder_of(URL)) == [1, 2, 3, 4]


def test_last_copy_of_a_deleted_run_is_never_removed(use_disk):
    start_run().close()
    for name in Bucket(URL).listed(""):
        Bucket(URL).delete(name)
    for _ in range(3):
        with pytest.raises(InputError, match=r"was deleted, and .* is its last copy"):
            Run(folder_for(URL))
        with pytest.raises(InputError, match="there is no run at"):
            bring(URL)
    assert read_steps(folder_of(URL)) == [1, 2, 3]


def test_last_copy_of_an_earlier_version_is_never_removed(use_disk):
    start_run().close()
    folder = folder_of(URL)
    (folder / index.INDEX).unlink()
    earlier = {"owner": "a", "files": {}, "pieces": {}, "saved": [], "born": "1"}
    (folder / index.EARLIER_INDEX).write_text(json.dumps(earlier))
    for name in Bucket(URL).listed(""):
        Bucket(URL).delete(name)
    with pytest.raises(InputError, match="is its last copy"):
        Run(folder_for(URL))
    assert read_steps(folder) == [1, 2, 3]


def test_objects_that_a_deletion_left_are_no_part_of_the_next_run(use_disk, short_lease):
    run = start_run(3)
    run._sync.upload()
    crash(run)
    Bucket(URL).delete(record.RECORD)  # a deletion that was cut short
    use_disk("two")
    start_run(5).close()
    use_disk("three")
    assert read_steps(bring(URL)) == [1, 2, 3, 4, 5]


def test_removed_copy_ends_the_run_and_removes_nothing_in_the_bucket(use_disk):
    run = start_run(3)
    run._sync.upload()
    shutil.rmtree(run.folder)
    with pytest.raises(RunFailed, match=r"the copy of .*, was deleted"):
        run._sync.upload()
    crash(run)
    use_disk("two")
    assert read_steps(bring(URL)) == [1, 2, 3]


def test_former_owner_is_asked_nothing(use_disk, short_lease, monkeypatch):
    run = start_run()
    run._sync.upload()
    crash(run)
    use_disk("two")
    monkeypatch.setattr("tpuswarm.train.storage.record.is_process_alive", lambda computer, pid: None)
    folder = folder_for(URL)
    assert sync.owner_elsewhere(folder)
    run = Run(folder)
    bring(URL)
    assert sync.owner_elsewhere(folder) is None
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
    folder, runs = folder_of(URL), []
    slow = threading.Thread(target=lambda: runs.append(Run(folder)), name="slow")
    slow.start()
    assert downloading.wait(60)
    use_disk("two")
    try:
        with pytest.raises(InputError, match="is in use by process"):
            Run(folder_of(URL))
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
        now[0] += 2 * record.TERM_S if len(looks) == 3 else 0.0  # the third is answered after an outage
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

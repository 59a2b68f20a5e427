"""Lost answers, stalls, refusals and damaged downloads of a bucket lose no data and block no process."""

import os
import shutil
import threading
import time
from dataclasses import replace

import pytest
from google.auth.exceptions import RefreshError, TransportError
from pydantic import TypeAdapter

from tests.train.storage.conftest import URL, read_steps, start_run
from tests.waiting import until
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.run.directory import Run
from tpuswarm.train.run.life import read_life
from tpuswarm.train.storage import bucket as client
from tpuswarm.train.storage import connection, sync
from tpuswarm.train.storage.bucket import Bucket, BucketFailed, Unreachable
from tpuswarm.train.storage.connection import is_transient
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import copy_folder
from tpuswarm.train.storage.record import RECORD, Record, read_record

pytestmark = pytest.mark.slow
SMALL, LARGE = b"x" * 1000, os.urandom(9 * 2**17)
"""The larger one is sent by a resumable upload, in chunks."""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(client, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "MAX_PAUSE_S", 0.02)
    monkeypatch.setitem(client._ONCE, "timeout", (1.0, 0.5))
    monkeypatch.setattr(client, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr("google.cloud.storage.blob._MAX_MULTIPART_SIZE", 2**18)


@pytest.fixture
def stored(server, impatient, monkeypatch, tmp_path):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    found = Bucket(URL)
    found.put("there", SMALL)
    (tmp_path / "small").write_bytes(SMALL)
    (tmp_path / "large").write_bytes(LARGE)
    return found


def test_empty_file_is_stored_although_the_server_omits_its_size(server, stored, tmp_path):
    """Taken for lost, it would be uploaded again and again, and nothing of the run would be named."""
    server.omits_zeros = True
    (tmp_path / "empty").touch()
    assert stored.put_file("empty", tmp_path / "empty") == 0
    assert stored.listed("")["empty"].size == 0 and stored.read("empty") == b""
    blob = stored._blob("empty")
    blob.reload()
    assert blob.size is None, "the server omits it"


def test_server_that_always_keeps_something_else_ends_the_upload(stored, monkeypatch, tmp_path):
    """Each answer is a success, and would be taken for progress for ever."""
    monkeypatch.setattr(client, "RETRY_FOR_S", 1.0)
    monkeypatch.setattr(client, "_size", lambda blob: blob.size - 1)
    with pytest.raises(Unreachable, match=r"writing new failed: 999 of 1000 bytes were stored"):
        stored.put_file("new", tmp_path / "small")


def create(bucket, folder):
    bucket.create("new", SMALL)
    return bucket.read("new") == SMALL


def swap(bucket, folder):
    generation = bucket.read_versioned("there").generation
    new = bucket.swap("there", b"other", generation)
    return bucket.read("there") == b"other" and new in (None, bucket.read_versioned("there").generation)


def put_small(bucket, folder):
    return bucket.put_file("new", folder / "small") == 1000 and bucket.read("new") == SMALL


def put_large(bucket, folder):
    return bucket.put_file("new", folder / "large") == len(LARGE) and bucket.read("new") == LARGE


def read(bucket, folder):
    return bucket.read("there") == SMALL and bucket.read_if_there("absent") is None


def fetch(bucket, folder):
    bucket.fetch("there", folder / "fetched")
    return (folder / "fetched").read_bytes() == SMALL


def find(bucket, folder):
    return bucket.listed("")["there"].size == 1000 and bucket.exists("there") and not bucket.exists("absent")


def delete(bucket, folder):
    bucket.delete("there")
    return not bucket.exists("there")


REQUESTS = create, swap, put_small, put_large, read, fetch, find, delete
FAULTS = "408", "429", "500", "502", "503", "504", "reset", "lose the answer", "stall"


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.__name__)
def test_request_is_repeated_until_it_is_right(server, stored, tmp_path, request_):
    """The fault meets the first request or the second; of a large upload also a chunk, and the answer to the last."""
    for fault in FAULTS:
        for at in range(6 if request_ is put_large else 2):
            for name in ("new", "there"):
                stored.delete(name)
            stored.put("there", SMALL)
            server.faults = ["fine"] * at + [fault]
            assert request_(stored, tmp_path), f"{fault} of request {at}"
            server.faults = []


@pytest.mark.parametrize("fault", ["404", "410", "forget the chunk"])
def test_lost_upload_session_and_lost_chunk_are_sent_anew(server, stored, tmp_path, fault):
    for at in (1, 2, 5):
        server.faults = ["fine"] * at + [fault]
        assert put_large(stored, tmp_path), f"{fault} of request {at}"


def test_upload_of_chunks_is_begun_anew_after_a_long_outage(server, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "CHUNK_FOR_S", 0.2)
    server.faults = ["fine", "fine"] + ["503"] * 200
    assert put_large(stored, tmp_path)


@pytest.mark.parametrize("request_", [read, fetch], ids=lambda each: each.__name__)
def test_damaged_download_is_not_kept(server, stored, tmp_path, request_):
    server.faults = ["corrupt", "corrupt"]
    assert request_(stored, tmp_path)


@pytest.mark.parametrize(
    ("code", "call", "words"),
    [
        ("400", lambda bucket: bucket.listed(""), "listing it failed: as planned$"),
        ("403", lambda bucket: bucket.put("new", SMALL), "writing new failed: as planned$"),
        ("401", lambda bucket: bucket.read("there"), r"not signed in to Google Cloud \(Anon.*\); sign in with `gcloud"),
    ],
)
def test_refusal_is_told_at_once_in_one_sentence(server, stored, code, call, words):
    server.faults = [code] * 9
    with pytest.raises(BucketFailed, match=f"^{URL}: {words}"):
        call(stored)
    assert len(server.faults) >= 7


def test_sign_in_is_tried_again_unless_it_was_refused():
    lost = TransportError("the metadata server is restarting")
    assert is_transient(RefreshError(lost)) and not is_transient(RefreshError("revoked"))


def test_large_bodies_are_sent_in_blocks():
    """The timeout is per block, so a slow line can send a chunk of any size."""
    progress = connection.Progress()
    body = connection._Body(bytes(10), progress)
    assert len(body) == 10 and body.read(4) == bytes(4) and progress.count == 4
    progress.is_failing = True
    assert body.read() == bytes(6) and progress.count == 4


def test_bucket_that_never_answered_is_given_up_soon(server, impatient, monkeypatch):
    monkeypatch.setattr(client, "FIRST_RETRY_FOR_S", 0.2)
    server.faults = ["503"] * 999
    with pytest.raises(Unreachable, match="listing it failed"):
        Bucket(URL).listed("")
    with pytest.raises(InputError, match=f"{URL}: reading run.json failed"):
        download_run(URL)


def ends(call):
    """Return the error of a call, which has to end soon."""
    raised: list[BaseException | None] = []

    def work():
        try:
            call()
            raised.append(None)
        except RunFailed as error:
            raised.append(error)

    threading.Thread(target=work, daemon=True).start()
    until(lambda: raised)
    return raised[0]


@pytest.fixture(params=["silent", "503"])
def outage(request, server, monkeypatch):
    """Begin an outage, and end it."""
    monkeypatch.setattr(sync, "STALLED_S", 1.0)

    def begin(over=False):
        server.stalled = request.param == "silent" and not over
        server.faults = ["503"] * 10**6 if request.param == "503" and not over else []

    return begin


@pytest.mark.parametrize("when", ["while it trains", "as it ends"])
def test_run_ends_though_its_bucket_never_answers(server, use_disk, short_lease, impatient, outage, monkeypatch, when):
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", 0.05 if when == "while it trains" else 60.0)
    run = start_run()
    run._sync.upload()
    run.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    (run.folder / "status.json").write_text("sent whole")
    outage()
    if when == "while it trains":
        seen = len(server.requests)
        until(lambda: len(server.requests) > seen)
    words = str(ends(run.close))
    assert (
        "only on this disk, in " in words
        and "metrics.jsonl" in words
        and words.count("start the same command again") == 1
        and read_life(run.folder).message == words
    )
    until(lambda: all(thread.name != "bucket" for thread in threading.enumerate()))
    outage(over=True)
    Run(copy_folder(URL)).close()
    use_disk("two")
    assert read_steps(download_run(URL)) == [1, 2, 3, 4]


def test_run_of_which_nothing_came_ends_though_its_bucket_never_answers(use_disk, impatient, outage):
    run = Run(copy_folder(URL))
    outage()
    assert ends(run.abandon)
    outage(over=True)


def test_process_that_lost_its_run_does_not_wait_for_its_upload(server, use_disk, short_lease, impatient, monkeypatch):
    monkeypatch.setattr(sync, "STALLED_S", 1.0)
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", 0.1)
    run, blocked, unblock = start_run(), threading.Event(), threading.Event()

    def wait(self, name, path):
        blocked.set()
        unblock.wait(120)
        raise BucketFailed("too late")

    monkeypatch.setattr(Bucket, "put_file", wait)
    (run.folder / "status.json").write_text("large")
    run.upload_soon()
    assert blocked.wait(60)
    found = read_record(Bucket(URL)).record
    other = replace(found, epoch=found.epoch + 1, owner=replace(found.owner, id="other"))
    Bucket(URL).put(RECORD, TypeAdapter(Record).dump_json(other))
    until(lambda: run._sync._error)
    ends(run.close)
    unblock.set()


def test_many_slow_deletions_are_progress(server, use_disk, impatient, monkeypatch):
    """The clock moves on with each deletion only: a busy machine is no stalled bucket."""
    run, delete, one_by_one = start_run(), Bucket.delete, threading.Lock()
    now, times = [0.0], []

    def save(step):
        folder = run.checkpoints / f"{step:08d}"
        folder.mkdir(parents=True)
        for number in range(8):
            (folder / f"{number}").write_bytes(b"x")
        (folder / "manifest.json").write_text("{}")
        return folder

    def read_clock():
        times.append(now[0])
        return now[0]

    def delete_slowly(self, *args):
        with one_by_one:
            now[0] += sync.STALLED_S / 4
            looks = len(times)
            until(lambda: len(times) > looks)
            return delete(self, *args)

    first = save(1)
    run._sync.upload()
    shutil.rmtree(first)
    save(2)
    monkeypatch.setattr(sync, "boot_time", read_clock)
    monkeypatch.setattr(Bucket, "delete", delete_slowly)
    assert ends(run.close) is None and now[0] > sync.STALLED_S
    use_disk("two")
    found = read_record(Bucket(URL)).record
    assert found.owner.released and {name.split("/")[1] for name in found.files if "points/" in name} == {"00000002"}


def test_checkpoint_that_is_pruned_while_it_is_sent_ends_no_run(use_disk, monkeypatch):
    run = start_run()
    put_file = Bucket.put_file
    folder = run.checkpoints / "00000001"
    folder.mkdir(parents=True)
    (folder / "arrays").write_bytes(b"arrays")
    (folder / "manifest.json").write_text("{}")

    def prune(self, name, path):
        if path.parent == folder:
            for file in folder.iterdir():
                file.unlink()
        return put_file(self, name, path)

    monkeypatch.setattr(Bucket, "put_file", prune)
    run._sync.upload()
    run.close()
    use_disk("two")
    assert read_steps(download_run(URL, whole=True)) == [1, 2, 3]


def test_object_that_may_not_be_deleted_ends_no_run_and_is_told(server, use_disk, frequent_renewals, capsys):
    """A retention policy forbids it."""
    run = start_run()
    run._sync.upload()
    (run.folder / "status.json").write_text("one")
    run._sync.upload()
    (run.folder / "status.json").write_text("two")
    server.refuses_deletion = True
    run._sync.upload()
    requests = f"asked/{run._sync._owned.record.owner.id}/"
    Bucket(URL).put(f"{requests}{sync.TRACE_REQUEST}", b"{}")
    until(lambda: (run.folder / sync.TRACE_REQUEST).exists())
    (run.folder / sync.TRACE_REQUEST).unlink()
    seen = run._sync._owned.record.owner.renewals
    until(lambda: run._sync._owned.record.owner.renewals > seen + 3)
    assert not (run.folder / sync.TRACE_REQUEST).exists(), "a request is handled once"
    run.check()
    run.close()
    assert "status.json failed: as planned; the bucket keeps such objects, and bills" in capsys.readouterr().err
    use_disk("two")
    assert (download_run(URL) / "status.json").read_text() == "two"


def test_few_requests_are_made(server, use_disk, monkeypatch):
    """Ten minutes of a plain run by its intervals, at 600 times the speed."""
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", sync.RENEW_INTERVAL_S / 600)
    monkeypatch.setattr(sync, "UPLOAD_INTERVAL_S", sync.UPLOAD_INTERVAL_S / 600)
    run = start_run()
    until(lambda: run._sync._is_swept)
    before, end = len(server.requests), time.monotonic() + 1
    while time.monotonic() < end:
        run.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
        time.sleep(0.005)
    made = server.requests[before:]
    run.close()
    writes = [request for request in made if not request.startswith(("GET", "DELETE"))]
    lists = [request for request in made if request == "GET /storage/v1/b/bucket/o"]
    assert 6 * (len(writes) + len(lists)) <= 900, made

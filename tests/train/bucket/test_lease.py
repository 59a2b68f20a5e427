"""One process at a time owns a run in a bucket."""

import shutil
import threading

import pytest

from tests.train.bucket.conftest import URL, start_run
from tests.waiting import until
from tpuswarm.errors import InputError
from tpuswarm.train.bucket import lease
from tpuswarm.train.bucket.lease import Lost, RunLease
from tpuswarm.train.bucket.mirror import folder_of
from tpuswarm.train.bucket.stored import Bucket
from tpuswarm.train.run.directory import Run


def test_second_machine_is_refused_while_the_owner_renews(use_disk, frequent_renewals, monkeypatch):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 120)
    run = start_run()
    use_disk("two")
    with pytest.raises(InputError, match=f"{URL} is in use by process .* stop it first with `tpuswarm stop {URL}`"):
        Run(folder_of(URL))
    run.close()
    Run(folder_of(URL)).close()


def test_refused_incomplete_run_is_released_at_once(use_disk, monkeypatch):
    monkeypatch.setattr(lease, "TERM", 600.0)
    start_run().close()
    config = Bucket(URL).read("files/config.toml")
    Bucket(URL).delete("files/config.toml")
    use_disk("two")
    with pytest.raises(InputError, match=r"has metrics.jsonl but no config.toml"):
        Run(folder_of(URL))
    Bucket(URL).put("files/config.toml", config)
    use_disk("three")
    Run(folder_of(URL)).close()


def test_stale_lease_is_taken_over_and_a_released_one_at_once(use_disk, short_lease, monkeypatch):
    bucket = Bucket(URL)
    first, second = RunLease(bucket, URL), RunLease(bucket, URL)
    assert first.take() == ""
    assert second.take() == first.owner
    with pytest.raises(Lost, match=f"{URL} was taken over by process"):
        first.renew()
    second.renew()
    second.release()
    monkeypatch.setattr(lease, "TERM", 600.0)
    assert RunLease(bucket, URL).take() == second.owner


def test_owner_that_slept_past_the_kept_renewals_finds_it_lost_the_run(use_disk, short_lease, monkeypatch):
    monkeypatch.setattr(lease, "KEPT", 3)
    bucket = Bucket(URL)
    first, second = RunLease(bucket, URL), RunLease(bucket, URL)
    first.take()
    second.take()
    for _ in range(8):
        second.renew()
    first._renewed -= 1000.0
    with pytest.raises(Lost):
        first.renew()


def test_former_owner_changes_nothing_of_the_new_owner(use_disk, short_lease, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 600.0)  # this computer is asleep or offline
    first = start_run()

    def write_checkpoint(step):
        path = folder_of(URL) / "checkpoints" / f"{step:08}"
        path.mkdir(parents=True)
        (path / "arrays").write_bytes(b"arrays")
        (path / "manifest.json").write_text("{}")

    write_checkpoint(10)
    first._tended.send()
    write_checkpoint(20)
    shutil.rmtree(folder_of(URL) / "checkpoints" / "00000010")
    use_disk("two")
    monkeypatch.setattr("tpuswarm.train.bucket.lease.alive", lambda computer, pid: None)
    second = Run(folder_of(URL))
    second.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    write_checkpoint(30)
    second.close()
    before = Bucket(URL).listed("")
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.0)
    with pytest.raises(Lost):
        first._tended.send()
    first.close()
    assert Bucket(URL).listed("") == before and any(name.startswith("checkpoints/00000030/") for name in before)


def test_lease_is_renewed_while_an_upload_blocks(use_disk, frequent_renewals, monkeypatch):
    run, unblock = start_run(), threading.Event()
    put_file = Bucket.put_file

    def wait(self, name, path):
        unblock.wait(120)
        put_file(self, name, path)

    monkeypatch.setattr(Bucket, "put_file", wait)
    (folder_of(URL) / "status.json").write_text("more")
    run.send_soon()
    first, _, _ = lease.newest(Bucket(URL))
    until(lambda: lease.newest(Bucket(URL))[0] >= first + 3)
    unblock.set()
    run.close()

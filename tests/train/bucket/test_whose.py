"""Whose a run in a bucket is: one process has it at a time, and who has lost it hears of it."""

import shutil
import threading
import time

import pytest

from tests.train.bucket.far_run import URL, begin, save
from tpuswarm.errors import InputError
from tpuswarm.train.bucket import lease
from tpuswarm.train.bucket.lease import Lost, RunLease
from tpuswarm.train.bucket.mirror import folder_of
from tpuswarm.train.bucket.stored import Bucket
from tpuswarm.train.run.directory import Run


def test_two_machines_cannot_have_one_run(served, disk, monkeypatch):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    run = begin()
    renew = threading.Thread(target=lambda: (time.sleep(0.5), run._tended._lease.renew()))
    renew.start()
    disk("two")
    with pytest.raises(InputError, match=f"{URL} is in use by process .* stop it first with `tpuswarm stop {URL}`"):
        Run(folder_of(URL))
    renew.join()
    run.close()
    Run(folder_of(URL)).close()


def test_a_run_that_is_not_whole_is_let_go_of(served, disk, monkeypatch):
    """Whoever was told what it lacks, in a notebook that lives on, brings it back and starts again at once."""
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 600.0)
    begin().close()
    config = Bucket(URL).read("files/config.toml")
    Bucket(URL).delete("files/config.toml")
    disk("two")
    with pytest.raises(InputError, match=r"has metrics.jsonl but no config.toml"):
        Run(folder_of(URL))
    Bucket(URL).put("files/config.toml", config)
    disk("three")
    Run(folder_of(URL)).close()


def test_a_dead_machine_loses_it_and_hears_of_it(served, disk, monkeypatch):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 0.5)
    bucket = Bucket(URL)
    first, second = RunLease(bucket, URL), RunLease(bucket, URL)
    assert first.take() == ""
    assert second.take() == first.owner  # it stood still for TERM
    with pytest.raises(Lost, match=f"{URL} was taken over by process"):
        first.renew()
    second.renew()
    second.release()
    monkeypatch.setattr(lease, "TERM", 600.0)
    assert RunLease(bucket, URL).take() == second.owner  # who let it go is not waited for


def test_who_slept_for_long_does_not_begin_where_others_have_removed(served, disk, monkeypatch):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 0.2)
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


def test_who_has_lost_a_run_touches_nothing_of_who_has_it(served, disk, monkeypatch):
    """Not when it ends, nor in the middle of sending: what the other has saved meanwhile stays."""
    monkeypatch.setattr(lease, "TERM", 0.2)
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 600.0)  # this computer is asleep, or cut off
    first = begin()
    save(folder_of(URL), 10)
    first._tended._mirror.push(lambda: None)
    save(folder_of(URL), 20)
    shutil.rmtree(folder_of(URL) / "checkpoints" / "00000010")
    disk("two")
    monkeypatch.setattr("tpuswarm.train.bucket.lease.alive", lambda computer, pid: None)
    second = Run(folder_of(URL))
    second.write_metrics({"step": 4, "tokens": 8, "loss": 0.1})
    save(folder_of(URL), 30)
    second.close()
    before = Bucket(URL).listed("")
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.0)
    with pytest.raises(Lost):
        first._tended._mirror.push(first._tended._assure)
    first.close()
    assert Bucket(URL).listed("") == before and any(name.startswith("checkpoints/00000030/") for name in before)


def test_the_lease_is_kept_however_long_sending_takes(served, disk, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.05)
    run, slow = begin(), threading.Event()
    put_file = Bucket.put_file

    def wait(self, name, path):
        slow.wait(60)
        put_file(self, name, path)

    monkeypatch.setattr(Bucket, "put_file", wait)
    (folder_of(URL) / "status.json").write_text("more")
    run._tended.soon()
    first = run._tended._lease._number
    end = time.monotonic() + 60
    while run._tended._lease._number < first + 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert run._tended._lease._number >= first + 3
    slow.set()
    run.close()

"""Keep a run in a bucket up to date while this process owns it: renew, upload, and handle requests."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tpuswarm.errors import RunFailed
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.computer import boot_time
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.storage.bucket import RETRY_FOR_S, WAY_OUT, Bucket, BucketFailed, Unreachable
from tpuswarm.train.storage.copy import RunCopy
from tpuswarm.train.storage.folders import OWNER
from tpuswarm.train.storage.record import (
    OWNER_TIMEOUT_S,
    RENEW_INTERVAL_S,
    RENEWAL_TIMEOUT_S,
    Lost,
    OwnedRecord,
    Owner,
    read_file,
)

UPLOAD_INTERVAL_S = 20.0
STALLED_S = 12.0
"""A process that ends no longer waits for a bucket that has accepted nothing for this long."""
REQUESTS = "asked/"
STOP, TRACE_REQUEST = "stop", "profile-request.json"
"""Requests to the owner: to stop, and to record a trace (train/look/profile.py)."""


class RunSync:
    """Owns the run of a folder from `acquire` to `close`."""

    def __init__(self, folder: Path):
        self._copy = RunCopy(folder)
        self._owned = OwnedRecord(self._copy.bucket)
        self._end, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name="bucket", daemon=True)
            for work in (self._renew_and_listen, self._upload)
        ]
        self._error: RunFailed | None = None
        self._uploaded_at = 0.0
        self._is_swept = False
        self._handled: dict[str, int] = {}
        """The generation of the last request of each name."""

    def acquire(self) -> None:
        """Acquire the run and download it. Raises InputError while another process owns it, and RunFailed."""
        renew, upload = self._threads
        try:
            self._copy.acquire(self._owned, renew.start)
        except BaseException:
            self._copy.bucket.gave_up = True
            self._stop()
            raise
        self._uploaded_at = time.monotonic()
        upload.start()

    def check(self) -> None:
        """Raise RunFailed if this process lost the run, or the bucket refuses."""
        if self._error is not None:
            raise self._error

    def upload_soon(self) -> None:
        """Upload changed files soon, in the background."""
        self._wake.set()

    def upload(self) -> None:
        """Upload changed files now. Raises RunFailed."""
        self._copy.push(self._owned)

    def remove(self) -> None:
        """Delete the run from the bucket, once. Raises RunFailed."""
        if not self._end.is_set():
            self._end_with(lambda: self._copy.clear(self._owned))

    def close(self) -> None:
        """Upload the rest and release the run. Raises RunFailed, naming the files that are only on this disk."""
        if self._end.is_set():
            return
        if isinstance(self._error, Lost):
            self._copy.bucket.gave_up = True
            with suppress(Unreachable):  # the run is lost, whether its threads end or not
                self._end_with(lambda: None)
            return
        try:
            self._end_with(self._upload_and_release)
        except Lost:
            return
        except RunFailed as error:
            unsent = self._copy.unsent()
            only_here = f"; only on this disk, in {self._copy.folder}: {', '.join(unsent)}" if unsent else ""
            why = str(error).removesuffix(f"; {WAY_OUT}")
            raise RunFailed(f"{why}{only_here}; {WAY_OUT} on this machine") from error
        if self._copy.refused:
            why = self._copy.refused.removesuffix(f"; {WAY_OUT}")
            echo(f"{why}; the bucket keeps such objects, and bills them, until somebody deletes them", err=True)

    def _upload_and_release(self) -> None:
        self._copy.push(self._owned)
        self._owned.release()

    def _end_with(self, work: Callable[[], None]) -> None:
        """Stop the threads, then do the last work. Raise RunFailed if it fails or the bucket stops accepting bytes."""
        self._end.set()
        self._wake.set()
        failed: list[Exception] = []

        def finish() -> None:
            try:
                self._stop()
                work()
            except Exception as error:  # noqa: BLE001  # raised below
                failed.append(error)

        last = threading.Thread(target=finish, name="bucket", daemon=True)
        last.start()
        bucket, progress, since = self._copy.bucket, -1, boot_time()
        while last.is_alive() and boot_time() - since < STALLED_S:
            if bucket.progress != progress:
                progress, since = bucket.progress, boot_time()
            last.join(0.2)
        bucket.gave_up = True
        last.join(STALLED_S / 2)
        if last.is_alive():
            raise Unreachable(f"{self._copy.url} does not answer")
        if failed:
            error = failed[0]
            if isinstance(error, RunFailed):
                raise error
            raise RunFailed(f"{self._copy.url}: {type(error).__name__}: {error}") from error

    def _stop(self) -> None:
        self._end.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _repeat(self, work: Callable[[], None]) -> None:
        """Repeat work until the end. Uploads have their own thread: one may take longer than OWNER_TIMEOUT_S."""
        failing_since: float | None = None
        while not self._end.is_set() and self._error is None:
            try:
                work()
                failing_since = None
            except Unreachable as error:
                failing_since = boot_time() if failing_since is None else failing_since
                if boot_time() - failing_since > RETRY_FOR_S:
                    self._error = error
            except RunFailed as error:
                self._error = error
            except Exception as error:  # noqa: BLE001  # raised by the next check
                self._error = RunFailed(f"{self._copy.url}: {type(error).__name__}: {error}")

    def _renew_and_listen(self) -> None:
        if self._end.wait(max(0.0, RENEW_INTERVAL_S - self._owned.age_s)) or self._owned.age_s < RENEW_INTERVAL_S:
            return
        self._owned.renew()
        bucket, requests = self._copy.bucket, f"{REQUESTS}{self._owned.record.owner.id}/"
        for name in (STOP, TRACE_REQUEST):
            found = bucket.read_versioned(requests + name, RENEWAL_TIMEOUT_S)
            if found is None or found.generation == self._handled.get(name):
                continue
            self._handled[name] = found.generation
            if name == STOP:
                with suppress(OSError, ValueError):  # a full pipe does not keep the run from stopping
                    echo("`tpuswarm stop` on another computer stops this run", err=True)
                os.kill(os.getpid(), signal.SIGINT)
            else:
                with suppress(OSError, ValueError):  # a full disk or a damaged request does not end the run
                    write_atomically(self._copy.folder / TRACE_REQUEST, found.data.decode())
            with suppress(BucketFailed):  # a bucket may forbid deletions
                bucket.delete(requests + name)

    def _upload(self) -> None:
        if not self._is_swept:
            self._copy.sweep(self._owned)
            self._is_swept = True
        is_asked = self._wake.wait(max(0.0, UPLOAD_INTERVAL_S - (time.monotonic() - self._uploaded_at)))
        self._wake.clear()
        if not self._end.is_set() and (is_asked or time.monotonic() - self._uploaded_at >= UPLOAD_INTERVAL_S):
            self._copy.push(self._owned)
            self._uploaded_at = time.monotonic()


def owner_elsewhere(folder: Path) -> Owner | None:
    """Return the owner of a run on another disk, as of the last download; None if there is none."""
    path = folder / OWNER
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        age_s, owner = found.pop("age"), Owner(**found)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return None if owner.released or owner.is_gone or age_s > 3 * OWNER_TIMEOUT_S else owner


def send_request(folder: Path, name: str, text: str) -> Owner | None:
    """Leave a request, STOP or TRACE_REQUEST, for the owner of a run in its bucket; return the owner, or None."""
    owner = owner_elsewhere(folder)
    if owner:
        RunCopy(folder).bucket.put(f"{REQUESTS}{owner.id}/{name}", text.encode())
    return owner


def delete_file(url: str, path: str) -> None:
    """Delete a file of a run without an owner. Raises InputError while the run has one."""
    bucket = Bucket(url)
    if read_file(bucket.read_if_there, path) is None:
        return
    owned = OwnedRecord(bucket)
    owned.acquire()
    owned.change(lambda files: {name: files[name] for name in files if name != path}, released=True, copies_stay=True)

"""A run in a bucket while this process has it: its lease is renewed, what is new is sent, what is asked is heard."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tpuswarm.errors import RunFailed
from tpuswarm.train.bucket.asking import ASKED, REQUEST, STOP
from tpuswarm.train.bucket.lease import RENEWED, Lost, RunLease
from tpuswarm.train.bucket.mirror import Mirror
from tpuswarm.train.process.atomic import write_atomically

SENT = 10.0
"""Seconds between two times at which what is new is sent."""


class Tended:
    """From `take` to `close` the run is this process's."""

    def __init__(self, folder: Path):
        self._mirror = Mirror(folder)
        self._lease = RunLease(self._mirror.bucket, self._mirror.url)
        self._end, self._wake = threading.Event(), threading.Event()
        self._renewing, self._sending = threading.Lock(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name="bucket", daemon=True)
            for work in (self._keep, self._send)
        ]
        self._error: Exception | None = None
        self._sent = 0.0

    def take(self) -> None:
        """Have the run, with all of it on this disk. Raises InputError while somebody else has it, and RunFailed."""
        try:
            before = self._lease.take()
            if before != self._mirror.owner:
                self._mirror.forget()
            self._mirror.own(self._lease.owner)
            self._mirror.begin()
            self._mirror.pull(whole=True)
        except OSError as error:
            raise self._failed(error) from error
        self._sent = time.monotonic()
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise RunFailed where the run is not this process's any more, or cannot be kept."""
        if self._error is not None:
            raise self._error

    def soon(self) -> None:
        """What is new now does not wait."""
        self._wake.set()

    def send(self) -> None:
        """Send what is new, and return when it is there. Raises RunFailed."""
        try:
            self._push()
        except RunFailed:
            raise
        except Exception as error:  # the library of buckets raises many types
            raise self._failed(error) from error

    def clear(self) -> None:
        """Nothing came of the run: it is removed from the bucket."""
        self._stop()
        self._mirror.clear()

    def close(self) -> None:
        """Send the rest, and let the run go."""
        ended = self._end.is_set()
        self._stop()
        if ended or isinstance(self._error, Lost):
            return
        try:
            self._assure()  # it may be another's since: what that has written is not to be touched
            self._push()
            self._lease.release()
        except Lost:
            return
        except Exception as error:  # the library of buckets raises many types
            raise self._failed(error) from error

    def _stop(self) -> None:
        self._end.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _repeat(self, work: Callable[[], None]) -> None:
        """Renewing and sending each have a thread: a checkpoint takes longer to send than a lease lasts."""
        while not self._end.is_set() and self._error is None:
            try:
                work()
            except RunFailed as error:
                self._error = error
            except Exception as error:  # noqa: BLE001  # as above; whoever trains is told at its next look
                self._error = self._failed(error)

    def _keep(self) -> None:
        """Renew the lease, and hear what is asked: to stop, or what is found in the run's folder from now on."""
        if not self._end.wait(RENEWED):
            self._assure()
            bucket, asked = self._mirror.bucket, f"{ASKED}{self._lease.owner}/"
            for name in bucket.listed(asked):
                word, text = name.removeprefix(asked), bucket.read(name)
                bucket.delete(name)
                if word == STOP:
                    os.kill(os.getpid(), signal.SIGINT)
                elif word == REQUEST:
                    with suppress(OSError, ValueError):  # no room, or no text: the run does not end of it
                        write_atomically(self._mirror.folder / REQUEST, text.decode())

    def _send(self) -> None:
        """Send what is new, now and then, and when that is asked."""
        asked = self._wake.wait(max(0.0, SENT - (time.monotonic() - self._sent)))
        self._wake.clear()
        if not self._end.is_set() and (asked or time.monotonic() - self._sent >= SENT):
            self._push()
            self._sent = time.monotonic()

    def _push(self) -> None:
        with self._sending:
            self._mirror.push(self._assure)

    def _assure(self) -> None:
        """Raise Lost unless the run is this process's, surely: its lease was renewed a moment ago, or is now."""
        with self._renewing:
            if self._lease.age >= RENEWED:
                self._lease.renew()

    def _failed(self, error: Exception) -> RunFailed:
        if isinstance(error, FileNotFoundError):
            why = "there is no such bucket; create it, or use another one"
        else:
            why = f"{' '.join(str(error).split())[:300] or type(error).__name__}; start the same command again"
        return RunFailed(f"{self._mirror.url} could not be reached: {why}")

"""Who has a run in a bucket: a lease with an owner and a time, which a machine that is gone loses.

Each renewal is a new object of the next number, created only if it is not there: whoever makes it has the run. Nobody's
clock is compared with another's: a lease has ended when it stands still for TERM.
"""

import os
import secrets
import socket
import time
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.bucket.stored import Bucket
from tpuswarm.train.process.computer import alive, this_computer
from tpuswarm.train.process.waiting import waiting

FOLDER = "lease/"
RENEWED, TERM = 5.0, 20.0
"""Seconds between two renewals, and after which a lease that stands still has ended."""
LOOK = 1.0
KEPT = 40
"""Renewals that stay: who slept for longer than they tell of has to list them."""


@dataclass(frozen=True)
class Holder:
    """One renewal."""

    owner: str
    """Random, of one process."""
    host: str
    pid: int
    at: float
    """Unix seconds by its own clock: for people."""
    ended: bool = False
    """It has let the run go."""
    computer: str = ""
    """Where `pid` means something, as `this_computer` has it."""

    @property
    def gone(self) -> bool:
        """Whether it was a process of this computer that is no more."""
        return alive(self.computer, self.pid) is False


_HOLDER: TypeAdapter[Holder] = TypeAdapter(Holder)


class Lost(RunFailed):
    """Somebody else has the run now."""


def newest(bucket: Bucket) -> tuple[int, Holder, float] | None:
    """The number of the last renewal, who made it, and how many seconds ago, by the clocks of bucket and reader."""
    listed = bucket.listed(FOLDER)
    for name in sorted(listed, reverse=True):
        number = name.removeprefix(FOLDER).removesuffix(".json")
        try:
            return int(number), _HOLDER.validate_json(bucket.read(name)), time.time() - listed[name].written
        except (ValidationError, ValueError, FileNotFoundError):
            continue  # not one of ours; or its holder has removed it since
    return None


class RunLease:
    """Of one process on one run."""

    def __init__(self, bucket: Bucket, url: str):
        self._bucket, self._url = bucket, url
        self.owner = secrets.token_hex(8)
        """This process."""
        self._me = Holder(self.owner, socket.gethostname(), os.getpid(), 0.0, computer=this_computer())
        self._number, self._renewed = 0, 0.0

    @property
    def age(self) -> float:
        """Seconds since it was renewed last."""
        return time.monotonic() - self._renewed

    def take(self) -> str:
        """Have the run; who had it before. Raises InputError while somebody else has it."""
        found = newest(self._bucket)
        before = found[1] if found else None
        if found and before and not before.ended and not before.gone:
            self._watch(*found)
        self._number = (found[0] if found else 0) + 1
        self._create(self._me)
        return before.owner if before else ""

    def renew(self) -> None:
        """Keep it; raises Lost where another one has taken it."""
        if time.monotonic() - self._renewed > KEPT * RENEWED / 2:
            found = newest(self._bucket)
            if found and found[1].owner != self.owner:
                raise self._lost(found[1])
        self._number += 1
        self._create(self._me)
        self._bucket.delete(_name(self._number - KEPT)) if self._number > KEPT else None

    def release(self) -> None:
        """Let it go: the next one need not wait."""
        self._number += 1
        self._create(replace(self._me, ended=True))

    def _watch(self, number: int, holder: Holder, age: float) -> None:
        said = f"{holder.host} had this run {max(0.0, age):.0f} s ago; waiting up to {TERM:.0f} s to see if it lives"
        end = time.monotonic() + TERM
        with waiting(said, short=0.0):
            while time.monotonic() < end:
                time.sleep(LOOK)
                now = newest(self._bucket)
                if now and now[1].ended:
                    return
                if now and now[0] > number:
                    raise InputError(
                        f"{self._url} is in use by process {now[1].pid} on {now[1].host}; stop it first with "
                        f"`tpuswarm stop {self._url}`, or use another --run"
                    )

    def _create(self, holder: Holder) -> None:
        name, data = _name(self._number), _HOLDER.dump_json(replace(holder, at=time.time()))
        if not self._bucket.create(name, data):
            there = _HOLDER.validate_json(self._bucket.read(name))
            if there.owner != self.owner:  # else its answer was lost
                raise self._lost(there)
        self._renewed = time.monotonic()

    def _lost(self, to: Holder) -> Lost:
        return Lost(f"{self._url} was taken over by process {to.pid} on {to.host}, so this process ends")


def _name(number: int) -> str:
    return f"{FOLDER}{number:08d}.json"

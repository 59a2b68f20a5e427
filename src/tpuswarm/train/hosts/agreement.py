"""What the hosts of a run do alike: host 0 decides, at points that all of them come to; alone, this process decides.

A program over several hosts runs when all of them dispatch it, in one order. The steps follow from the settings; what
depends on a clock, a signal or a file is host 0's decision, which the others hear from it.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import TypeVar

import jax

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.hosts import control_channel
from tpuswarm.train.hosts.host_group import HostGroup
from tpuswarm.train.hosts.rendezvous import Hosts, initialize
from tpuswarm.train.process import platform
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.program.mesh import select_devices

SECRET_FILE = "secret"
"""The file in the run directory by which hosts know each other, there while they come together."""
FILE_VISIBLE_S = 3.0
"""Seconds that a file written by host 0 may take to be seen at another host."""

T = TypeVar("T")


class Agreement:
    """The hosts of a run, as one of them sees them; a context manager that ends them together."""

    def __init__(self, hosts: Hosts | None = None):
        """hosts: None for a run of one."""
        self._hosts, self._signals = hosts, StopSignals()
        self.asked: Signals | None = None
        """The signal by which the run was asked to stop, as `stopping` found it."""
        self._told: Signals | None = None

    def __enter__(self) -> "Agreement":
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        if self._hosts is None:
            return
        if kind is GeneratorExit:  # a loop left, which is no failure
            kind = error = None
        if isinstance(error, RunFailed) and not self.leads:
            self._hosts.wait()  # all may have failed alike: host 0 writes it down, and ends this one
        self._hosts.__exit__(kind, error, trace)

    @property
    def leads(self) -> bool:
        """Whether this host decides, and writes the run directory."""
        return self._hosts is None or self._hosts.index == 0

    def devices(self, which: str | int | list[int]) -> list[jax.Device]:
        """Those of all hosts; of one host those meant by `which`."""
        if self._hosts is None:
            return select_devices(which, platform.local_devices())
        if which != "all":
            raise InputError(
                f"devices={which} works on one host only; a run over several hosts uses all of their devices"
            )
        return list(jax.devices())

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raise InputError, naming the first difference, unless all hosts have the same facts (see Hosts.agree)."""
        if self._hosts is not None:
            self._hosts.agree(facts())

    def same(self, about: str, value: T) -> T:
        """Host 0's value, of JSON's types, at every host; all have to ask about the same things in the same order."""
        if self._hosts is None:
            return value
        if self.leads:
            self._hosts.send({"about": about, "value": value})
            return value
        message = self._hosts.receive()
        there = message[0]["about"] if message else "done"
        if message is None or there != about:
            raise RunFailed(
                f"host 0 is {there}, this host is {about}: all hosts must run the same program and leave its loop "
                "at the same step"
            )
        return message[0]["value"]

    def stopping(self) -> bool:
        """Whether the run is to stop, which any host may have been asked to; all of them have to ask this."""
        if self._hosts is None:
            self.asked = self._signals.asked
        elif self.asked is None:
            self._pass_on()
            number = self.same("stopping", self._signals.asked and int(self._signals.asked))
            self.asked = Signals(number) if number else None
        return self.asked is not None

    def tell(self, slow: Callable[[], None], unheard: Callable[[], None]) -> None:
        """Have a thread call these where Ctrl-C does not end the run soon (see StopSignals)."""
        self._signals.slow, self._signals.unheard = slow, unheard

    def wait(self) -> None:
        """Wait a moment after a failure: if another host was lost, its loss ends this process with the true reason."""
        if self._hosts is not None:
            self._hosts.wait()

    def since(self) -> float:
        """Seconds since it was asked; only host 0 knows."""
        return self._signals.since()

    def leaves_feed(self) -> bool:
        """Whether to stop waiting for data; several hosts stop at the same step, so that they wait for it."""
        return self._hosts is None and self.stopping()

    def _pass_on(self) -> None:
        assert self._hosts is not None
        if self.leads:
            for about, _ in self._hosts.pending():
                self._signals.ask(Signals(about["asked"]))
        elif self._signals.asked != self._told:
            self._told = self._signals.asked
            self._hosts.send({"asked": self._told})


def join_hosts(asked: HostGroup, folder: Path, lost: Callable[[str], None]) -> Agreement:
    """Join the hosts of a run; before anything else uses JAX.

    folder: the run directory, which host 0 holds and every host has to see; lost: told the sentence with which host 0
    ends where another one is gone. Raises InputError as hosts.initialize does, and for a directory that is not shared.
    """
    place = folder / SECRET_FILE
    if asked.index:
        echo(
            f"this is host {asked.index} of {asked.count}; connecting to {asked.at}; host 0 shows the progress",
            err=True,
        )
        return Agreement(initialize(asked.at, asked.count, asked.index, lambda: _read(place, asked)))
    echo(f"this is host 0 of {asked.count}; waiting for the others at {asked.at}", err=True)
    secret = secrets.token_hex(32).encode()
    control_channel.witnesses.append(
        lambda why: place.unlink(missing_ok=True)
    )  # where the process ends within `initialize`
    control_channel.witnesses.append(lost)
    try:
        place.unlink(missing_ok=True)  # a killed process may have left it
        place.touch(mode=0o600)
        place.write_bytes(secret)
        hosts = initialize(asked.at, asked.count, 0, secret)
    finally:
        place.unlink(missing_ok=True)
    return Agreement(hosts)


def _read(place: Path, asked: HostGroup) -> bytes:
    end = time.monotonic() + FILE_VISIBLE_S
    while True:
        try:
            if secret := place.read_bytes():
                return secret
        except OSError:
            pass  # not there yet, or never
        if time.monotonic() > end:
            raise InputError(
                f"host 0 answers at {asked.at}, but host {asked.index} cannot see its run directory "
                f"{place.parent.absolute()}: use the same --run on all hosts, on a shared disk"
            )
        time.sleep(0.1)

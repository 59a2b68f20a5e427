"""Make all hosts of a run take the same decisions; host 0 decides whatever depends on a clock, a signal or a file.

All hosts must dispatch the same programs in the same order. A run of one host decides alone. The checkpoint to resume
from is chosen in train/loop/session.py.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.program.mesh import select_devices
from tpuswarm.train.storage.bucket import Bucket, BucketFailed
from tpuswarm.train.storage.folders import origin

SECRET_FILE = "secret"
"""File in the run directory or its bucket with which hosts authenticate; removed once all are connected."""
FILE_VISIBLE_S = 3.0
"""Time until another host sees a file of host 0 on a shared disk."""

T = TypeVar("T")


class Agreement:
    """One host's access to the decisions that all hosts share; a context manager that ends the hosts together."""

    def __init__(self, hosts: Hosts | None = None):
        """hosts: None for a run of one host."""
        self._hosts, self._signals = hosts or Hosts(0, 1, {}), StopSignals()
        self.stop_signal: Signals | None = None
        """The signal that stops the run; `should_stop` sets it."""
        self._forwarded: Signals | None = None

    def __enter__(self) -> "Agreement":
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        if kind is GeneratorExit:  # the user left the loop: no failure
            kind = error = None
        if isinstance(error, RunFailed) and not self.is_leader:
            self._hosts.wait()  # host 0 may fail alike: it records the error and ends this host
        self._hosts.__exit__(kind, error, trace)

    @property
    def is_leader(self) -> bool:
        """Whether this host decides and writes the run directory."""
        return self._hosts.index == 0

    @property
    def leader_process(self) -> int:
        """JAX's index of the leader's process."""
        return self._hosts.processes[0]

    def devices(self, selection: str | int | list[int]) -> list[jax.Device]:
        """Return the devices of all hosts, those of host 0 first; of a lone host, those selected."""
        if self._hosts.count == 1:
            devices = select_devices(selection, platform.local_devices())
            platform.require_free_memory(devices)
            return devices
        if selection != "all":
            raise InputError(
                f"devices={selection} works on one host only; a run over several hosts uses all of their devices"
            )
        return sorted(jax.devices(), key=lambda device: self._hosts.processes.index(device.process_index))

    def require_equal(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raise InputError, naming the first difference, unless all hosts have the same facts."""
        if self._hosts.count > 1:
            self._hosts.require_equal(facts())

    def broadcast(self, activity: str, value: T) -> T:
        """Return host 0's value (JSON) at every host; all hosts make the same calls in the same order."""
        if self.is_leader:
            self._hosts.send({"about": activity, "value": value})
            return value
        message = self._hosts.receive()
        activity_at_0 = message[0]["about"] if message else "done"
        if message is None or activity_at_0 != activity:
            raise RunFailed(
                f"host 0 is {activity_at_0}, this host is {activity}: all hosts must run the same program and leave "
                "its loop at the same step"
            )
        return message[0]["value"]

    def should_stop(self) -> bool:
        """Return whether a signal has reached any host; all hosts must call this at the same point."""
        if self._hosts.count == 1:
            self.stop_signal = self._signals.requested
        elif self.stop_signal is None:
            self._share_signals()
            number = self.broadcast("stopping", self._signals.requested and int(self._signals.requested))
            self.stop_signal = Signals(number) if number else None
        return self.stop_signal is not None

    def is_terminating(self) -> bool:
        """Return whether this process may be killed soon: after SIGTERM or SIGHUP."""
        return self._signals.requested not in (None, Signals.SIGINT)

    def set_stop_callbacks(self, on_slow: Callable[[], None], on_forced: Callable[[], None]) -> None:
        """Set the functions that a thread calls if Ctrl-C does not end the run soon (see StopSignals)."""
        self._signals.on_slow_stop, self._signals.on_forced_exit = on_slow, on_forced

    def wait_for_loss(self) -> None:
        """Wait a moment after a failure: if another host is lost, its loss ends this process with the true reason."""
        self._hosts.wait()

    def seconds_since_signal(self) -> float:
        """Return the seconds since the stop signal; only host 0 knows them."""
        return self._signals.seconds_since_request()

    def should_leave_feed(self) -> bool:
        """Return whether to stop waiting for data; several hosts wait, to stop at the same step."""
        return self._hosts.count == 1 and self.should_stop()

    def _share_signals(self) -> None:
        if self.is_leader:
            for header, _ in self._hosts.pending():
                self._signals.request(Signals(header["asked"]))
        elif self._signals.requested != self._forwarded:
            self._forwarded = self._signals.requested
            self._hosts.send({"asked": self._forwarded})


def join_hosts(group: HostGroup, folder: Path, on_lost: Callable[[str], None]) -> Agreement:
    """Connect the hosts of a run, before anything else uses JAX.

    folder: the run directory, which host 0 has locked, and of which every other host sees the same or a copy of the
    bucket's; on_lost: gets the sentence with which host 0 ends if it loses another host. Raise InputError like
    `initialize`, and for a directory that is neither shared nor in a bucket.
    """
    place = _SecretPlace(folder)
    if group.index:
        echo(
            f"this is host {group.index} of {group.count}; connecting to {group.address}; host 0 shows the progress",
            err=True,
        )
        return Agreement(initialize(group.address, group.count, group.index, lambda: _read_secret(place, group)))
    echo(f"this is host 0 of {group.count}; waiting for the others at {group.address}", err=True)
    secret = secrets.token_hex(32).encode()
    # Losing a host ends the process inside `initialize`, without the `finally` below.
    control_channel.exit_callbacks.append(lambda sentence: place.remove())
    control_channel.exit_callbacks.append(on_lost)
    try:
        place.write(secret)
        return Agreement(initialize(group.address, group.count, 0, secret))
    finally:
        place.remove()


class _SecretPlace:
    """Where host 0 leaves the secret: the run directory, or the run's bucket."""

    def __init__(self, folder: Path):
        url = origin(folder)
        self._bucket = Bucket(url) if url else None
        self._path = folder / SECRET_FILE
        self._is_written = False
        self.name = url or str(folder.absolute())

    def write(self, secret: bytes) -> None:
        """Replace one that a killed process left."""
        self._is_written = True
        if self._bucket:
            self._bucket.put(SECRET_FILE, secret)
            return
        write_atomically(self._path, secret, 0o600)

    def read(self) -> bytes:
        """Return the secret; empty if it is not there (yet)."""
        try:
            return self._bucket.read(SECRET_FILE) if self._bucket else self._path.read_bytes()
        except OSError:
            return b""

    def remove(self) -> None:
        if not self._is_written:
            return
        self._is_written = False
        if self._bucket:
            with suppress(BucketFailed):
                self._bucket.delete(SECRET_FILE)
            return
        self._path.unlink(missing_ok=True)


def _read_secret(place: _SecretPlace, group: HostGroup) -> bytes:
    deadline = time.monotonic() + FILE_VISIBLE_S
    while not (secret := place.read()):
        if time.monotonic() > deadline:
            raise InputError(
                f"host 0 answers at {group.address}, but host {group.index} cannot see its run directory "
                f"{place.name}: use the same --run on all hosts, in a bucket or on a shared disk, such as NFS"
            )
        time.sleep(0.1)
    return secret

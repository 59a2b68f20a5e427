"""Join several hosts to one program: JAX's multi-controller model, in which every host dispatches every program.

Each other host keeps a control channel to host 0. Over it they compare versions and settings, and notice deaths. Then
JAX connects, and a mesh over `jax.devices()` spans all hosts.
"""

import atexit
import hashlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train.hosts.control_channel import (
    HEARTBEAT_INTERVAL_S,
    ControlChannel,
    ExitStatus,
    Message,
    WrongSecret,
    authenticate,
    delay_terminate,
    end_process,
    relay,
)
from tpuswarm.train.hosts.host_group import parse_host_0
from tpuswarm.train.process import platform

JOIN_TIMEOUT_S = 120.0
JAX_HEARTBEAT_TIMEOUT_S = 25
"""Timeout of JAX's runtime for a host; control channels are quicker and report a sentence."""
SHUTDOWN_TIMEOUT_S = 10
"""How long a host that ends waits for the others to end."""
POLL_INTERVAL_S = 2.0

Secret = bytes | Callable[[], bytes]
"""The secret of all hosts, or a function that reads it once host 0 listens."""


class HostsAbsent(InputError):
    """Some hosts did not come in time, or host 0 stopped waiting for them."""


class SecretRefused(InputError):
    """Host 0 has a different secret."""


class Hosts:
    """The hosts of one program, as one host sees them; a context manager that ends them together.

    An exception ends the other hosts with its sentence.
    """

    def __init__(self, index: int, count: int, channels: Mapping[int, ControlChannel]):
        """channels: by the peer's index; host 0 has one to each other host, which has one to host 0."""
        self.index, self.count = index, count
        self.processes = list(range(count))
        """JAX's process index of each host: on a TPU slice JAX numbers the processes by itself."""
        self._channels = dict(sorted(channels.items()))
        self._has_runtime = False
        self._exit_status = 1

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_status = getattr(error, "exit_code", ExitStatus.LOST)
        if isinstance(error, Exception) and not isinstance(error, TpuswarmError):
            # Another host's death may have caused it: let a channel report that first.
            deadline = time.monotonic() + HEARTBEAT_INTERVAL_S
            for channel in self._channels.values():
                channel.wait(max(0, deadline - time.monotonic()))
        self.close(None if error is None else str(error) or type(error).__name__, self._exit_status)

    def send(self, header: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
        """Send a message to host 0; from host 0, to all others."""
        for channel in self._channels.values():
            channel.send(header, data)

    def receive(self) -> Message | None:
        """Wait for the next message of host 0; None after its farewell. Not for host 0."""
        return self._channels[0].receive()

    def receive_from_all(self) -> list[Message]:
        """At host 0, wait for the next message of each other host."""
        return [message for channel in self._channels.values() if (message := channel.receive())]

    def pending(self) -> list[Message]:
        """Return the messages that have arrived already."""
        return [message for channel in self._channels.values() for message in channel.pending()]

    def wait(self) -> None:
        """Wait for the other hosts to end, each at most SHUTDOWN_TIMEOUT_S."""
        for channel in self._channels.values():
            channel.wait(SHUTDOWN_TIMEOUT_S)

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Raise InputError on all hosts, and disconnect them, unless all give the same facts; all must call it.

        facts: named so that "host 1 and host 0 disagree on NAME" reads well.
        """
        if self.index:
            self.send({"facts": dict(facts)})
            answer = self.receive()
            refusal = answer[0]["refused"] if answer else "host 0 ended before the program began"
        else:
            messages = {index: channel.receive() for index, channel in self._channels.items()}
            differences = [
                _difference(facts, message[0]["facts"] if message else {}, index) for index, message in messages.items()
            ]
            refusal = next(filter(None, differences), None)
            self.send({"refused": refusal})
        if refusal:
            self.close()
            raise InputError(refusal)

    def start_runtime(self, name: str) -> None:
        """Make JAX see the devices of all hosts. name: host name of host 0."""
        with ExitStack() as until_connected:
            if self.index:
                message = self.receive()
                if message is None:
                    raise InputError("host 0 ended before the program began; start all hosts again")
                address = f"127.0.0.1:{relay(name, message[0]['port'])}"
            else:
                port = until_connected.enter_context(_reserve_port(name)).getsockname()[1]
                address = f"{name}:{port}"
                self.send({"port": port})
            self._connect_runtime(address)
        self._has_runtime = True
        delay_terminate()
        atexit.register(self._exit)

    def exchange_process_indices(self) -> None:
        """Set `processes`; all hosts must call it."""
        process = jax.process_index()  # on all hosts at once: JAX's backend starts
        if self.index:
            self.send({"process": process})
            answer = self.receive()
            if answer is None:
                raise InputError("host 0 ended before the program began; start all hosts again")
            self.processes = answer[0]["processes"]
        else:
            others = [message[0]["process"] for message in self.receive_from_all()]
            self.processes = [process, *others]
            self.send({"processes": self.processes})

    def _connect_runtime(self, address: str) -> None:
        jax.config.update("jax_enable_preemption_service", False)  # it would take over SIGTERM
        try:
            jax.distributed.initialize(
                address,
                self.count,
                self.index,
                cluster_detection_method="deactivate",
                initialization_timeout=int(JOIN_TIMEOUT_S),
                heartbeat_timeout_seconds=JAX_HEARTBEAT_TIMEOUT_S,
                shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
                coordinator_bind_address=address,
            )
        except RuntimeError as error:
            if "before any JAX calls" in str(error):
                raise InputError(
                    f"JAX has started at host {self.index} before the hosts came together; let nothing use JAX "
                    "before that, and start a new process for another run"
                ) from error
            raise

    def close(self, reason: str | None = None, status: int = ExitStatus.LOST) -> None:
        """End the program once all hosts close it; a reason, a sentence, ends the others at once with the status."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.farewell(reason, status)
        if reason is None:
            for channel in channels.values():
                channel.wait()
            if self._has_runtime:
                self._has_runtime = False
                _wait_for_devices()
                jax.distributed.shutdown()

    def _exit(self) -> None:
        """Exit a process that does not end with the others: JAX would wait for them, then print a stack trace."""
        if self._has_runtime:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_status)


def initialize(
    address: str,
    count: int,
    index: int,
    secret: Secret,
    timeout_s: float = JOIN_TIMEOUT_S,
    should_wait: Callable[[], bool] = lambda: True,
) -> Hosts:
    """Join `count` hosts to one program as host `index`, before anything else uses JAX.

    address: HOST:PORT where host 0 listens; secret: the same on all hosts; should_wait: host 0 ends all hosts when it
    returns False. Raise InputError if hosts do not come in time or differ in secret, version or number of devices.
    Afterwards a dead or silent host ends the others within 30 seconds, each with one sentence on stderr.
    """
    name, port = parse_host_0(address, count, index)
    platform.configure_jax()
    if count == 1:
        return Hosts(0, 1, {})
    deadline = time.monotonic() + timeout_s
    if index:
        channels = _connect(name, port, index, secret, deadline)
    else:
        channels = _accept_all(name, port, count, secret, deadline, should_wait)
    hosts = Hosts(index, count, channels)
    try:
        versions = {package: version(package) for package in ("jax", "jaxlib", "numpy")}
        hosts.require_equal({"number of hosts": str(count), **versions, "tpuswarm": _source_digest()})
        hosts.start_runtime(name)
        hosts.exchange_process_indices()
        hosts.require_equal({"number of devices": str(jax.local_device_count())})
    except BaseException:
        hosts.__exit__(*sys.exc_info())
        raise
    return hosts


def listen(name: str, port: int) -> socket.socket:
    try:
        return socket.create_server((name, port))
    except OSError as error:
        raise InputError(f"host 0 cannot listen on {name}:{port}: {error.strerror or error}; use another") from error


def _accept_all(
    name: str, port: int, count: int, secret: Secret, deadline: float, should_wait: Callable[[], bool]
) -> dict[int, ControlChannel]:
    """At host 0, connect all others; a host that leaves before all have come may come again."""
    timeout_s = deadline - time.monotonic()
    channels: dict[int, ControlChannel] = {}
    lock = threading.Lock()
    is_complete = False
    strangers = 0
    ask_at = 0.0

    def on_lost(index: int, reason: str, status: int) -> None:
        with lock:
            if not is_complete:
                channels.pop(index, None)
                return
        _end_all(index, channels, reason, status)

    with listen(name, port) as listener:
        listener.settimeout(min(POLL_INTERVAL_S, max(0.1, timeout_s)))
        while True:
            with lock:
                is_complete = len(channels) == count - 1
            if is_complete:
                return channels
            if time.monotonic() >= ask_at:
                if not should_wait():
                    Hosts(0, count, channels).close("it stopped waiting", ExitStatus.LEFT)
                    raise HostsAbsent("host 0 stopped waiting for the others")
                # A slow answer outlasts waiting connections: accept the newest before the next question.
                ask_at = time.monotonic() + POLL_INTERVAL_S
            if time.monotonic() > deadline:
                missing = [str(index) for index in range(1, count) if index not in channels]
                place = "which host 0 left in the run's directory: put it in a bucket or on a shared disk, such as NFS"
                more = f" ({strangers} connected without the secret, {place})" if strangers else ""
                refusal = (
                    f"host{'s' * (len(missing) > 1)} {', '.join(missing)} did not connect to {name}:{port} within "
                    f"{timeout_s:.0f} s{more}; start all {count} with the same address and secret"
                )
                Hosts(0, count, channels).close(refusal, HostsAbsent.exit_code)
                raise HostsAbsent(refusal)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            try:
                index = authenticate(connection, _secret_bytes(secret), 0)
            except (OSError, WrongSecret):
                strangers += 1
                connection.close()
                continue
            with lock:  # else on_lost could come before the channel is stored
                if index in channels or index >= count:
                    channel = ControlChannel(connection, lambda reason, status: None)
                    channel.farewell(
                        f"it expects hosts 1 to {count - 1}, each once, not another host {index}", ExitStatus.REFUSED
                    )
                else:
                    channels[index] = ControlChannel(connection, partial(on_lost, index))


def _connect(name: str, port: int, index: int, secret: Secret, deadline: float) -> dict[int, ControlChannel]:
    """At any other host, connect to host 0."""
    timeout_s = deadline - time.monotonic()
    while True:
        try:
            connection = socket.create_connection((name, port), max(0.1, deadline - time.monotonic()))
            if connection.getsockname() == connection.getpeername():
                # Before host 0 listens, the kernel may give a connection on its machine this very port as its own.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # free it at once
                connection.close()
                raise ConnectionRefusedError("Connection refused")
            authenticate(connection, _secret_bytes(secret), index)
            return {0: ControlChannel(connection, partial(_end_all, 0, {}))}
        except WrongSecret:
            raise SecretRefused(f"host 0 at {name}:{port} has a different secret; all hosts need the same") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostsAbsent(
                    f"host 0 did not answer at {name}:{port} within {timeout_s:.0f} s ({error.strerror or error}); "
                    "start it, or correct its address"
                ) from error
            time.sleep(0.1)


def _reserve_port(name: str) -> socket.socket:
    """Return a socket that keeps a free port from other programs until JAX's coordinator listens on it.

    The coordinator shares its port (SO_REUSEPORT, gRPC's default); a socket that does not listen gets no connections.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((name, 0))
    return reserved


def _secret_bytes(secret: Secret) -> bytes:
    return secret if isinstance(secret, bytes) else secret()


def _wait_for_devices() -> None:
    """Wait until this host's devices run nothing that needs another host; all hosts must call it.

    JAX awaits its own exchanges between hosts (`multihost_utils.process_allgather`) on the first device only. A host
    that ends before its other devices finish leaves the other host waiting for ever. Collectives run in the order of
    their dispatch, so this last one ends after all others.
    """
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("all")), lambda index: np.ones(1, np.float32)
    )
    jax.block_until_ready(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones))


def _end_all(lost: int, channels: Mapping[int, ControlChannel], reason: str, status: int) -> NoReturn:
    sentence = f"host {lost} is gone ({reason})"
    for other in channels.keys() - {lost}:
        channels[other].farewell(sentence)
    way_out = "" if status == ExitStatus.WRONG_INPUT else "; start all hosts again"
    end_process(f"{sentence}, so this host stops too{way_out}", status)


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str], index: int) -> str | None:
    for name, value in ours.items():
        other = theirs.get(name, "nothing")
        if other != value:
            return f"host {index} and host 0 disagree on {name} ({other[:16]} vs {value[:16]}); all hosts need the same"
    return None


def _source_digest() -> str:
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()

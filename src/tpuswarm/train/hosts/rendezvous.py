"""One program over the devices of several hosts: JAX's multi-controller model, in which every host runs every program.

Host 0 leads. Every other host keeps a control channel to it (control_channel.py): over it they compare what they run,
and learn of each other's deaths. JAX's own connections follow. A mesh over `jax.devices()` then spans all hosts, and
every process must dispatch the same programs in the same order.
"""

import atexit
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
    LEFT,
    LOST,
    TAKEN,
    ControlChannel,
    Message,
    WrongSecret,
    authenticate,
    end_process,
    hold_terminate,
    relay,
)
from tpuswarm.train.hosts.host_group import host_0
from tpuswarm.train.process import platform

PATIENCE = 120.0
"""Seconds for all hosts of a program to come."""
RUNTIME_SILENCE = 25
"""Seconds after which JAX's runtime takes a host for dead; the lines are quicker, and say it in a sentence."""
FAREWELL = 10
"""Seconds that a host which ends waits for the others to end."""
LOOK = 2.0
"""Seconds between two looks at whether others are still awaited."""


Secret = bytes | Callable[[], bytes]
"""What all hosts know, or a function that reads it once host 0 listens."""


class Absent(InputError):
    """Hosts that did not come in time, or are awaited no longer."""


class Hosts:
    """The hosts of one program, as one of them sees them; a context manager that ends them together.

    Left by an exception, it ends the other hosts with the exception's sentence.
    """

    def __init__(self, index: int, count: int, lines: Mapping[int, ControlChannel]):
        """lines: by the index of the other host; host 0 has one to each, each other host one to host 0."""
        self.index, self.count = index, count
        self._lines = dict(sorted(lines.items()))
        self._runtime = False
        self._exit_code = 1

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_code = getattr(error, "exit_code", LOST)
        if isinstance(error, Exception) and not isinstance(error, TpuswarmError):
            self._hear()
        self.close(None if error is None else str(error) or type(error).__name__, self._exit_code)

    def send(self, about: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
        """A message to host 0; from host 0, to all others."""
        for line in self._lines.values():
            line.send(about, data)

    def receive(self) -> Message | None:
        """The next message from host 0; None once that said farewell. Not for host 0."""
        return self._lines[0].receive()

    def pending(self) -> list[Message]:
        """The messages of the other hosts that are there already."""
        return [message for line in self._lines.values() for message in line.pending()]

    def wait(self) -> None:
        """Until the other hosts end, for a moment."""
        for line in self._lines.values():
            line.wait(FAREWELL)

    def answers(self) -> list[Message]:
        """At host 0, the next message of each other host, all of which have to send one."""
        return [message for line in self._lines.values() if (message := line.receive())]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise InputError on all hosts, which part then, unless all give the same facts; all of them have to ask.

        facts: by a name that fits into "host 1 does not have host 0's …".
        """
        if self.index:
            self.send({"facts": dict(facts)})
            answer = self.receive()
            refused = answer[0]["refused"] if answer else "host 0 ended before the program began"
        else:
            given = [(index, line.receive()) for index, line in self._lines.items()]
            found = [_difference(facts, message[0]["facts"] if message else {}, index) for index, message in given]
            refused = next(filter(None, found), None)
            self.send({"refused": refused})
        if refused:
            self.close()
            raise InputError(refused)

    def start_runtime(self, name: str) -> None:
        """Make JAX see the devices of all hosts. name: of the machine of host 0."""
        if self.index:
            message = self.receive()
            if message is None:
                raise InputError("host 0 ended before the program began; start all hosts again")
            where = f"127.0.0.1:{relay(name, message[0]['port'])}"
        else:
            with socket.create_server((name, 0)) as free:
                where = f"{name}:{free.getsockname()[1]}"
            self.send({"port": int(where.rpartition(":")[2])})
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
        try:
            jax.distributed.initialize(
                where,
                self.count,
                self.index,
                cluster_detection_method="deactivate",  # all that it could find out is known
                initialization_timeout=int(PATIENCE),
                heartbeat_timeout_seconds=RUNTIME_SILENCE,
                shutdown_timeout_seconds=FAREWELL,
                coordinator_bind_address=where,
            )
        except RuntimeError as error:
            if "before any JAX calls" in str(error):
                raise InputError(
                    f"JAX has started at host {self.index} before the hosts came together; let nothing use JAX "
                    "before that, and start a new process for another run"
                ) from error
            raise
        self._runtime = True
        hold_terminate()
        atexit.register(self._exit)

    def close(self, reason: str | None = None, status: int = LOST) -> None:
        """End the program once all hosts have come to close it.

        A reason, a sentence, ends the others at once, with a status.
        """
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.farewell(reason, status)
        for line in lines.values() if reason is None else ():
            line.wait()
        if self._runtime and reason is None:
            self._runtime = False
            _settle()
            jax.distributed.shutdown()

    def _hear(self) -> None:
        """Give the lines a moment: what a collective throws here may come of a host that is gone, which they say."""
        end = time.monotonic() + HEARTBEAT_INTERVAL_S
        for line in self._lines.values():
            line.wait(max(0, end - time.monotonic()))

    def _exit(self) -> None:
        """At the end of a process that does not end with the others: JAX would wait for them, then print its stack."""
        if self._runtime:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


def initialize(
    address: str,
    count: int,
    index: int,
    secret: Secret,
    seconds: float = PATIENCE,
    awaited: Callable[[], bool] = lambda: True,
) -> Hosts:
    """Join `count` hosts, of which this is number `index`, to one program; before anything else uses JAX.

    address: `HOST:PORT` where host 0 listens for the others; secret: the same on all hosts; awaited: asked at host 0
    whether it still waits for the others, who end with it. Raises InputError where hosts do not come within `seconds`,
    do not know the secret, run other versions or have other numbers of devices.
    From then on a host that dies or is silent ends the others within 30 seconds, each with one sentence on stderr:
    they may be inside a collective that never returns, so that nothing but their process can be ended.
    """
    name, port = host_0(address, count, index)
    platform.configure_jax()
    if count == 1:
        return Hosts(0, 1, {})
    end = time.monotonic() + seconds
    lines = _dial(name, port, index, secret, end) if index else _gather(name, port, count, secret, end, awaited)
    hosts = Hosts(index, count, lines)
    try:
        versions = {package: version(package) for package in ("jax", "jaxlib", "numpy")}
        hosts.agree({"number of hosts": str(count), **versions, "tpuswarm": _code()})
        hosts.start_runtime(name)
        if jax.process_index() != index:
            raise InputError(
                f"host {index} is worker {jax.process_index()} of its TPU slice; number the hosts like the workers"
            )
        hosts.agree({"number of devices": str(jax.local_device_count())})
    except BaseException:
        hosts.__exit__(*sys.exc_info())
        raise
    return hosts


def listen(name: str, port: int) -> socket.socket:
    """Where host 0 awaits the others; InputError where this machine cannot listen."""
    try:
        return socket.create_server((name, port))
    except OSError as error:
        raise InputError(f"host 0 cannot listen on {name}:{port}: {error.strerror or error}; use another") from error


def _gather(
    name: str, port: int, count: int, secret: Secret, end: float, awaited: Callable[[], bool]
) -> dict[int, ControlChannel]:
    """At host 0: the lines of all others. One that goes before all have come is awaited again."""
    seconds = end - time.monotonic()
    lines: dict[int, ControlChannel] = {}
    coming = threading.Lock()
    together = False
    strangers = 0

    def lost(index: int, why: str, status: int) -> None:
        with coming:
            if not together:
                lines.pop(index, None)
                return
        _lost(index, lines, why, status)

    with listen(name, port) as listener:
        listener.settimeout(min(LOOK, max(0.1, seconds)))
        while True:
            with coming:
                together = len(lines) == count - 1
            if together:
                return lines
            if not awaited():
                Hosts(0, count, lines).close("it stopped waiting", LEFT)
                raise Absent("host 0 stopped waiting for the others")
            if time.monotonic() > end:
                missing = [str(index) for index in range(1, count) if index not in lines]
                more = f" ({strangers} connected without the secret)" if strangers else ""
                refused = (
                    f"host{'s' * (len(missing) > 1)} {', '.join(missing)} did not connect to {name}:{port} within "
                    f"{seconds:.0f} s{more}; start all {count} with the same address and secret"
                )
                Hosts(0, count, lines).close(refused, Absent.exit_code)
                raise Absent(refused)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            try:
                index = authenticate(connection, _known(secret), 0)
            except (OSError, WrongSecret):
                strangers += 1
                connection.close()
                continue
            with coming:  # its line may be lost before it is kept
                if index in lines or index >= count:
                    line = ControlChannel(connection, lambda why, status: None)
                    line.farewell(f"it expects hosts 1 to {count - 1}, each once, not another host {index}", TAKEN)
                else:
                    lines[index] = ControlChannel(connection, partial(lost, index))


def _dial(name: str, port: int, index: int, secret: Secret, end: float) -> dict[int, ControlChannel]:
    """At any other host: the line to host 0."""
    seconds = end - time.monotonic()
    while True:
        try:
            connection = socket.create_connection((name, port), max(0.1, end - time.monotonic()))
            authenticate(connection, _known(secret), index)
            return {0: ControlChannel(connection, partial(_lost, 0, {}))}
        except WrongSecret:
            raise InputError(f"host 0 at {name}:{port} has a different secret; all hosts need the same") from None
        except OSError as error:
            if time.monotonic() > end:
                raise Absent(
                    f"host 0 did not answer at {name}:{port} within {seconds:.0f} s ({error.strerror or error}); "
                    "start it, or correct its address"
                ) from error
            time.sleep(0.1)


def _known(secret: Secret) -> bytes:
    return secret if isinstance(secret, bytes) else secret()


def _settle() -> None:
    """Wait until nothing runs on this host's devices that needs another host; all hosts have to call it.

    JAX's own exchanges between hosts (`multihost_utils.process_allgather`, which a restore runs too) are awaited on the
    first device only. A host that ends before its other devices are through leaves the other host waiting for them for
    ever, at the end of its process. Collectives run in the order of their dispatch, so the last one's end is that of
    all.
    """
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("all")), lambda index: np.ones(1, np.float32)
    )
    jax.block_until_ready(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones))


def _lost(index: int, lines: Mapping[int, ControlChannel], why: str, status: int) -> NoReturn:
    """A host is gone: tell the others, to whom that is a loss whatever it was to that host, and end."""
    sentence = f"host {index} is gone ({why})"
    for other in lines.keys() - {index}:
        lines[other].farewell(sentence)
    end_process(f"{sentence}, so this host stops too; start all hosts again", status)


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str], index: int) -> str | None:
    for name, value in mine.items():
        other = theirs.get(name, "nothing")
        if other != value:
            return f"host {index} and host 0 disagree on {name} ({other[:16]} vs {value[:16]}); all hosts need the same"
    return None


def _code() -> str:
    """SHA-256 of this package's sources."""
    package = Path(__file__).parents[2]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return found.hexdigest()

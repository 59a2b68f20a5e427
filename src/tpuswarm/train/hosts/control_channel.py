"""A connection between two hosts of one program: authenticated when it is made, alive as long as both ends are.

A host that dies leaves the others inside a collective that never returns, where no exception reaches anybody: what
notices it is a thread of this connection, and all that it can do is end its process.
"""

import ctypes
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from tpuswarm.train.process.terminal import echo

HEARTBEAT_INTERVAL_S = 2.0
"""Seconds between two signs of life."""
SILENCE_TIMEOUT_S = 15.0
"""Seconds without one after which a host counts as dead."""
AUTHENTICATION_TIMEOUT_S = 5.0
"""Seconds that a new connection has to show that it knows the secret."""
CHUNK_BYTES = 2**20
"""Bytes given to the system at a time; each part has `SILENCE` seconds to go."""
LEFT, LOST, WRONG, ABSENT, TAKEN, FAILED = range(6)
"""How the process of a host ends: by host 0's farewell, without another host, by wrong input, where hosts did not come,
where host 0 has another host of this number, and by a failure of its own.
"""
HEAD = struct.Struct("!IQ")
"""Bytes of the JSON and of the data behind it; 0 and 0 is a sign of life."""

Message = tuple[dict[str, Any], bytearray]
"""What JSON holds, and bytes."""

witnesses: list[Callable[[str], None]] = []
"""Told the sentence with which `end_process` ends this process."""

_last_words = threading.Lock()


def end_process(sentence: str, status: int = LOST) -> NoReturn:
    """Say why and end with a status, whatever the other threads wait for; only the first sentence is said."""
    _last_words.acquire()  # and never let go
    for witness in witnesses:
        with suppress(Exception):  # whatever is wrong with it, the process has to end
            witness(sentence)
    with suppress(OSError, ValueError):
        echo(sentence, err=True)
    os._exit(status)


class WrongSecret(Exception):
    """The other end of a connection does not know the secret."""


def authenticate(connection: socket.socket, secret: bytes, index: int) -> int:
    """The index of the other host, once each has proved to the other that it knows the secret; host 0 sees proof first.

    Raises WrongSecret, and OSError where the other end goes or is silent. Nothing is encrypted afterwards: the network
    between the hosts of a program has to be theirs.
    """
    connection.settimeout(AUTHENTICATION_TIMEOUT_S)
    mine = secrets.token_bytes(32) + index.to_bytes(4)
    connection.sendall(mine)
    theirs = bytes(_exactly(connection, 36))
    other = int.from_bytes(theirs[32:])

    def proof(of: int) -> bytes:
        said = mine + theirs if index < other else theirs + mine
        return hmac.digest(secret, of.to_bytes(4) + said, hashlib.sha256)

    if index:
        connection.sendall(proof(index))
    try:
        found = bytes(_exactly(connection, 32))
    except ConnectionError as error:
        raise WrongSecret from error
    if index == other or not hmac.compare_digest(found, proof(other)):
        raise WrongSecret
    if not index:
        connection.sendall(proof(0))
    return other


class ControlChannel:
    """Messages to and from one other host."""

    def __init__(self, connection: socket.socket, lost: Callable[[str, int], None]):
        """connection: authenticated; lost: told, by a thread, why the other host is gone without a farewell, and the
        status with which this one has to end, if it has to.
        """
        connection.settimeout(SILENCE_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lost = connection, lost
        self._sending = threading.Lock()
        self._left = False
        """Gone without waiting for the other host."""
        self._said = threading.Event()
        """This host said farewell, or the other is gone."""
        self._ended = threading.Event()
        """The other host said farewell, or is gone."""
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="line", daemon=True).start()

    def send(self, about: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
        """Returns when the system has taken it over."""
        try:
            self._write(json.dumps(about).encode(), data)
        except OSError:
            self._gone("connection closed")

    def receive(self) -> Message | None:
        """The next message, however long it takes; None once the other host has said farewell or is gone."""
        return self._inbox.get()

    def pending(self) -> list[Message]:
        """The messages that are there already."""
        found = []
        with suppress(queue.Empty):
            while message := self._inbox.get_nowait():
                found.append(message)
        return found

    def farewell(self, reason: str | None = None, status: int = LOST) -> None:
        """The last message. A reason, a sentence, is the end of the other host, with a status; nobody waits for it."""
        self._left = reason is not None
        with suppress(OSError):  # the reading thread says what is wrong
            self._write(json.dumps({"farewell": reason, "status": status}).encode(), b"")
        self._said.set()

    def wait(self, seconds: float | None = None) -> None:
        """Until the other host says farewell, or is gone; so many seconds at most, where given."""
        self._ended.wait(seconds)

    def _write(self, about: bytes, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with self._sending:
            self._connection.sendall(HEAD.pack(len(about), len(data)) + about)
            for start in range(0, len(view), CHUNK_BYTES):
                self._connection.sendall(view[start : start + CHUNK_BYTES])

    def _beat(self) -> None:
        while not self._said.wait(
            HEARTBEAT_INTERVAL_S
        ):  # the other host, which may have said farewell, waits for this one's
            with suppress(OSError):  # the reading thread says what is wrong
                self._write(b"", b"")
        self._ended.wait()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                about_size, data_size = HEAD.unpack(_exactly(self._connection, HEAD.size))
                if not about_size:
                    continue
                about = json.loads(_exactly(self._connection, about_size))
                if "farewell" in about:
                    break
                self._inbox.put((about, _exactly(self._connection, data_size)))
        except TimeoutError:
            self._gone(f"silent for {SILENCE_TIMEOUT_S:.0f} s")
        except OSError:
            self._gone("connection closed")
        else:
            if about["farewell"]:
                self._gone(f"it ended: {about['farewell']}", about["status"])
            self._ended.set()
            self._inbox.put(None)

    def _gone(self, why: str, status: int = LOST) -> None:
        if not self._left:
            self._lost(why, status)
        self._said.set()  # this process lives on without it
        self._ended.set()
        self._inbox.put(None)


def relay(host: str, port: int) -> int:
    """A port of this machine that passes all on to `host`:`port`, and does not close when that does.

    JAX's runtime ends its process with a stack trace the moment its coordinator's connection closes, before anybody
    else can say what happened. Through a relay it notices nothing, and the line to host 0 says it.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            while True:
                try:
                    far = socket.create_connection((host, port), SILENCE_TIMEOUT_S)
                    break
                except OSError:  # not yet started
                    time.sleep(0.1)
            far.settimeout(None)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, target), name="relay", daemon=True).start()

    threading.Thread(target=accept, name="relay", daemon=True).start()
    return int(listener.getsockname()[1])


def hold_terminate() -> None:
    """Leave the lines the time to say what happened before a C++ library ends this process.

    Once a host is gone, gloo, which carries the collectives of CPUs, may throw in a thread of its own: some devices of
    this host are still in the collective that broke, some in the next, and no longer agree on what they send.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):  # another C++ library: its end may come before the sentence
        return
    handler = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = handler, [handler]

    def hold() -> None:
        time.sleep(SILENCE_TIMEOUT_S + HEARTBEAT_INTERVAL_S)
        former()

    held = handler(hold)
    former = set_terminate(held)
    _kept.append(held)  # C++ alone refers to it


_kept: list[Callable[[], None]] = []


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes; ConnectionError if the connection ends before, TimeoutError in a long silence."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("closed")
        done += count
    return data

"""Connect two hosts of one program, and end this process when the other host dies.

Without its peer a host waits for ever in a collective, where no exception reaches it. A thread of the channel notices
the death; it can only end the process.
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
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

from tpuswarm.train.process.stop import end_drawings
from tpuswarm.train.process.terminal import echo

HEARTBEAT_INTERVAL_S = 2.0
SILENCE_TIMEOUT_S = 15.0
"""Seconds without a heartbeat until a host counts as dead."""
AUTHENTICATION_TIMEOUT_S = 5.0
CHUNK_BYTES = 2**20
"""Bytes of one call of the system; each has SILENCE_TIMEOUT_S."""
SIZES = struct.Struct("!IQ")
"""Bytes of the JSON header and of the data behind it; 0 and 0 is a heartbeat."""

Message = tuple[dict[str, Any], bytearray]
"""A JSON header, and bytes."""


class ExitStatus(IntEnum):
    """Exit status of a host's process."""

    LEFT = 0
    """Host 0 said farewell."""
    LOST = 1
    """Another host died."""
    WRONG_INPUT = 2
    ABSENT = 3
    """Not all hosts came."""
    REFUSED = 4
    """Host 0 has another host of this number, or a different secret."""
    FAILED = 5


exit_callbacks: list[Callable[[str], None]] = []
"""Functions that `end_process` calls with its sentence."""

_exit_lock = threading.Lock()


def end_process(sentence: str, status: int = ExitStatus.LOST) -> NoReturn:
    """Print the sentence and exit at once, whatever other threads wait for; later calls block."""
    _exit_lock.acquire()  # and never release it
    calls: list[Callable[[], None]] = [*(partial(callback, sentence) for callback in exit_callbacks), *end_drawings]
    for call in calls:
        with suppress(Exception):  # the process must end
            call()
    with suppress(OSError, ValueError):
        echo(sentence, err=True)
    os._exit(status)


class WrongSecret(Exception):
    """The peer does not know the secret."""


def authenticate(connection: socket.socket, secret: bytes, index: int) -> int:
    """Prove to the peer that this host knows the secret, and check its proof; return the peer's index.

    Host 0 checks before it proves. Raise WrongSecret, or OSError if the peer is gone or silent. Later messages are not
    encrypted: the network between the hosts must be private.
    """
    connection.settimeout(AUTHENTICATION_TIMEOUT_S)
    challenge = secrets.token_bytes(32) + index.to_bytes(4)
    connection.sendall(challenge)
    peer_challenge = bytes(_receive_exactly(connection, 36))
    peer = int.from_bytes(peer_challenge[32:])

    def proof(prover: int) -> bytes:
        challenges = challenge + peer_challenge if index < peer else peer_challenge + challenge
        return hmac.digest(secret, prover.to_bytes(4) + challenges, hashlib.sha256)

    if index:
        connection.sendall(proof(index))
    try:
        peer_proof = bytes(_receive_exactly(connection, 32))
    except ConnectionError as error:
        raise WrongSecret from error
    if index == peer or not hmac.compare_digest(peer_proof, proof(peer)):
        raise WrongSecret
    if not index:
        connection.sendall(proof(0))
    return peer


class ControlChannel:
    """Messages to and from one other host, the peer."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[str, int], None]):
        """connection: authenticated; on_lost: a thread calls it if the peer ends without a farewell.

        on_lost gets the reason, and the exit status for this process.
        """
        connection.settimeout(SILENCE_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._on_lost = connection, on_lost
        self._send_lock = threading.Lock()
        self._ended_peer = False
        """Whether this host told the peer to end; it does not wait then."""
        self._stop_heartbeats = threading.Event()
        self._peer_ended = threading.Event()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        for work in (self._receive_messages, self._send_heartbeats):
            threading.Thread(target=work, name="control channel", daemon=True).start()

    def send(self, header: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
        try:
            self._write(json.dumps(header).encode(), data)
        except OSError:
            self._lose_peer("connection closed")

    def receive(self) -> Message | None:
        """Wait for the next message; None once the peer has ended."""
        return self._inbox.get()

    def pending(self) -> list[Message]:
        """Return the messages that have arrived already."""
        messages = []
        with suppress(queue.Empty):
            while message := self._inbox.get_nowait():
                messages.append(message)
        return messages

    def farewell(self, reason: str | None = None, status: int = ExitStatus.LOST) -> None:
        """Send the last message; a reason, a sentence, ends the peer with the status."""
        self._ended_peer = reason is not None
        with suppress(OSError):  # the receiving thread reports it
            self._write(json.dumps({"farewell": reason, "status": status}).encode(), b"")
        self._stop_heartbeats.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the peer says farewell or is lost."""
        self._peer_ended.wait(timeout_s)

    def _write(self, header: bytes, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with self._send_lock:
            self._connection.sendall(SIZES.pack(len(header), len(data)) + header)
            for start in range(0, len(view), CHUNK_BYTES):
                self._connection.sendall(view[start : start + CHUNK_BYTES])

    def _send_heartbeats(self) -> None:
        while not self._stop_heartbeats.wait(HEARTBEAT_INTERVAL_S):  # also after the peer's farewell
            with suppress(OSError):  # the receiving thread reports it
                self._write(b"", b"")
        self._peer_ended.wait()
        self._connection.close()

    def _receive_messages(self) -> None:
        try:
            while True:
                header_size, data_size = SIZES.unpack(_receive_exactly(self._connection, SIZES.size))
                if not header_size:
                    continue
                header = json.loads(_receive_exactly(self._connection, header_size))
                if "farewell" in header:
                    break
                self._inbox.put((header, _receive_exactly(self._connection, data_size)))
        except TimeoutError:
            self._lose_peer(f"silent for {SILENCE_TIMEOUT_S:.0f} s")
        except OSError:
            self._lose_peer("connection closed")
        else:
            if header["farewell"]:
                self._lose_peer(f"it ended: {header['farewell']}", header["status"])
            self._peer_ended.set()
            self._inbox.put(None)

    def _lose_peer(self, reason: str, status: int = ExitStatus.LOST) -> None:
        if not self._ended_peer:
            self._on_lost(reason, status)
        self._stop_heartbeats.set()  # only if on_lost lets this process live
        self._peer_ended.set()
        self._inbox.put(None)


def relay(host: str, port: int) -> int:
    """Return a local port that forwards to `host`:`port`, and stays open when that closes.

    JAX's runtime ends its process with a stack trace as soon as its coordinator's connection closes. Behind a relay it
    notices nothing, and the control channel reports the loss in a sentence.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            while True:
                try:
                    far = socket.create_connection((host, port), SILENCE_TIMEOUT_S)
                    break
                except OSError:  # not started yet
                    time.sleep(0.1)
            far.settimeout(None)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=(source, target), name="relay", daemon=True).start()

    threading.Thread(target=accept, name="relay", daemon=True).start()
    return int(listener.getsockname()[1])


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)


def delay_terminate() -> None:
    """Give the control channel time to report a loss before a C++ library ends this process.

    gloo carries the collectives of CPUs. Once a host is gone, it may throw in a thread of its own.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):  # another C++ library: the process may end without the sentence
        return
    handler_type = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = handler_type, [handler_type]

    def wait_then_terminate() -> None:
        time.sleep(SILENCE_TIMEOUT_S + HEARTBEAT_INTERVAL_S)
        previous()

    handler = handler_type(wait_then_terminate)
    previous = set_terminate(handler)
    _terminate_handlers.append(handler)


_terminate_handlers: list[Callable[[], None]] = []
"""Keeps alive handlers that only C++ refers to."""


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Return `size` bytes; raise ConnectionError if the connection ends before, TimeoutError after a long silence."""
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            raise ConnectionError("closed")
        received += count
    return data

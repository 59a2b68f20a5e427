"""Load for a network: a process that opens connections or fills them, and one that takes them."""

import errno
import multiprocessing
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.namespaces import Space

FORK = multiprocessing.get_context("fork")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection whose end leaves nothing behind on either side."""
PATIENCE = struct.pack("ll", 20, 0)
"""SO_RCVTIMEO: seconds for what should take none."""
CHUNK = 2**18
BACKLOG = 16_384
WARM_UP = 0.2
"""Seconds in which connections that are filled find their pace."""
Address = tuple[str, int]


@contextmanager
def answering(space: Space, port: int) -> Iterator[None]:
    """A target that says a byte on each connection and ends it."""

    def serve(server: socket.socket) -> None:
        while True:
            taken, _ = server.accept()
            with suppress(OSError), taken:  # its peer may have gone
                taken.send(b"!")

    with _serving(space, port, serve):
        yield


@contextmanager
def reading(space: Space, port: int) -> Iterator[Any]:
    """A target that says a byte on each connection and reads what comes; gives a value that counts the bytes."""
    count = FORK.Value("Q", 0, lock=False)

    def serve(server: socket.socket) -> None:
        buffer, peers, poll = bytearray(CHUNK), {server.fileno(): server}, select.epoll()
        poll.register(server, select.EPOLLIN)
        while True:
            for number, _ in poll.poll():
                if number == server.fileno():
                    taken, _ = server.accept()
                    taken.send(b"!")
                    peers[taken.fileno()] = taken
                    poll.register(taken, select.EPOLLIN)
                    continue
                got = 0
                with suppress(ConnectionError):
                    got = peers[number].recv_into(buffer)
                count.value += got
                if not got:
                    peers.pop(number).close()

    with _serving(space, port, serve):
        yield count


@contextmanager
def _serving(space: Space, port: int, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    ready = FORK.Event()

    def body() -> None:
        space.join()
        server = socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
        ready.set()
        serve(server)

    process = FORK.Process(target=body, daemon=True)
    process.start()
    try:
        if not ready.wait(20):
            raise RuntimeError("a target did not start")
        yield
    finally:
        process.kill()
        process.join()


def opened(space: Space, address: Address, at_once: int, seconds: float) -> float:
    """Connections a second that hear their target's byte and are closed then; `at_once` are opened together."""

    def body() -> float:
        done, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            _hear([_connect(address) for _ in range(at_once)], close=True)
            done += at_once
        return done / (now - start)

    return _measured(space, body)


def filled(space: Space, addresses: Sequence[Address], count: Any, seconds: float) -> float:
    """Gbit/s through a connection to each address, as the target that is `reading` counts them."""

    def body() -> float:
        chunk, poll = memoryview(bytes(CHUNK)), select.epoll()
        peers = [_connect(address) for address in addresses]
        _hear(peers, close=False)
        by_number = {peer.fileno(): peer for peer in peers}
        for peer in peers:
            peer.setblocking(False)
            poll.register(peer, select.EPOLLOUT)
        start = time.perf_counter()
        began, before = start, 0
        while (now := time.perf_counter()) < start + WARM_UP + seconds:
            if not before and now > start + WARM_UP:
                began, before = now, count.value
            for number, _ in poll.poll():
                with suppress(BlockingIOError):
                    by_number[number].send(chunk)
        return (count.value - before) * 8 / (time.perf_counter() - began) / 1e9

    return _measured(space, body)


def _connect(address: Address) -> socket.socket:
    """A socket that connects, without waiting."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PATIENCE)
    peer.setblocking(False)
    if (code := peer.connect_ex(address)) not in (0, errno.EINPROGRESS):
        raise OSError(code, f"connecting to {address} failed")
    peer.setblocking(True)
    return peer


def _hear(peers: Sequence[socket.socket], close: bool) -> None:
    """Wait for the byte on all of them."""
    for peer in peers:
        if not peer.recv(1):
            raise RuntimeError("a connection ended before its target said anything")
        if close:
            peer.close()


def _measured(space: Space, body: Callable[[], float]) -> float:
    """What it gives in a process of its own, in a network."""
    reader, writer = FORK.Pipe(duplex=False)

    def work() -> None:
        space.join()
        writer.send(body())

    process = FORK.Process(target=work, daemon=True)
    process.start()
    writer.close()
    try:
        return float(reader.recv())
    except EOFError:
        raise RuntimeError("a load ended with an error") from None
    finally:
        process.join()
        reader.close()

"""Network load: processes that open or fill connections, and processes that accept them."""

import errno
import multiprocessing
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.router.namespaces import Space

FORK = multiprocessing.get_context("fork")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: reset a connection at its end."""
RECEIVE_TIMEOUT = struct.pack("ll", 20, 0)
"""SO_RCVTIMEO, in seconds."""
CHUNK_BYTES = 2**18
BACKLOG_SIZE = 16_384
WARM_UP_S = 0.2
Address = tuple[str, int]


@contextmanager
def answering(space: Space, port: int) -> Iterator[None]:
    """Run a target that sends a byte on each connection and closes it."""

    def serve(server: socket.socket) -> None:
        while True:
            taken, _ = server.accept()
            with suppress(OSError), taken:  # its peer may have gone
                taken.send(b"!")

    with _serving(space, port, serve):
        yield


@contextmanager
def reading(space: Space, port: int) -> Iterator[Any]:
    """Run a target that sends a byte on each connection and reads; yield its count of bytes."""
    count = FORK.Value("Q", 0, lock=False)

    def serve(server: socket.socket) -> None:
        buffer, peers, poll = bytearray(CHUNK_BYTES), {server.fileno(): server}, select.epoll()
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
        server = socket.create_server(("0.0.0.0", port), backlog=BACKLOG_SIZE)
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
    """Return connections per second, each closed after its target's byte; `at_once` are opened together."""

    def body() -> float:
        done, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            _receive_bytes([_connect(address) for _ in range(at_once)], close=True)
            done += at_once
        return done / (now - start)

    return _run_in(space, body)


def filled(space: Space, addresses: Sequence[Address], count: Any, seconds: float) -> float:
    """Return Gbit/s through a connection to each address, as counted by the target of `reading`."""

    def body() -> float:
        chunk, poll = memoryview(bytes(CHUNK_BYTES)), select.epoll()
        peers = [_connect(address) for address in addresses]
        _receive_bytes(peers, close=False)
        by_number = {peer.fileno(): peer for peer in peers}
        for peer in peers:
            peer.setblocking(False)
            poll.register(peer, select.EPOLLOUT)
        start = time.perf_counter()
        counted_since, before = start, 0
        while (now := time.perf_counter()) < start + WARM_UP_S + seconds:
            if not before and now > start + WARM_UP_S:
                counted_since, before = now, count.value
            for number, _ in poll.poll():
                with suppress(BlockingIOError):
                    by_number[number].send(chunk)
        return (count.value - before) * 8 / (time.perf_counter() - counted_since) / 1e9

    return _run_in(space, body)


def _connect(address: Address) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, RECEIVE_TIMEOUT)
    peer.setblocking(False)
    if (code := peer.connect_ex(address)) not in (0, errno.EINPROGRESS):
        raise OSError(code, f"connecting to {address} failed")
    peer.setblocking(True)
    return peer


def _receive_bytes(peers: Sequence[socket.socket], close: bool) -> None:
    for peer in peers:
        if not peer.recv(1):
            raise RuntimeError("a connection ended before its target sent a byte")
        if close:
            peer.close()


def _run_in(space: Space, body: Callable[[], float]) -> float:
    """Run `body` in its own process, in a network namespace."""
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

"""A real HTTPS server on loopback before a gateway whose swarm is a function of the test."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tpuswarm.swarm.anywhere import server as serving
from tpuswarm.swarm.anywhere.certificate import ensure_certificate
from tpuswarm.swarm.anywhere.client import HttpsCalls
from tpuswarm.swarm.anywhere.gateway import Gateway
from tpuswarm.swarm.anywhere.invites import Invitation, InviteBook, prepare_listening
from tpuswarm.swarm.processes.effects import Call, Unreachable


class Head:
    """A gateway that listens; `answer` is the swarm behind it."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, []
        self.answer: Callable[[Call], Any] = lambda call: None
        self.now = time.time()
        self.gateway = Gateway(self._call, time.monotonic)
        self._listener = serving.open_listener("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        prepare_listening(folder, f"127.0.0.1:{self.port}", f"127.0.0.1:{self.port}")
        self.book = InviteBook(folder)
        self.start()

    def _call(self, call: Call) -> Any:
        self.calls.append(call)
        answer = self.answer(call)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    def start(self) -> None:
        app = serving.make_app(self.gateway, self.book, 2**24, self.folder / "parts", lambda: self.now)
        self.server = serving.make_server(app, ensure_certificate(self.folder))
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self._listener.dup()])))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self._listener.close()

    def calls_of(self, person: str = "ada", **changes: str) -> HttpsCalls:
        """Return a person's connection; changes: of the invitation."""
        invitation = self.book.invite(person)
        calls = HttpsCalls(Invitation(**{**vars(invitation), **changes}))
        calls.connect()
        return calls


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    head.close()

"""Run `tpuswarm page` in a process, on a free port."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.hosts import free_port
from tests.processes import PROGRAM, Forked


class Page:
    """`tpuswarm page` with these arguments, in a folder; its token lies in `state`."""

    def __init__(self, folder: Path, *words: str, port: int | None = None, environment: dict[str, str] | None = None):
        self.port = port or free_port()
        self.process = Forked(
            [PROGRAM, "page", *words, "--port", str(self.port)], cwd=folder, text=True,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith(f"http://127.0.0.1:{self.port}/?token="), self.process.communicate()
        self.token = self.url.partition("token=")[2]

    def get(self, path: str, token: str | None = None, **headers: str) -> tuple[int, str]:
        """Return status and body."""
        mark = "&" if "?" in path else "?"
        given = self.token if token is None else token
        try:
            with urlopen(Request(f"http://127.0.0.1:{self.port}{path}{mark}token={given}", headers=headers)) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def stop(self) -> None:
        """Press Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(2)
            _, err = self.process.communicate(timeout=240)
            assert self.process.returncode == 130 and "Traceback" not in err, err


@pytest.fixture
def page_of() -> Iterator[Callable[..., Page]]:
    """Open pages; they end with the test."""
    opened: list[Page] = []

    def open_page(*about, **more) -> Page:
        opened.append(Page(*about, **more))
        return opened[-1]

    yield open_page
    for page in opened:
        page.stop()

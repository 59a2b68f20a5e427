"""A local cloud with a fleet on it, and its hosts, for all tests of this folder."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.cloud.rehearsal.conftest import until
from tests.local_cloud import local_cloud
from tests.remote.machines import machines
from tests.terminal import PROGRAM
from tpuswarm.cli import main
from tpuswarm.cloud.rehearsal.place import VARIABLE, Place
from tpuswarm.fleet.reach import Reach, find_reach
from tpuswarm.train.process.stop import SIGNALS

FILE = """\
name = "trio"
provider = "rehearsal"

[storage]
bucket = "rehearsal-trio"
region = "us-central1"

[[pool]]
name = "one"
type = "v2-8"
zones = ["us-central1-f"]
count = 1
network = "tpuswarm-trio"

[[pool]]
name = "slice"
type = "v5e-16"
zones = ["us-central1-a"]
count = 1
network = "tpuswarm-trio"
how = "on-demand"
"""


class Fleet:
    """Machines v2-usc1f-0 and v5e-usc1a-0 (four workers), and commands about them."""

    def __init__(self, folder: Path, place: Place):
        self.folder, self.place = folder, place
        self.environment = {**os.environ, VARIABLE: str(place.folder), "XDG_STATE_HOME": str(folder / "state"),
                            "HOME": str(folder)}  # fmt: skip

    def start(self, *words: str, **about) -> subprocess.Popen[str]:
        """A command under way; its output comes from pipes."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        about = {"cwd": self.folder, "env": self.environment, **pipes, **about}
        return subprocess.Popen([PROGRAM, *words], text=True, **about)

    def run(self, *words: str, code: int = 0, cwd: Path | None = None) -> tuple[str, str]:
        """What a command printed, typed in this process: it has imported already what a new one would import."""
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        before = {each: signal.getsignal(each) for each in SIGNALS}
        with (
            patch.dict(os.environ, self.environment, clear=True), patch.object(sys, "argv", ["tpuswarm", *words]),
            contextlib.chdir(cwd or self.folder), patch.object(sys, "stdout", out), patch.object(sys, "stderr", err),
            Path(os.devnull).open() as nothing, patch.object(sys, "stdin", nothing), pytest.raises(SystemExit) as end,
        ):  # fmt: skip
            try:
                main()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        said = out.buffer.getvalue().decode(), err.buffer.getvalue().decode()
        assert end.value.code == code, f"exit {end.value.code}, not {code}:\n{said[0]}\n{said[1]}"
        assert "Traceback" not in said[1], said[1]
        return said

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
        """Wait for its end, which has to be with `code`."""
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, f"exit {process.returncode}, not {code}:\n{out}\n{err}"
        assert "Traceback" not in err, err
        return out, err

    def home(self, host: str) -> Path:
        """The folder of a host that stands for `/`: host is NAME-WORKER."""
        (found,) = self.place.machines.glob(f"{host}-*")
        return found

    def user_home(self, host: str) -> Path:
        """The home of whoever everything on it belongs to."""
        root = self.home(host)
        homes = (root / "root", *root.glob("home/*"))
        return until(lambda: next((each for each in homes if any(each.iterdir())), None))


@pytest.fixture(scope="session")
def session_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("remote")
    (folder / "swarm.toml").write_text(FILE)
    with local_cloud(folder / "cloud") as place:
        found = Fleet(folder, place)
        found.run("init", "--yes")
        found.run("up", "--yes", "--paid")
        yield found


@pytest.fixture
def fleet(session_fleet, monkeypatch) -> Fleet:
    """With its environment, for what runs in this process."""
    for name in (VARIABLE, "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, session_fleet.environment[name])
    monkeypatch.chdir(session_fleet.folder)
    return session_fleet


@pytest.fixture
def reach(fleet) -> Reach:
    """The way to its machines."""
    from tpuswarm.fleet.keeping.fleets import find

    return find_reach(find(None)[0])


@pytest.fixture
def here(tmp_path):
    """Three machines without a cloud."""
    with machines(tmp_path, 3) as found:
        yield found


BOOKS = """\
name = "books"
provider = "rehearsal"

[storage]
bucket = "rehearsal-books"
region = "us-central2"

[[pool]]
name = "slice"
type = "v4-16"
zones = ["us-central2-b"]
count = 1
network = "tpuswarm-books"
how = "on-demand"

[setup]
notebook = true
env = { GREETING = "hello" }
"""


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Iterator[Fleet]:
    """A slice of two workers, set up."""
    folder = tmp_path_factory.mktemp("books")
    (folder / "swarm.toml").write_text(BOOKS)
    with local_cloud(folder / "cloud") as place:
        found = Fleet(folder, place)
        found.run("init", "--yes")
        out, _ = found.run("up", "--yes", "--paid")
        assert "v4-usc2b-0/1: notebook: done" in out
        yield found

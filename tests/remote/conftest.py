"""A local cloud with a fleet on it, and its hosts, for all tests of this folder."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local_cloud import local_cloud
from tests.remote.machines import machines
from tests.terminal import PROGRAM
from tpuswarm.cloud.rehearsal.place import VARIABLE, Place
from tpuswarm.fleet.reach import Reach, find_reach

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

    def run(self, *words: str, code: int = 0, **about) -> tuple[str, str]:
        """What a command printed."""
        return self.finish(self.start(*words, **about), code)

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
        return next(
            each for each in (root / "root", *root.glob("home/*")) if any(each.glob("*")) or any(each.glob(".*"))
        )


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

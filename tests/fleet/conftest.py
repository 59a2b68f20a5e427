"""A fake cloud for each test, and commands that run on one."""

import asyncio
import os
import shlex
import threading
import time
from pathlib import Path

import pytest

from tests.fleet.fake_cloud import FakeCloud
from tests.fleet.loop import ManagedFleet
from tests.local_cloud import local_cloud
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.fleet import training
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.spec.file import SwarmFile, read_swarm
from tpuswarm.fleet.store.fleets import Fleet

GOLDEN = Path(__file__).parent / "golden"
TRAINING = (GOLDEN / "train.toml").read_text()
FAULTS = {
    "unpaid-1": "no-billing",
    "fresh-1": "no-apis",
    "login-1": "os-login",
    "bare-1": "no-roles",
    "asia-east1-c": "hidden",
}
NO_QUOTA = "europe-west4-a"


@pytest.fixture
def cloud() -> FakeCloud:
    return FakeCloud()


@pytest.fixture
def fleet(tmp_path) -> ManagedFleet:
    return ManagedFleet(tmp_path)


@pytest.fixture
def signed_out(tmp_path, monkeypatch) -> Path:
    """The empty working directory and home of somebody who never used Google Cloud."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "swarm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def golden(signed_out, monkeypatch):
    """Compare a command's output with a file of golden/; TPUSWARM_GOLDEN=write writes the file instead."""
    monkeypatch.setattr("tpuswarm.catalog.prices.MAX_AGE_DAYS", 10**6)

    def compare(name: str, line: str, output: str) -> None:
        text = f"$ tpuswarm {line}\n{output}"
        if os.environ.get("TPUSWARM_GOLDEN") == "write":
            (GOLDEN / f"{name}.txt").write_text(text)
        assert text == (GOLDEN / f"{name}.txt").read_text()

    return compare


class CommandLine:
    """A folder with swarm.toml, and a fake cloud whose clock moves on whenever a command sleeps."""

    def __init__(self, typed, folder: Path):
        self.typed, self.folder = typed, folder
        self.cloud = FakeCloud(time.time())
        self.write((GOLDEN / "swarm.toml").read_text())

    def write(self, text: str) -> None:
        (self.folder / "swarm.toml").write_text(text)

    def run(self, line: str, code: int = 0) -> str:
        found, out, err = self.typed(*shlex.split(line))
        assert found == code, f"exit {found}: {out}{err}"
        return out + err

    @property
    def ready(self) -> list[str]:
        return self.cloud.names("ready")


@pytest.fixture
def cli(typed, signed_out, monkeypatch):
    found = CommandLine(typed, signed_out)
    monkeypatch.setattr(Fleet, "provider", lambda self: found.cloud)
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.require_checks", lambda *_: None)
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.wait_for_ssh", lambda routes: asyncio.sleep(0))  # no fake one answers
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.set_up_routers", lambda routes: None)
    monkeypatch.setattr("tpuswarm.fleet.store.fleets.new_fleet_id", lambda name, mark: f"{name}-abc234")
    monkeypatch.setattr(Fleet, "mark", "abc2")
    command, real_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        """Advance the cloud for the command's own thread only, not for threads left over from other tests."""
        if threading.get_ident() == command:
            found.cloud.advance(20)
        else:
            real_sleep(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    clock = Clock(lambda: found.cloud.now, lambda: found.cloud.now)
    monkeypatch.setattr("tpuswarm.fleet.keeper.keeper.Clock", lambda: clock)
    return found


@pytest.fixture(scope="module")
def cloud_folder(tmp_path_factory):
    """The folder of a fast local cloud, where some projects have faults."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        for name, fault in FAULTS.items():
            send_command(place, "break", name=name, fault=fault)
        send_command(place, "quota", zone=NO_QUOTA, generation="v2", limit=0)
        yield place.path


@pytest.fixture
def init(typed, cloud_folder, signed_out, monkeypatch):
    """Run `init` against the local cloud in an empty folder: (code, out, err)."""
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(cloud_folder))
    monkeypatch.setattr("tpuswarm.cloud.google.access.POLL_INTERVAL_S", 0.05)
    pool = "--provider rehearsal --type v2-8 --zone us-central1-b"

    def run(options: str, project: str | None = None) -> tuple[int, str, str]:
        line = f"{options} --project {project} {pool}" if project else options
        return typed("init", *shlex.split(line))

    return run


@pytest.fixture
def read(tmp_path):
    """Read a swarm.toml with a training, changed as the test says."""

    def read_file(train: str = "", before: str = "", provider: str = 'provider = "rehearsal"') -> SwarmFile:
        text = TRAINING.replace("[train]\n", f"{before}\n[train]\n{train}\n")
        text = text.replace('provider = "rehearsal"', provider)
        (tmp_path / "swarm.toml").write_text(text)
        return read_swarm(tmp_path / "swarm.toml")

    return read_file


def job_lines(file: SwarmFile, **options) -> dict[str, str]:
    return {job.name: job.line for job in training.train_jobs(file, **options)}

"""A cloud for each test, and commands on one."""

import os
import threading
import time

import pytest

from tests.fleet.cloud_model import Cloud
from tests.fleet.here import SWARM, Here
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.fleets import Fleet


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def here(typed, tmp_path, monkeypatch):
    for name in [each for each in os.environ if each.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = Here(typed, tmp_path)
    monkeypatch.setattr(Fleet, "provider", lambda self: found.cloud)
    monkeypatch.setattr("tpuswarm.cli.bring.preflight", lambda *about: None)
    monkeypatch.setattr("tpuswarm.cli.setup.route_now", lambda reach: None)  # nobody answers at a model's addresses
    monkeypatch.setattr("tpuswarm.fleet.keeping.fleets.new_id", lambda name, mark: f"{name}-abc234")
    monkeypatch.setattr(Fleet, "mark", "abc2")
    command, asleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        """Threads that an earlier test has left behind do not move this one's cloud."""
        if threading.get_ident() == command:
            found.cloud.advance(20)
        else:
            asleep(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    clock = Clock(lambda: found.cloud.now, lambda: found.cloud.now)
    monkeypatch.setattr("tpuswarm.fleet.keeping.keeper.Clock", lambda: clock)
    (tmp_path / "swarm.toml").write_text(SWARM)
    return found

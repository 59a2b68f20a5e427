"""A local cloud for tests: fast, in its own folder, ended with the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until as until  # for tests of clouds
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect, stop
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.fleet.spec.providers import open_access


@contextmanager
def use_local_cloud(folder: Path, monkeypatch: pytest.MonkeyPatch, speed: float) -> Iterator[Place]:
    """Start a local cloud and make it the one that commands use."""
    with local_cloud(folder / "cloud", speed) as place:
        monkeypatch.setenv("TPUSWARM_REHEARSAL", str(place.folder))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.chdir(folder)
        yield place


@contextmanager
def local_cloud(folder: Path, speed: float = 300.0) -> Iterator[Place]:
    """Start a local cloud whose clock goes `speed` times as fast as ours; `ask(place, …)` makes its weather."""
    place = Place(folder)
    connect(folder)
    try:
        ask(place, "speed", speed=speed)
        yield place
    finally:
        stop(place)


@contextmanager
def slow_clock(place: Place) -> Iterator[None]:
    """Let the cloud's clock go no faster than ours during the block: nothing under way ends meanwhile."""
    speed = ask(place, "status")["speed"]
    ask(place, "speed", speed=1.0)
    try:
        yield
    finally:
        ask(place, "speed", speed=speed)


def delete_machine(place: Place, name: str) -> None:
    """Delete a machine of us-central1-f as in Google's console."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPUSWARM_REHEARSAL", str(place.folder))
        cloud = GoogleProvider(open_access("rehearsal", None))
        (found,) = [machine for machine in cloud.machines(["us-central1-f"]).machines if machine.name == name]
        cloud.delete(found)

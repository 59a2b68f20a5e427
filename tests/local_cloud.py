"""A local cloud for tests: fast, in a folder of their own, ended with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect, stop
from tpuswarm.cloud.rehearsal.place import Place


@contextmanager
def cloud_of_this_test(folder: Path, monkeypatch: pytest.MonkeyPatch, speed: float) -> Iterator[Place]:
    """The same, and all that commands keep of it, in a folder where commands then run."""
    with local_cloud(folder / "cloud", speed) as place:
        monkeypatch.setenv("TPUSWARM_REHEARSAL", str(place.folder))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.chdir(folder)
        yield place


@contextmanager
def local_cloud(folder: Path, speed: float = 300.0) -> Iterator[Place]:
    """Its clock goes `speed` times as fast as ours; weather is made by `ask(place, …)`."""
    place = Place(folder)
    connect(folder)
    try:
        ask(place, "speed", speed=speed)
        yield place
    finally:
        stop(place)

"""A local cloud for tests: fast, in its own folder, ended with the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.connect import CloudFolder, connect, send_command, stop
from tpuswarm.fleet.spec.providers import open_access


@contextmanager
def local_cloud(folder: Path, speed: float = 300.0) -> Iterator[CloudFolder]:
    """Start a local cloud whose clock goes `speed` times as fast as ours; `send_command` plants faults."""
    place = CloudFolder(folder)
    connect(folder)
    try:
        send_command(place, "speed", speed=speed)
        yield place
    finally:
        stop(place)


@contextmanager
def slow_clock(place: CloudFolder) -> Iterator[None]:
    """Let the cloud's clock go no faster than ours during the block: nothing under way ends meanwhile."""
    speed = send_command(place, "status")["speed"]
    send_command(place, "speed", speed=1.0)
    try:
        yield
    finally:
        send_command(place, "speed", speed=speed)


def delete_machine(place: CloudFolder, name: str) -> None:
    """Delete a machine of us-central1-f as in Google's console."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPUSWARM_REHEARSAL", str(place.path))
        cloud = GoogleProvider(open_access("rehearsal", None))
        (found,) = [machine for machine in cloud.machines(["us-central1-f"]).machines if machine.name == name]
        cloud.delete(found)

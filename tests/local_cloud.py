"""A local cloud for tests: fast, in a folder of their own, ended with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect, stop
from tpuswarm.cloud.rehearsal.place import Place


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

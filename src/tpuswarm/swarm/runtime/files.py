"""The run's data files, which every host of a member has whole: from the swarm, or from host 0."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuswarm.swarm.runtime.plan import Plan
from tpuswarm.train import platform
from tpuswarm.train.hosts import Hosts
from tpuswarm.train.run import writing

PART = 2**23
"""Bytes sent at a time."""


def folder_of(plan: Plan) -> Path:
    """Where a run's files lie on a machine that joined."""
    return platform.cache_folder("swarm") / plan.swarm.run


def missing(folder: Path, files: Mapping[str, int]) -> list[str]:
    """Names of the files that are not there with their number of bytes."""
    paths = {name: folder / name for name in files}
    return [name for name, path in paths.items() if not path.exists() or path.stat().st_size != files[name]]


def keep(path: Path, parts: Iterable[bytes | bytearray]) -> None:
    """Write a file whole or not at all; RunFailed where it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}")  # several members of one machine may fetch it at once
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.name}.*"):
            if old.suffix[1:].isdigit() and not Path(f"/proc/{old.suffix[1:]}").exists():
                old.unlink(missing_ok=True)  # of a process that was killed
        try:
            with part.open("wb") as file:
                for each in parts:
                    file.write(each)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def give(hosts: Hosts, folder: Path, files: Mapping[str, int]) -> None:
    """At host 0: bring the others what they lack. What one of them lacks is sent to all."""
    lacking = {name for about, _ in hosts.answers() for name in about["lacks"]}
    names = [name for name in files if name in lacking]
    hosts.send({"files": names})
    for name in names:
        with (folder / name).open("rb") as file:
            for _ in range(0, files[name], PART):
                hosts.send({"file": name}, file.read(PART))
                hosts.answers()  # no host has to hold more than a part


def take(hosts: Hosts, folder: Path, files: Mapping[str, int]) -> None:
    """At every other host: what `give` brings."""
    hosts.send({"lacks": missing(folder, files)})
    message = hosts.receive()
    for name in message[0]["files"] if message else ():
        keep(folder / name, _received(hosts, files[name]))


def _received(hosts: Hosts, size: int) -> Iterable[bytearray]:
    for _ in range(0, size, PART):
        message = hosts.receive()
        assert message is not None  # host 0 says farewell between two lives only
        yield message[1]
        hosts.send({"kept": len(message[1])})

"""The run's data files, which every host of a member has whole: from the swarm, or from host 0."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.processes.plan import DataFile, Plan
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.hosts.rendezvous import Hosts
from tpuswarm.train.process import platform
from tpuswarm.train.run.directory import writing

PART = 2**23
"""Bytes sent at a time."""


def folder_of(plan: Plan) -> Path:
    """Where a run's files lie on a machine that joined."""
    return platform.cache_folder("swarm") / plan.swarm.run


def described(folder: Path, before: Mapping[str, str] | None = None) -> dict[str, DataFile]:
    """The run's own files, to be the same wherever they are brought.

    before: digests of those that the run was started with; InputError where one is not there or not the same.
    """
    found = {path.name: DataFile(path.stat().st_size, contents_digest(path)) for path in sorted(folder.glob("*"))}
    for name, digest in (before or {}).items():
        if name not in found or found[name].digest != digest:
            raise _changed(folder / name)
    return found


def missing(folder: Path, files: Mapping[str, DataFile]) -> list[str]:
    """Names of the files that are not there with all their bytes."""
    return [name for name, file in files.items() if not _is_there(folder / name, file)]


def check(folder: Path, files: Mapping[str, DataFile]) -> None:
    """Raise InputError where the run's own files are not what they were when it was started."""
    if others := missing(folder, files):
        raise _changed(folder / others[0])


def _changed(path: Path) -> InputError:
    return InputError(
        f"{path} has changed since the run was started; restore a copy of it, or delete {path.parent} and start the "
        "same command again: it is made anew from the data"
    )


def _is_there(path: Path, file: DataFile) -> bool:
    return path.exists() and path.stat().st_size == file.size and contents_digest(path) == file.digest


def keep(path: Path, parts: Iterable[bytes | bytearray], digest: str) -> None:
    """Write a file whole or not at all; RunFailed where it cannot be written, and where other bytes arrive."""
    part = path.with_name(f"{path.name}.{os.getpid()}")  # several members of one machine may fetch it at once
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.name}.*"):
            if old.suffix[1:].isdigit() and not Path(f"/proc/{old.suffix[1:]}").exists():
                old.unlink(missing_ok=True)  # of a process that was killed
        try:
            with part.open("wb") as file:
                found = hashlib.sha256()
                for each in parts:
                    file.write(each)
                    found.update(each)
            if found.hexdigest() != digest:
                raise RunFailed(
                    f"{path.name} arrived with the digest {found.hexdigest()[:12]}…, not {digest[:12]}…: the run's own "
                    "copy has changed; stop the run and start the same command again"
                )
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def give(hosts: Hosts, folder: Path, files: Mapping[str, DataFile]) -> None:
    """At host 0: bring the others what they lack. What one of them lacks is sent to all."""
    lacking = {name for about, _ in hosts.answers() for name in about["lacks"]}
    names = [name for name in files if name in lacking]
    hosts.send({"files": names})
    for name in names:
        with (folder / name).open("rb") as file:
            for _ in range(0, files[name].size, PART):
                hosts.send({"file": name}, file.read(PART))
                hosts.answers()  # no host has to hold more than a part


def take(hosts: Hosts, folder: Path, files: Mapping[str, DataFile]) -> None:
    """At every other host: what `give` brings."""
    hosts.send({"lacks": missing(folder, files)})
    message = hosts.receive()
    for name in message[0]["files"] if message else ():
        keep(folder / name, _received(hosts, files[name].size), files[name].digest)


def _received(hosts: Hosts, size: int) -> Iterable[bytearray]:
    for _ in range(0, size, PART):
        message = hosts.receive()
        assert message is not None  # host 0 says farewell between two lives only
        yield message[1]
        hosts.send({"kept": len(message[1])})

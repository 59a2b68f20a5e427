"""Copy the run's data files to every host of a member, from the swarm or from host 0."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.processes.run_plan import DataFile, RunPlan
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.hosts.rendezvous import Hosts
from tpuswarm.train.process import platform
from tpuswarm.train.run.directory import writing

PART_BYTES = 2**23


def cache_folder(plan: RunPlan) -> Path:
    """Return the folder of a run's files on a machine that joined."""
    return platform.cache_folder("swarm") / plan.swarm.run


def describe(folder: Path, before: Mapping[str, str] | None = None) -> dict[str, DataFile]:
    """Describe the files of a folder.

    before: digests of the files that the run was started with. Raise InputError if one is missing or has changed.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {
        path.relative_to(folder).as_posix(): DataFile(path.stat().st_size, contents_digest(path)) for path in paths
    }
    for name, digest in (before or {}).items():
        if name not in found or found[name].digest != digest:
            raise _changed(folder / name)
    return found


def missing(folder: Path, files: Mapping[str, DataFile]) -> list[str]:
    """Return the names of files that are missing or incomplete."""
    return [name for name, file in files.items() if not _is_there(folder / name, file)]


def check(folder: Path, files: Mapping[str, DataFile]) -> None:
    """Raise InputError if the run's own files have changed since it was started."""
    if others := missing(folder, files):
        raise _changed(folder / others[0])


def _changed(path: Path) -> InputError:
    return InputError(
        f"{path} has changed since the run was started; restore a copy of it, or delete {path.parent} and start the "
        "same command again: it is rebuilt from the data"
    )


def _is_there(path: Path, file: DataFile) -> bool:
    return path.exists() and path.stat().st_size == file.size and contents_digest(path) == file.digest


def require_room(folder: Path, files: Iterable[DataFile]) -> None:
    """Raise InputError if the disk has no room for files that are to be fetched."""
    need = sum(file.size for file in files)
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < need:
        raise InputError(
            f"the run's data needs {need / 2**30:.1f} GiB more, and the disk of {folder} has {free / 2**30:.1f} GiB "
            "free: make room, or set TPUSWARM_CACHE to a folder on a larger disk"
        )


def write(path: Path, parts: Iterable[bytes | bytearray], digest: str) -> None:
    """Write a file atomically. Raise RunFailed if that fails, or if the bytes do not match the digest."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")  # several members of one machine may write it at once
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.name}.*"):
            if old.suffix[1:].isdigit() and not Path(f"/proc/{old.suffix[1:]}").exists():
                old.unlink(missing_ok=True)  # its process was killed
        try:
            with temporary.open("wb") as file:
                found = hashlib.sha256()
                for part in parts:
                    file.write(part)
                    found.update(part)
            if found.hexdigest() != digest:
                raise RunFailed(
                    f"{path.name} arrived with the digest {found.hexdigest()[:12]}…, not {digest[:12]}…: the run's own "
                    "copy has changed; stop the run and start the same command again"
                )
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def send(hosts: Hosts, folder: Path, files: Mapping[str, DataFile]) -> None:
    """At host 0: send each file that some other host lacks to all hosts."""
    lacking = {name for about, _ in hosts.receive_from_all() for name in about["lacks"]}
    names = [name for name in files if name in lacking]
    hosts.send({"files": names})
    for name in names:
        with (folder / name).open("rb") as file:
            for _ in range(0, files[name].size, PART_BYTES):
                hosts.send({"file": name}, file.read(PART_BYTES))
                hosts.receive_from_all()  # so that no host has to hold more than a part


def receive(hosts: Hosts, folder: Path, files: Mapping[str, DataFile]) -> None:
    """At every other host: receive the missing files from host 0."""
    hosts.send({"lacks": missing(folder, files)})
    message = hosts.receive()
    for name in message[0]["files"] if message else ():
        write(folder / name, _received_parts(hosts, files[name].size), files[name].digest)


def _received_parts(hosts: Hosts, size: int) -> Iterable[bytearray]:
    for _ in range(0, size, PART_BYTES):
        message = hosts.receive()
        assert message is not None  # host 0 says farewell only between two incarnations
        yield message[1]
        hosts.send({"kept": len(message[1])})

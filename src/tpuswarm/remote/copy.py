"""Files and folders to hosts and back, over SFTP: each is there whole or not at all, and a broken copy goes on."""

import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host, NoWay

if TYPE_CHECKING:
    import asyncssh

CHUNK = 1 << 20
Told = Callable[[int], None]
"""Called with the bytes of each part that has arrived, or was there already."""


def split(text: str) -> tuple[str | None, str]:
    """WHERE and path of `WHERE:path`; None for a path of this computer, which has a slash before a colon if any."""
    where, colon, path = text.partition(":")
    if not colon or "/" in where.partition("/")[2] or where.startswith((".", "/", "~")) or not where:
        return None, text
    return where, path.removeprefix("~/")


async def put(connections: Connections, host: Host, source: Path, target: str, told: Told = lambda count: None) -> int:
    """Copy a file or folder to a host; how many files. A target that is a folder, or ends in /, gets it inside."""

    async def work(files: "asyncssh.SFTPClient") -> int:
        to = target or "."
        if to.endswith("/") or await files.isdir(to):
            await files.makedirs(to, exist_ok=True)
            to = f"{to.rstrip('/')}/{source.name}"
        if not source.is_dir():
            await _put_file(files, source, to, told)
            return 1
        count = 0
        for folder, _, names in os.walk(source):
            inside = f"{to}/{Path(folder).relative_to(source)}".removesuffix("/.")
            await files.makedirs(inside, exist_ok=True)
            for name in sorted(names):
                await _put_file(files, Path(folder) / name, f"{inside}/{name}", told)
                count += 1
        return count

    return await _over(connections, host, work)


def name_of(path: str) -> str:
    """What something that is copied from there is called here; nothing for a path that ends in no name."""
    name = path.rstrip("/").rpartition("/")[2]
    return "" if name in (".", "..") else name


async def get(connections: Connections, host: Host, source: str, target: Path, told: Told = lambda count: None) -> int:
    """Copy a file or folder from a host; how many files. A target that is a folder gets it inside."""

    async def work(files: "asyncssh.SFTPClient") -> int:
        if not await files.exists(source or "."):
            raise InputError(f"{host.label} has no file or folder {source}")
        to = target / name_of(source) if target.is_dir() else target
        if not await files.isdir(source or "."):
            to.parent.mkdir(parents=True, exist_ok=True)
            await _get_file(files, source, to, told)
            return 1
        count = 0
        async for path, relative in _walk(files, source.rstrip("/") or "."):
            (to / relative).parent.mkdir(parents=True, exist_ok=True)
            await _get_file(files, path, to / relative, told)
            count += 1
        return count

    return await _over(connections, host, work)


async def _over(connections: Connections, host: Host, work: Callable[[Any], Any]) -> int:
    import asyncssh

    connection = await connections.to(host)
    try:
        async with connection.start_sftp_client() as files:
            return int(await work(files))
    except (asyncssh.Error, OSError) as error:
        if connection.is_closed() or isinstance(error, ConnectionError | asyncssh.ConnectionLost):
            raise NoWay(host, "was lost: what has arrived stays, and the same command goes on from there") from error
        if isinstance(error, asyncssh.Error):
            raise RunFailed(f"{host.label}: {error.reason or type(error).__name__}") from error
        raise


async def _walk(files: "asyncssh.SFTPClient", folder: str) -> AsyncIterator[tuple[str, str]]:
    """All files below a folder, as (path, path from the folder)."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        for each in sorted(await files.readdir(f"{folder}/{below}"), key=lambda one: str(one.filename)):
            name = str(each.filename)
            if name in (".", ".."):
                continue
            if "/" in name or "\0" in name:  # it would be written to where the host wants
                raise RunFailed(f"a host names a file {name!r} in {folder}/{below}, which no file can be called")
            if stat.S_ISDIR(each.attrs.permissions or 0):
                waiting.append(f"{below}{name}/")
            else:
                yield f"{folder}/{below}{name}", f"{below}{name}"


async def _put_file(files: "asyncssh.SFTPClient", source: Path, target: str, told: Told) -> None:
    import asyncssh

    about = source.stat()
    try:
        there = await files.stat(target)
    except asyncssh.SFTPNoSuchFile:
        there = None
    if there is not None and (there.size, there.mtime) == (about.st_size, int(about.st_mtime)):
        told(about.st_size)
        return
    part = _part(target, about.st_size, int(about.st_mtime))
    begun = (await files.stat(part)).size or 0 if await files.exists(part) else 0
    told(begun)
    # At offsets, not appended: where the same is copied by two at once, both write the same bytes to the same places.
    async with files.open(part, "r+b" if begun else "wb") as out:
        await out.seek(begun)
        with source.open("rb") as file:
            file.seek(begun)
            while chunk := file.read(CHUNK):
                await out.write(chunk)
                told(len(chunk))
    if (size := (await files.stat(part)).size) != about.st_size:
        await files.remove(part)
        raise RunFailed(_grew(str(source), about.st_size, size or 0))
    mode, at = stat.S_IMODE(about.st_mode), int(about.st_mtime)
    await files.setstat(part, asyncssh.SFTPAttrs(permissions=mode, atime=at, mtime=at))
    await files.posix_rename(part, target)


async def _get_file(files: "asyncssh.SFTPClient", source: str, target: Path, told: Told) -> None:
    about = await files.stat(source)
    size, written = about.size or 0, about.mtime or 0
    if target.is_file() and (target.stat().st_size, int(target.stat().st_mtime)) == (size, written):
        told(size)
        return
    part = Path(_part(str(target), size, written))
    begun = part.stat().st_size if part.exists() else 0
    told(begun)
    with part.open("r+b" if begun else "wb") as out:
        out.seek(begun)
        async with files.open(source, "rb") as file:
            await file.seek(begun)
            while chunk := await file.read(CHUNK):
                out.write(cast(bytes, chunk))
                told(len(chunk))
    if (came := part.stat().st_size) != size:
        part.unlink()
        raise RunFailed(_grew(source, size, came))
    part.chmod(stat.S_IMODE(about.permissions or 0o644))
    os.utime(part, (written, written))
    part.replace(target)


def _grew(path: str, size: int, came: int) -> str:
    return f"{path} has changed while it was copied, from {size:,} bytes to {came:,}: give the same command again"


def _part(path: str, size: int, written: int) -> str:
    """Where a file is while it is not whole: another version of it has another name."""
    return f"{path}.{size}-{written}.part"

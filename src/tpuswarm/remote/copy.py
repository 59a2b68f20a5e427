"""Copy files and folders to and from hosts over SFTP: each file arrives whole, and a broken copy resumes.

A run may train meanwhile: growing files are copied up to their first size, and files that disappear are left out.
"""

import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.remote.connect import Connections, marked, skip_login_output
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.train.storage.folders import grows

if TYPE_CHECKING:
    import asyncssh

CHUNK_BYTES = 1 << 20
MAX_PASSES = 5
"""Over a folder in which files disappear, such as those of an old checkpoint."""
RECENT_S = 10.0
"""A file changed so shortly before may change again within the same second, and SFTP knows whole seconds; clocks may
differ a bit. Its copy gets a time one second earlier, so the next `copy` repeats it."""
SFTP_SERVER = "/usr/lib/openssh/sftp-server"
"""On Debian and Ubuntu."""
OnBytes = Callable[[int], None]
"""Called with the bytes of each part that was copied or had arrived before."""


def split_location(text: str) -> tuple[str | None, str]:
    """Split `WHERE:path`. WHERE is None for a local path, whose first colon follows a second slash, if any."""
    where, colon, path = text.partition(":")
    if not colon or "/" in where.partition("/")[2] or where.startswith((".", "/", "~")) or not where:
        return None, text
    return where, path.removeprefix("~/")


def base_name(path: str) -> str:
    """Return the last name of a path on a host; empty if it has none."""
    name = path.rstrip("/").rpartition("/")[2]
    return "" if name in (".", "..") else name


async def upload(
    connections: Connections, host: Host, source: Path, target: str, on_bytes: OnBytes = lambda count: None
) -> int:
    """Copy a file or folder to a host, into the target if that is a folder or ends in /. Return the number of files."""

    async def copy(sftp: "asyncssh.SFTPClient") -> int:
        to = target or "."
        if to.endswith("/") or await sftp.isdir(to):
            await sftp.makedirs(to, exist_ok=True)
            to = f"{to.rstrip('/')}/{source.name}"
        if not source.is_dir():
            await _upload_file(sftp, source, to, on_bytes)
            return 1
        return await _repeat_until_whole(lambda: copy_folder(sftp, to))

    async def copy_folder(sftp: "asyncssh.SFTPClient", to: str) -> tuple[int, bool]:
        count, removed = 0, list[OSError]()
        for folder, _, names in os.walk(source, onerror=removed.append):
            inside = f"{to}/{Path(folder).relative_to(source)}".removesuffix("/.")
            await sftp.makedirs(inside, exist_ok=True)
            for name in sorted(names):
                try:
                    await _upload_file(sftp, Path(folder) / name, f"{inside}/{name}", on_bytes)
                    count += 1
                except FileNotFoundError as error:
                    removed.append(error)
        return count, not removed

    return await _with_sftp(connections, host, copy)


async def download(
    connections: Connections, host: Host, source: str, target: Path, on_bytes: OnBytes = lambda count: None
) -> int:
    """Copy a file or folder from a host, into the target if that is a folder. Return the number of files."""

    async def copy(sftp: "asyncssh.SFTPClient") -> int:
        if not await sftp.exists(source or "."):
            raise InputError(f"{host.label} has no file or folder {source}")
        to = target / base_name(source) if target.is_dir() else target
        if not await sftp.isdir(source or "."):
            await _download_file(sftp, source, to, on_bytes)
            return 1
        return await _repeat_until_whole(lambda: copy_folder(sftp, to))

    async def copy_folder(sftp: "asyncssh.SFTPClient", to: Path) -> tuple[int, bool]:
        count, removed = 0, list[str]()
        async for path, relative in _walk(sftp, source.rstrip("/") or ".", removed):
            try:
                await _download_file(sftp, path, to / relative, on_bytes)
                count += 1
            except asyncssh.SFTPNoSuchFile:
                removed.append(path)
        return count, not removed

    return await _with_sftp(connections, host, copy)


async def _repeat_until_whole(copy_folder: Callable[[], Awaitable[tuple[int, bool]]]) -> int:
    """Copy a folder until no file is removed meanwhile; return the number of files.

    copy_folder: returns that number, and whether all listed files were there.
    """
    count = 0
    for _ in range(MAX_PASSES):
        count, is_whole = await copy_folder()
        if is_whole:
            break
    return count


async def _with_sftp(
    connections: Connections, host: Host, copy: "Callable[[asyncssh.SFTPClient], Awaitable[int]]"
) -> int:
    import asyncssh

    connection = await connections.to(host)
    try:
        sftp = await _open_sftp(connection)
        try:
            return await copy(sftp)
        finally:
            sftp.exit()
    except (asyncssh.Error, OSError) as error:
        if connection.is_closed() or isinstance(error, ConnectionError | asyncssh.ConnectionLost):
            raise HostUnreachable(host, "was lost; copied files stay, and the same command resumes") from error
        if isinstance(error, asyncssh.Error):
            raise RunFailed(f"{host.label}: {error.reason or type(error).__name__}") from error
        raise


class _WithSession:
    """A connection whose next session is already open."""

    def __init__(self, connection: "asyncssh.SSHClientConnection", session: object):
        self._connection, self._session = connection, session

    async def open_session(self, **options: object) -> object:
        return self._session

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


async def _open_sftp(connection: "asyncssh.SSHClientConnection") -> "asyncssh.SFTPClient":
    """Start SFTP after what the login shell prints, which precedes the output of SSH's own subsystem too."""
    line = f"[ -x {SFTP_SERVER} ] && echo found && exec {SFTP_SERVER}"
    session = await connection.open_session(marked(line), encoding=None)
    _, reader, _ = session
    await skip_login_output(reader)
    if await reader.readline() != b"found\n":
        return await connection.start_sftp_client()
    with_session = cast("asyncssh.SSHClientConnection", _WithSession(connection, session))
    return await type(connection).start_sftp_client(with_session)


async def _walk(sftp: "asyncssh.SFTPClient", folder: str, removed: list[str]) -> AsyncIterator[tuple[str, str]]:
    """Yield all files below a folder: their path, and their path relative to the folder.

    removed: gets the folders that were removed meanwhile.
    """
    import asyncssh

    pending = [""]
    while pending:
        inside = pending.pop()
        try:
            entries = await sftp.readdir(f"{folder}/{inside}")
        except asyncssh.SFTPNoSuchFile:
            removed.append(inside)
            continue
        for entry in sorted(entries, key=lambda entry: str(entry.filename)):
            name = str(entry.filename)
            if name in (".", ".."):
                continue
            if "/" in name or "\0" in name:  # the host would choose where we write
                raise RunFailed(f"a host sent an invalid file name {name!r} in {folder}/{inside}")
            if stat.S_ISDIR(entry.attrs.permissions or 0):
                pending.append(f"{inside}{name}/")
            else:
                yield f"{folder}/{inside}{name}", f"{inside}{name}"


async def _upload_file(sftp: "asyncssh.SFTPClient", source: Path, target: str, on_bytes: OnBytes) -> None:
    import asyncssh

    try:
        await _try_upload(sftp, source, target, on_bytes)
    except asyncssh.SFTPNoSuchFile:  # another copy of the same file was faster, and has renamed it
        await _try_upload(sftp, source, target, lambda count: None)


async def _try_upload(sftp: "asyncssh.SFTPClient", source: Path, target: str, on_bytes: OnBytes) -> None:
    import asyncssh

    wanted = source.stat()
    size, modified = wanted.st_size, int(wanted.st_mtime)
    try:
        present = await sftp.stat(target)
    except asyncssh.SFTPNoSuchFile:
        present = None
    is_recent = time.time() - modified < RECENT_S
    if present is not None and (present.size, present.mtime) == (size, modified) and not is_recent:
        on_bytes(size)
        return
    modified -= is_recent
    part = _part_path(target, size, modified)
    is_resumed = await sftp.exists(part)
    offset = (await sftp.stat(part)).size or 0 if is_resumed and not is_recent else 0
    on_bytes(offset)
    # Written at offsets, not appended: two copies of the same file write the same bytes to the same places.
    with source.open("rb") as file:
        async with sftp.open(part, "r+b" if is_resumed else "wb") as out:
            await out.seek(offset)
            file.seek(offset)
            while chunk := file.read(_next_bytes(str(source), size, file.tell())):
                await out.write(chunk)
                on_bytes(len(chunk))
    copied = (await sftp.stat(part)).size or 0
    if copied != size:
        await sftp.remove(part)
        raise _changed(str(source), size, copied)
    mode = stat.S_IMODE(wanted.st_mode)
    await sftp.setstat(part, asyncssh.SFTPAttrs(permissions=mode, atime=modified, mtime=modified))
    await sftp.posix_rename(part, target)


async def _download_file(sftp: "asyncssh.SFTPClient", source: str, target: Path, on_bytes: OnBytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = await sftp.stat(source)
    size, modified = wanted.size or 0, wanted.mtime or 0
    is_recent = time.time() - modified < RECENT_S
    present = (target.stat().st_size, int(target.stat().st_mtime)) if target.is_file() else None
    if present == (size, modified) and not is_recent:
        on_bytes(size)
        return
    modified -= is_recent
    part = Path(_part_path(str(target), size, modified))
    is_resumed = part.exists()
    offset = part.stat().st_size if is_resumed and not is_recent else 0
    on_bytes(offset)
    async with sftp.open(source, "rb") as file:
        with part.open("r+b" if is_resumed else "wb") as out:
            out.seek(offset)
            await file.seek(offset)
            while chunk := await file.read(_next_bytes(source, size, out.tell())):
                out.write(cast(bytes, chunk))
                on_bytes(len(chunk))
    copied = part.stat().st_size
    if copied != size:
        part.unlink()
        raise _changed(source, size, copied)
    part.chmod(stat.S_IMODE(wanted.permissions or 0o644))
    os.utime(part, (modified, modified))
    part.replace(target)


def _next_bytes(path: str, size: int, position: int) -> int:
    """Return how much to read of a file: nothing beyond the `size` that it had, if it only grows."""
    return min(CHUNK_BYTES, size - position) if grows(Path(path)) else CHUNK_BYTES


def _changed(path: str, size: int, copied: int) -> RunFailed:
    return RunFailed(f"{path} changed during the copy, from {size:,} bytes to {copied:,}; run the same command again")


def _part_path(path: str, size: int, modified: int) -> str:
    """Return where an incomplete file lies; another version of the file has another path."""
    return f"{path}.{size}-{modified}.part"

"""Receive a tree on a machine, with its own Python 3 only: compare it, then write different files.

The first line of input names the folder, in hexadecimal, and the tree's digest; other lines are JSON. Each file is
replaced atomically. An index lists what was received, also after a broken transfer, so that the next one resumes.
Modules that only a change needs are imported late: an unchanged tree costs less than importing `json`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import io
    from typing import IO, Any

    Row = list[Any]
    """A file: digest, kind, and its `read_stat`; of a tree: digest, kind, size."""

STDIN: io.BufferedReader = sys.stdin.buffer  # type: ignore[assignment]
CHUNK_BYTES = 1 << 18
LOCK_TIMEOUT_S = 10.0
PART = ".tpuswarm-part"
"""An incomplete file, in the tree so that it is on the same disk."""


class SenderLost(Exception):
    """The sender has ended, or its connection."""


def main() -> None:
    """Receive one tree."""
    packed, digest = STDIN.readline().decode().split()
    name, folder = os.fsdecode(bytes.fromhex(packed)), os.path.expanduser("~/.tpuswarm/trees")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    root, index = os.path.expanduser("~/" + name), os.path.join(folder, name + ".tree")
    with open(index + ".lock", "w") as lock:
        if not wait_for(lock):
            answer(busy=True)
            return
        last_digest, received = read_index(index)
        files, edited = verify(root, received)
        if last_digest == digest and not edited and len(files) == len(received):
            print('{"same": true}', flush=True)
            return
        answer(same=False)
        tree = read_request()
        created, more_edited = verify(root, {path: [] for path in tree if path not in files})
        files.update(created)
        send = [path for path, row in tree.items() if files.get(path, [])[:2] != row[:2]]
        delete = sorted(path for path in files if path not in tree)
        changed = {*send, *delete}
        answer(send=send, delete=delete, edited=sorted(path for path in edited + more_edited if path in changed))
        keep = read_request()["keep"]
        part, path, done, last_digest = os.path.join(root, PART), root, 0, ""
        result: dict[str, Any] | None = None
        try:
            os.makedirs(root, exist_ok=True)
            for path in delete:
                if path not in keep:
                    remove(root, path)
                    del files[path]
            content = Content()
            for path in send:
                if path not in keep:
                    files.pop(path, None)
                    content_digest, kind, size = tree[path]
                    content.write(part, content_digest, size)
                    files[path] = put(root, part, path, content_digest, kind)
                    done += 1
            for path in keep:  # the next sync must find them edited again
                files.pop(path, None)
                if path in received:
                    files[path] = received[path]
            last_digest, result = "" if keep else digest, {"done": done}
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            result = {"error": error.strerror or str(error), "full": is_full, "path": path, "done": done}
        except SenderLost:
            pass
        finally:
            if os.path.lexists(part):
                os.unlink(part)
            write_index(index, last_digest, files)
        if result is not None:  # after the index is written: the sender may sync again at once
            answer(**result)


def wait_for(lock: IO[str]) -> bool:
    """Take the lock; return False if another sync holds it for long."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def answer(**values: Any) -> None:
    import json

    print(json.dumps(values), flush=True)


def read_request() -> dict[str, Any]:
    import json

    line = STDIN.readline()
    if not line:
        sys.exit()
    return dict(json.loads(line))


def read_index(index: str) -> tuple[str, dict[str, Row]]:
    """Return the digest of the tree that was received completely, if any, and the received files."""
    files: dict[str, Row] = {}
    try:
        with open(index, "rb") as file:
            digest, *rows = os.fsdecode(file.read()).split("\0")
        for row in rows:
            content_digest, kind, size, changed, inode, mode, path = row.split(" ", 6)
            files[path] = [content_digest, kind, int(size), int(changed), int(inode), int(mode)]
    except (OSError, ValueError):  # missing or damaged
        return "", {}
    return digest, files


def write_index(index: str, digest: str, files: dict[str, Row]) -> None:
    rows = (" ".join(map(str, (*row, path))) for path, row in files.items())
    try:
        with open(index + ".part", "wb") as file:
            file.write(os.fsencode("\0".join((digest, *rows))))
        os.replace(index + ".part", index)
    except OSError:  # a full disk: with the old index, the next sync reads the new files once more
        if os.path.exists(index + ".part"):
            os.unlink(index + ".part")


def verify(root: str, received: dict[str, Row]) -> tuple[dict[str, Row], list[str]]:
    """Return the current rows of existing files, and the paths of edited files."""
    files: dict[str, Row] = {}
    edited: list[str] = []
    prefix = root + "/"
    for path, row in received.items():
        try:
            if read_stat(prefix + path) == row[2:]:
                files[path] = row
                continue
            files[path] = read_row(prefix + path)
        except OSError:
            continue  # it was deleted, or is no file; writing it reports why
        if files[path][:2] != row[:2]:
            edited.append(path)
    return files, edited


def read_stat(full: str) -> list[int]:
    about = os.lstat(full)
    return [about.st_size, about.st_ctime_ns, about.st_ino, about.st_mode]


def read_row(full: str) -> Row:
    import hashlib

    about, digest = read_stat(full), hashlib.sha256()
    if os.path.islink(full):
        digest.update(os.fsencode(os.readlink(full)))
        return [digest.hexdigest(), "link", *about]
    if not os.path.isfile(full):
        raise OSError("not a file")
    with open(full, "rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return [digest.hexdigest(), "program" if os.access(full, os.X_OK) else "file", *about]
            digest.update(chunk)


class Content:
    """The contents of all sent files, concatenated and compressed, from standard input."""

    def __init__(self) -> None:
        import zlib

        self.decompressor, self.buffer, self.error = zlib.decompressobj(), b"", zlib.error

    def write(self, part: str, digest: str, size: int) -> None:
        """Write the next file to `part`."""
        import hashlib

        actual, left = hashlib.sha256(), size
        with open(part, "wb") as file:
            while left:
                chunk = self.read(left)
                actual.update(chunk)
                file.write(chunk)
                left -= len(chunk)
        if actual.hexdigest() != digest:
            raise OSError("the file arrived damaged")

    def read(self, max_bytes: int) -> bytes:
        while not self.buffer:
            packed = self.decompressor.unconsumed_tail or STDIN.read1(CHUNK_BYTES)
            if not packed:
                raise SenderLost
            try:
                self.buffer = self.decompressor.decompress(packed, CHUNK_BYTES)
            except self.error:
                raise SenderLost from None
        chunk, self.buffer = self.buffer[:max_bytes], self.buffer[max_bytes:]
        return chunk


def put(root: str, part: str, path: str, digest: str, kind: str) -> Row:
    """Move a complete file to its path."""
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    if kind == "link":
        with open(part, "rb") as file:
            target = file.read()
        os.unlink(part)
        os.symlink(target, part)
    elif kind == "program":
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o777 & ~mask)
    if os.path.isdir(full) and not os.path.islink(full):
        os.rmdir(full)
    os.replace(part, full)
    return [digest, kind, *read_stat(full)]


def remove(root: str, path: str) -> None:
    """Delete a file, and folders that are empty without it."""
    full = os.path.join(root, path)
    if os.path.lexists(full):
        os.unlink(full)
    folder = os.path.dirname(full)
    while folder != root and os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
        folder = os.path.dirname(folder)


if __name__ == "__main__":
    main()

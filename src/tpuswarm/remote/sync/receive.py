"""Runs on a machine, with nothing but its own Python 3: compares a tree with what was sent before, and takes the rest.

The first line names the folder, in hexadecimal, and the tree; all others are JSON. Each file is there whole or as it
was; what came of a broken transfer is noted, so that the next one goes on from there. Where nothing has changed, less
is computed than it costs to import `json`: what only a change needs is imported where it is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time

TYPED = False
if TYPED:
    import io
    from typing import IO, Any

STDIN: io.BufferedReader = sys.stdin.buffer  # type: ignore[assignment]
CHUNK = 1 << 18
PATIENCE_S = 10.0
PART = ".tpuswarm-part"
"""Where a file is written before it is whole: in the tree, so that it is on the same disk."""


class Stopped(Exception):
    """The other end has gone."""


def main() -> None:
    """One transfer."""
    packed, asked = STDIN.readline().decode().split()
    name, ours = os.fsdecode(bytes.fromhex(packed)), os.path.expanduser("~/.tpuswarm/trees")
    os.makedirs(ours, mode=0o700, exist_ok=True)
    root, index = os.path.expanduser("~/" + name), os.path.join(ours, name + ".tree")
    with open(index + ".lock", "w") as lock:
        if not taken(lock):
            say(busy=True)
            return
        before, known = read(index)
        files, edited = verified(root, known)
        if before == asked and not edited and len(files) == len(known):
            print('{"same": true}', flush=True)
            return
        import json

        say(files={path: each[:2] for path, each in files.items()}, edited=edited)
        line = STDIN.readline()
        if not line:
            return
        wanted = json.loads(line)
        if "look" in wanted:  # at what the tree has and nobody sent: it may have been made here
            made = there(root, wanted["look"])
            say(files={path: each[:2] for path, each in made.items()})
            files.update(made)
            line = STDIN.readline()
            if not line:
                return
            wanted = json.loads(line)
        os.makedirs(root, exist_ok=True)
        tree, part, done, where = None, os.path.join(root, PART), 0, root
        answer: dict[str, Any] | None = None
        try:
            for path in wanted["delete"]:
                where = path
                remove(root, path)
                files.pop(path, None)
            content = Content()
            for path, (digest, size, kind) in wanted["send"]:
                where = path
                files.pop(path, None)
                content.write(part, digest, size)
                files[path] = put(root, part, path, digest, kind)
                done += 1
            for path in wanted["leave"]:  # it is another file than the tree has, and has to be known as one
                if path in known:
                    files[path] = known[path]
                else:
                    files.pop(path, None)
            tree = None if wanted["leave"] else asked
            answer = {"done": done}
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            answer = {"error": error.strerror or str(error), "full": full, "path": where, "done": done}
        except Stopped:
            pass
        finally:
            if os.path.lexists(part):
                os.unlink(part)
            write(index, tree, files)
        if answer is not None:  # after the list is written: whoever is answered may look for it, or sync again
            say(**answer)


def taken(lock: IO[str]) -> bool:
    """Whether nobody else sends to this tree, or has ended soon."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)


def say(**what: Any) -> None:
    """Answer."""
    import json

    print(json.dumps(what), flush=True)


def read(index: str) -> tuple[str | None, dict[str, list[Any]]]:
    """What was sent before: the tree, where all of it was, and of each file digest, kind and what `look` saw."""
    files: dict[str, list[Any]] = {}
    try:
        with open(index, "rb") as file:
            tree, *rows = os.fsdecode(file.read()).split("\0")
        for row in rows:
            digest, kind, size, written, inode, mode, path = row.split(" ", 6)
            files[path] = [digest, kind, int(size), int(written), int(inode), int(mode)]
    except (OSError, ValueError):  # there was nothing, or what is there is damaged
        return None, {}
    return tree or None, files


def write(index: str, tree: str | None, files: dict[str, list[Any]]) -> None:
    """Note what is there now."""
    rows = (" ".join(map(str, (*about, path))) for path, about in files.items())
    try:
        with open(index + ".part", "wb") as file:
            file.write(os.fsencode("\0".join((tree or "", *rows))))
        os.replace(index + ".part", index)
    except OSError:  # a full disk: by the list of before, what was sent now is looked at once more the next time
        if os.path.exists(index + ".part"):
            os.unlink(index + ".part")


def verified(root: str, files: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """Of the files that were sent those that are still there, as they are now; and which were changed."""
    found: dict[str, list[Any]] = {}
    edited: list[str] = []
    at = root + "/"
    for path, about in files.items():
        full = at + path
        try:
            now = look(full)
            if now == about[2:]:
                found[path] = about
                continue
            digest, kind = hashed(full)
        except OSError:
            continue  # it was deleted here, or a folder has its name
        if [digest, kind] != files[path][:2]:
            edited.append(path)
        found[path] = [digest, kind, *now]
    return found, edited


def there(root: str, paths: list[str]) -> dict[str, list[Any]]:
    """Those of the files that are there, as they are."""
    found: dict[str, list[Any]] = {}
    for path in paths:
        full = root + "/" + path
        try:
            if os.path.islink(full) or os.path.isfile(full):
                found[path] = [*hashed(full), *look(full)]
        except OSError:
            continue  # it cannot be read, and what is to be written there says why
    return found


def look(full: str) -> list[int]:
    """What tells an unchanged file without reading it."""
    about = os.lstat(full)
    return [about.st_size, about.st_mtime_ns, about.st_ino, about.st_mode]


def hashed(full: str) -> tuple[str, str]:
    """SHA-256 of what is in a file, and its kind."""
    import hashlib

    if os.path.islink(full):
        return hashlib.sha256(os.fsencode(os.readlink(full))).hexdigest(), "link"
    digest = hashlib.sha256()
    with open(full, "rb") as file:
        while True:
            chunk = file.read(CHUNK)
            if not chunk:
                return digest.hexdigest(), "program" if os.access(full, os.X_OK) else "file"
            digest.update(chunk)


class Content:
    """What is in the files, one after the other, from standard input."""

    def __init__(self) -> None:
        import zlib

        self.open, self.left, self.broken = zlib.decompressobj(), b"", zlib.error

    def write(self, part: str, digest: str, size: int) -> None:
        """The next file, as `part`."""
        import hashlib

        seen, left = hashlib.sha256(), size
        with open(part, "wb") as file:
            while left:
                chunk = self.next(left)
                seen.update(chunk)
                file.write(chunk)
                left -= len(chunk)
        if seen.hexdigest() != digest:
            raise OSError("what arrived is not what was sent")

    def next(self, most: int) -> bytes:
        """Some bytes of it."""
        while not self.left:
            packed = self.open.unconsumed_tail or STDIN.read1(CHUNK)
            if not packed:
                raise Stopped
            try:
                self.left = self.open.decompress(packed, CHUNK)
            except self.broken:
                raise Stopped from None
        chunk, self.left = self.left[:most], self.left[most:]
        return chunk


def put(root: str, part: str, path: str, digest: str, kind: str) -> list[Any]:
    """Give a file that is whole its name."""
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
    return [digest, kind, *look(full)]


def remove(root: str, path: str) -> None:
    """A file, and the folders that are empty without it."""
    full = os.path.join(root, path)
    if os.path.lexists(full):
        os.unlink(full)
    folder = os.path.dirname(full)
    while folder != root and os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
        folder = os.path.dirname(folder)


if __name__ == "__main__":
    main()

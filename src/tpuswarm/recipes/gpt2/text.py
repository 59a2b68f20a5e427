"""Where text comes from: a file, a folder or a URL that fsspec reads, or the Python standard library's own source."""

import codecs
import hashlib
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import fsspec

from tpuswarm.errors import InputError
from tpuswarm.train.files import google_storage

PIECE = 2**22
"""Bytes read at a time."""

SLOW = 1.0
"""Seconds after which it is said what is waited for."""

ANSWER = 5.0
"""Seconds for a server to take a connection."""

Advance = Callable[[int], None]
"""Told how many bytes were read since the last call."""


@dataclass(frozen=True)
class Text:
    """Files of one file system, in reading order."""

    name: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    system: Any
    key: str
    """Changes when a file is added, removed or written: path, size and time or version of each."""

    def pieces(self, advance: Advance | None = None) -> Iterator[str]:
        """The whole text, a few megabytes at a time; InputError for a file that is not UTF-8 text."""
        for path in self.files:
            decoder = codecs.getincrementaldecoder("utf-8")()
            with _reading(path), self.system.open(path, "rb") as file:
                while True:
                    raw = file.read(PIECE)
                    if b"\0" in raw:
                        raise InputError(f"{path} is binary, not text; use --tokenizer bytes or other --data")
                    try:
                        piece = decoder.decode(raw, final=not raw)
                    except UnicodeDecodeError as error:
                        raise InputError(
                            f"{path} is not UTF-8 text ({error.reason}); use --tokenizer bytes or other --data"
                        ) from error
                    if advance:
                        advance(len(raw))
                    if piece:
                        yield piece
                    if not raw:
                        break

    def raw_pieces(self, advance: Advance | None = None) -> Iterator[bytes]:
        """The whole content as bytes."""
        for path in self.files:
            with _reading(path), self.system.open(path, "rb") as file:
                while raw := file.read(PIECE):
                    if advance:
                        advance(len(raw))
                    yield raw


def open_text(place: str | None) -> Text:
    """The text at a path or URL; None is the standard library's source.

    A folder is all its files in the order of their paths, hidden ones left out. Raises InputError where there is
    nothing, and for an empty file or folder.
    """
    if place is None:
        return _standard_library()
    with _reading(place), _slow(f"waiting for {place}"):
        system, path = _system(place)
        if _is_folder(system, path):
            root = path.rstrip("/") + "/"
            found = sorted(file for file in system.find(path) if not _hidden(file.removeprefix(root)))
        else:
            found = [path]
        infos = [system.info(file) for file in found]
    return _text(place, system, infos)


def _system(place: str) -> tuple[Any, str]:
    """The file system that a place is on, and its path there."""
    if place.startswith(("gs://", "gcs://")):
        _require_answer(place)
        system = google_storage(place)
        return system, system._strip_protocol(place)
    return fsspec.core.url_to_fs(str(Path(place).expanduser()) if "://" not in place else place)


def _require_answer(place: str) -> None:
    """Raise InputError where Google Cloud Storage is not to be reached: gcsfs would try for more than a minute."""
    if getproxies().get("https"):
        return  # what answers is asked through another machine
    server = urlsplit(os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com")
    try:
        socket.create_connection((server.hostname, server.port or 443), timeout=ANSWER).close()
    except OSError as error:
        raise InputError(
            f"{place} cannot be read: {server.hostname} does not answer ({error.strerror or error}); is this machine "
            "connected to the internet?"
        ) from error


def _is_folder(system: Any, path: str) -> bool:
    if "gs" in system.protocol:  # its isdir takes a bucket that does not answer for a file, after a minute of trying
        return system.info(path)["type"] == "directory"
    return system.isdir(path)


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Turn what can go wrong while a place is looked for or read into InputError."""
    try:
        yield
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"there is no file or folder {place}; --data takes a path or URL") from error
    except Exception as error:  # each library behind fsspec has types of its own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{place} cannot be read: {reason}") from error


@contextmanager
def _slow(text: str) -> Iterator[None]:
    """Say what is waited for, where it takes long: gcsfs tries for a minute before it gives up."""
    timer = threading.Timer(SLOW, lambda: sys.stderr.write(f"{text} …\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _standard_library() -> Text:
    """Python's top-level modules: a few megabytes of real text that every machine with Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(f"Python's standard library in {folder} has no source files; give text with --data")
    system = fsspec.filesystem("file")
    return _text("the Python standard library", system, [system.info(str(file)) for file in files])


def _text(name: str, system: Any, infos: list[dict[str, Any]]) -> Text:
    infos = [info for info in infos if info["size"] != 0]  # a server may not say how long a file is
    if not infos:
        raise InputError(f"{name} is empty; --data needs text")
    marks = [[info["name"], info["size"], str(_version(info))] for info in infos]
    key = hashlib.sha256(repr(marks).encode()).hexdigest()
    return Text(name, tuple(i["name"] for i in infos), tuple(i["size"] or 0 for i in infos), system, key)


def _version(info: dict[str, Any]) -> Any:
    """What a file system gives that changes with a file's content; its size is known besides."""
    known = ("mtime", "etag", "ETag", "generation", "md5Hash", "updated", "LastModified")
    return [info[name] for name in known if name in info]

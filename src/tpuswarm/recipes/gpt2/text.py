"""Where text comes from: a file, a folder, a bucket, a URL that fsspec reads, or Python's own source."""

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec

from tpuswarm.errors import InputError
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.storage.stored_files import StoredFiles

PIECE = 2**22
"""Bytes read at a time."""

NO_FIELD = "none"
"""In place of a field's name: JSON lines are read as they are."""
LINES = ".jsonl"
"""Ends the name of a file with one JSON object a line."""

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
    """Changes when a file is added, removed or written: path, size and time or version of each; and with `field`."""
    field: str | None = None
    """Where the text is in the objects of JSON lines; None: files of these are text as any other."""

    @property
    def has_lines(self) -> bool:
        """Whether some of it is in JSON lines."""
        return self.field is not None and any(path.endswith(LINES) for path in self.files)

    @property
    def parted(self) -> bool:
        """Whether it is more than one document: a file, or a line of JSON lines."""
        return len(self.files) > 1 or self.has_lines

    def pieces(self, advance: Advance | None = None, end: str = "") -> Iterator[str]:
        """The whole text, a few megabytes at a time, with `end` between two documents.

        Without one, files follow one another as they are; with JSON lines among them a line's end is between documents.
        Raises InputError for a file that is not UTF-8 text, and for lines that are not what they should be.
        """
        between = end or "\n" * self.has_lines
        for index, path in enumerate(self.files):
            if index and between:
                yield between
            lines = self.field is not None and path.endswith(LINES)
            yield from self._lines(path, between, advance) if lines else self._plain(path, advance)

    def raw_pieces(self, advance: Advance | None = None) -> Iterator[bytes]:
        """The same as bytes, of whatever kind; of JSON lines the text alone."""
        if self.has_lines:
            yield from (piece.encode() for piece in self.pieces(advance))
            return
        for path in self.files:
            with looking_at(path), self.system.open(path, "rb") as file:
                while raw := file.read(PIECE):
                    if advance:
                        advance(len(raw))
                    yield raw

    def _plain(self, path: str, advance: Advance | None) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with looking_at(path), self.system.open(path, "rb") as file:
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

    def _lines(self, path: str, between: str, advance: Advance | None) -> Iterator[str]:
        """The documents of a file, many in one piece: a tokenizer is slow on short ones."""
        assert self.field is not None
        held, size, first = list[str](), 0, True
        with looking_at(path), self.system.open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if advance:
                    advance(len(line))
                document = _document(line, self.field, f"{path}:{number}") if line.strip() else ""
                if document:
                    held.append(document if first else between + document)
                    size, first = size + len(document), False
                if size >= PIECE:
                    yield "".join(held)
                    held, size = [], 0
        if held:
            yield "".join(held)


def _document(line: bytes, field: str, where: str) -> str:
    """The text in a line of JSON lines."""
    as_they_are = f"--json-field {NO_FIELD} to train on the lines as they are"
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); mend or remove this line, or give {as_they_are}") from error
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        if not isinstance(found, dict):
            has = "the line is no object"
        elif field in found:
            has = f"it is {json.dumps(found[field])[:40]}"
        else:
            has = f"the line has {', '.join(list(found)[:8]) or 'no fields'}"
        raise InputError(
            f"{where} has no text in a field {field!r} ({has}); give its field with --json-field, or {as_they_are}"
        )
    document: str = found[field]
    try:
        document.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair of UTF-16, which is no character
        raise InputError(f"{where} is not Unicode text ({error.reason}); mend or remove this line") from error
    return document


def open_text(place: str | None, field: str | None = None, *, empty: bool = False) -> Text:
    """The text at a path or URL; None is the standard library's source.

    A folder is all its files in the order of their paths, hidden ones left out. field: where the text is in the objects
    of JSON lines. empty: files of no bytes count, too. Raises InputError where there is nothing, and for an empty file
    or folder.
    """
    if place is None:
        return _standard_library()
    with looking_at(place), waiting(f"waiting for {place}"):
        if place.startswith(("gs://", "gcs://")):
            system: Any = StoredFiles(place)
            root, found = f"{system.root}/", system.names
        else:
            system, path = fsspec.core.url_to_fs(str(Path(place).expanduser()) if "://" not in place else place)
            root = path.rstrip("/") + "/"
            found = system.find(path) if system.isdir(path) else [path]
        infos = [system.info(file) for file in sorted(found) if not _hidden(file.removeprefix(root))]
    return _text(place, system, infos, field, empty)


@contextmanager
def looking_at(place: str) -> Iterator[None]:
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


def _text(name: str, system: Any, infos: list[dict[str, Any]], field: str | None = None, empty: bool = False) -> Text:
    infos = [info for info in infos if empty or info["size"] != 0]  # a server may not say how long a file is
    if not infos:
        raise InputError(f"{name} is empty; give --data something to train on")
    marks: list[Any] = [[info["name"], info["size"], str(_version(info))] for info in infos]
    text = Text(name, tuple(i["name"] for i in infos), tuple(i["size"] or 0 for i in infos), system, "", field)
    marks += [field] * text.has_lines
    return replace(text, key=hashlib.sha256(repr(marks).encode()).hexdigest())


def _version(info: dict[str, Any]) -> Any:
    """What a file system gives that changes with a file's content; its size is known besides."""
    known = ("mtime", "etag", "ETag", "generation", "md5Hash", "updated", "LastModified")
    return [info[name] for name in known if name in info]

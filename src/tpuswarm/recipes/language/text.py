"""Read training text: a file, a folder, a bucket, a URL that fsspec reads, or Python's own source."""

import codecs
import hashlib
import json
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.implementations.local import LocalFileSystem

from tpuswarm.errors import InputError
from tpuswarm.recipes.language import parquet
from tpuswarm.recipes.language.formats import decompressed
from tpuswarm.train.data.contents import file_identity
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.storage.stored_files import StoredFiles

SEARCHED_BYTES = 1000
PIECE_BYTES = 2**22
"""Bytes read at a time."""
NO_FIELD = "none"
"""Instead of a field's name: read files with rows as plain text."""
MESSAGES, PROMPT, COMPLETION, TOOLS = "messages", "prompt", "completion", "tools"
"""Fields of a row that holds a conversation, or a prompt and its completion."""
ROWS = re.compile(rf"\.jsonl(\.(gz|bz2|xz|zst))?$|{re.escape(parquet.ENDING)}$")
"""Names of files with rows: JSON lines, or Parquet."""
CONTENT_VALIDATORS = {
    *("etag", "generation", "md5", "md5hash", "md5checksum", "contentmd5", "digest", "contenthash", "crc32c"),
    *("sha", "sha256", "blobid", "hex"),
}
"""Names under which fsspec's file systems tell the version of a file, without case and signs."""
TIME_VALIDATORS = {
    *("mtime", "lastmodified", "modified", "modifiedtime", "modificationtime", "servermodified", "updated"),
}
"""Names of the time of the last change."""
SETTLED_S = 60.0
"""A time of change counts once it is this old: it may be rounded to seconds, and clocks differ (RFC 7232, 2.2.2)."""

Advance = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True)
class Text:
    """Files of one file system, in reading order.

    key: a digest of the path, size and version of each file, and of `field`; None if some file has no version, so that
    only reading it tells whether it has changed. field: the field of a row with the text; None reads all files as plain
    text.
    """

    name: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    system: Any
    key: str | None
    field: str | None = None

    @property
    def has_rows(self) -> bool:
        """Whether a field of rows is read."""
        return any(map(self._is_rows, self.files))

    @property
    def has_documents(self) -> bool:
        """Whether it has several documents: files, or rows."""
        return len(self.files) > 1 or self.has_rows

    def pieces(self, advance: Advance | None = None, end: str = "") -> Iterator[str]:
        """Yield the whole text, a few megabytes at a time, with `end` between documents.

        Without `end` a line break separates rows, and nothing separates files. Raises InputError for a file that
        is not UTF-8 text, and for invalid rows.
        """
        separator = end or "\n" * self.has_rows
        for index, path in enumerate(self.files):
            if index and separator:
                yield separator
            is_rows = self._is_rows(path)
            yield from self._read_rows(path, separator, advance) if is_rows else self._read_plain(path, advance)

    def raw_pieces(self, advance: Advance | None = None) -> Iterator[bytes]:
        """Yield the same as bytes, which need not be text; of rows only the text."""
        if self.has_rows:
            yield from (piece.encode() for piece in self.pieces(advance))
            return
        for path in self.files:
            with self.open(path, advance) as file:
                while raw := file.read(PIECE_BYTES):
                    yield raw

    @contextmanager
    def open(self, path: str, advance: Advance | None = None) -> Iterator[BinaryIO]:
        """Open a file for reading, decompressed. Raise InputError if it cannot be read."""
        with input_errors(path), self.system.open(path, "rb") as file:
            yield decompressed(file, path, advance, PIECE_BYTES)

    @contextmanager
    def open_rows(self, path: str, advance: Advance | None = None) -> Iterator[Iterable[bytes]]:
        """Open the rows of a file, each as a JSON line. Raise InputError if it cannot be read."""
        if not path.endswith(parquet.ENDING):
            with self.open(path, advance) as file:
                yield file
            return
        columns = ("text", MESSAGES, PROMPT, COMPLETION, TOOLS) if self.field in (None, MESSAGES) else (self.field,)
        size = self.sizes[self.files.index(path)]
        with input_errors(path), self.system.open(path, "rb") as file:
            yield parquet.read_rows(file, path, columns, size, advance)

    def _is_rows(self, path: str) -> bool:
        return self.field is not None and ROWS.search(path) is not None

    def _read_plain(self, path: str, advance: Advance | None) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()  # without a byte-order mark
        with self.open(path, advance) as file:
            while True:
                raw = file.read(PIECE_BYTES)
                if encoding := _find_utf16(raw):
                    convert = f"iconv -f {encoding} -t UTF-8 {Path(path).name}"
                    raise InputError(f"{path} is {encoding}, not UTF-8 text: convert it with `{convert} > NEW`")
                if b"\0" in raw:
                    raise InputError(f"{path} is binary, not text; use --tokenizer bytes or other --data")
                try:
                    piece = decoder.decode(raw, final=not raw)
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path} is not UTF-8 text ({error.reason}); convert it with `iconv -f ENCODING -t UTF-8`, or "
                        "use --tokenizer bytes or other --data"
                    ) from error
                if piece:
                    yield piece
                if not raw:
                    break

    def _read_rows(self, path: str, separator: str, advance: Advance | None) -> Iterator[str]:
        """Yield many documents in one piece, because a tokenizer is slow on short ones."""
        assert self.field is not None
        documents, size, is_first = list[str](), 0, True
        with self.open_rows(path, advance) as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                document = _document(line, self.field, f"{path}:{number}") if line.strip() else ""
                if document:
                    documents.append(document if is_first else separator + document)
                    size, is_first = size + len(document), False
                if size >= PIECE_BYTES:
                    yield "".join(documents)
                    documents, size = [], 0
        if documents:
            yield "".join(documents)


def _find_utf16(raw: bytes) -> str:
    """Return the encoding if bytes begin with the mark of UTF-16, or every second one is zero; else an empty text."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    start = raw[:SEARCHED_BYTES]
    for name, zeros in (("UTF-16LE", start[1::2]), ("UTF-16BE", start[::2])):
        if zeros.count(0) > len(start) // 4:
            return name if start.count(0) == zeros.count(0) else ""
    return ""


def _document(line: bytes, field: str, where: str) -> str:
    plain_lines = f"--json-field {NO_FIELD} to train on the lines as they are"
    try:
        facts = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); fix or remove this line, or give {plain_lines}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get(field), str):
        if not isinstance(facts, dict):
            has = "the line is no object"
        elif field in facts:
            has = f"it is {json.dumps(facts[field])[:40]}"
        else:
            has = f"the line has {', '.join(list(facts)[:8]) or 'no fields'}"
        raise InputError(
            f"{where} has no text in a field {field!r} ({has}); give its field with --json-field, or {plain_lines}"
        )
    document: str = facts[field]
    try:
        document.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a UTF-16 pair
        raise InputError(f"{where} is not Unicode text ({error.reason}); fix or remove this line") from error
    return document


def open_text(place: str | None, field: str | None = None, *, empty: bool = False) -> Text:
    """Find the text at a path or URL; None is the standard library's source.

    A folder stands for its files, except hidden ones, sorted by path. field: the field of rows with the text.
    empty: include empty files. Raises InputError if there is nothing at `place`, or no text in it.
    """
    if place is None:
        return _standard_library()
    with input_errors(place), waiting(f"waiting for {place}"):
        if place.startswith(("gs://", "gcs://")):
            system: Any = StoredFiles(place)
            root, paths = f"{system.root}/", system.names
        else:
            system, path = fsspec.core.url_to_fs(str(Path(place).expanduser()) if "://" not in place else place)
            system.invalidate_cache()  # an earlier listing of this process
            root = path.rstrip("/") + "/"
            paths = system.find(path) if system.isdir(path) else [path]
        infos = [system.info(file) for file in sorted(paths) if not _is_hidden(file, root)]
    return _text(place, system, infos, field, empty)


def holds_conversations(place: str) -> bool:
    """Return whether the first row at a path or URL has messages, or a completion of a prompt, and no text."""
    try:
        text = open_text(place)
        path = next(path for path in text.files if ROWS.search(path))
        with text.open_rows(path) as lines:
            facts = json.loads(next(line for line in lines if line.strip()))
    except (InputError, StopIteration, ValueError):  # reading the data names the problem
        return False
    if not isinstance(facts, dict) or "text" in facts:
        return False
    return MESSAGES in facts or {PROMPT, COMPLETION} <= facts.keys()


@contextmanager
def input_errors(place: str) -> Iterator[None]:
    """Turn any error while `place` is found or read into InputError."""
    try:
        yield
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"there is no file or folder {place}; --data takes a path or URL") from error
    except EOFError as error:
        raise InputError(f"{place} is cut off; copy it again") from error
    except Exception as error:  # each library behind fsspec has its own types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{place} cannot be read: {reason}") from error


def _is_hidden(file: str, root: str) -> bool:
    return file.startswith(root) and any(part.startswith(".") for part in file.removeprefix(root).split("/"))


def _standard_library() -> Text:
    """Return Python's top-level modules: a few megabytes of text on every machine with Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(f"Python's standard library in {folder} has no source files; give text with --data")
    system = fsspec.filesystem("file")
    return _text("the Python standard library", system, [system.info(str(file)) for file in files])


def _text(name: str, system: Any, infos: list[dict[str, Any]], field: str | None = None, empty: bool = False) -> Text:
    infos = [info for info in infos if empty or info["size"] != 0]  # a server may leave the size out
    if not infos:
        raise InputError(f"{name} is empty; give --data something to train on")
    text = Text(name, tuple(i["name"] for i in infos), tuple(i["size"] or 0 for i in infos), system, None, field)
    versions = [_version(system, info) for info in infos]
    if None in versions:
        return text
    identity: list[Any] = [[info["name"], info["size"], version] for info, version in zip(infos, versions, strict=True)]
    identity += [field] * text.has_rows
    return replace(text, key=hashlib.sha256(repr(identity).encode()).hexdigest())


def _version(system: Any, info: dict[str, Any]) -> Any:
    """Return values that change with the content of a file; None if nothing tells that."""
    if isinstance(system, LocalFileSystem):
        return file_identity(Path(info["name"]))
    if isinstance(system, AbstractArchiveFileSystem):  # its times are those of the files that were packed
        return None
    found = {re.sub("[^a-z0-9]", "", name.lower()): value for name, value in info.items() if value}
    versions = {name: found[name] for name in sorted(found.keys() & (CONTENT_VALIDATORS | TIME_VALIDATORS))}
    is_known = any(
        not str(value).startswith("W/") if name in CONTENT_VALIDATORS else _age_s(value) > SETTLED_S
        for name, value in versions.items()
    )  # a weak ETag may stand for several contents
    return versions if is_known else None


def _age_s(changed: Any) -> float:
    """Return how long ago a time was; 0 if it has an unknown form."""
    if isinstance(changed, str):
        try:
            changed = parsedate_to_datetime(changed)
        except ValueError:
            try:
                changed = datetime.fromisoformat(changed)
            except ValueError:
                return 0.0
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    return time.time() - changed if isinstance(changed, int | float) else 0.0

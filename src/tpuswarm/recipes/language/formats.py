"""Decompress files, and refuse formats that are not text."""

import io
import re
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from fsspec.compression import compr

from tpuswarm.errors import InputError

HEAD_BYTES = 512
COMPRESSIONS = {
    "gzip": rb"\x1f\x8b\x08",
    "bz2": rb"BZh[1-9]1AY&SY",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # the second: a skippable frame (RFC 8878, section 3.1.2)
}
"""fsspec's name of a compression → how its files begin."""
DECOMPRESS = "compressed in a form that is not read; decompress it"
UNPACK = "an archive; unpack it, and give the folder"
PICKLE = "a Python pickle, not text; give the folder that nanoGPT prepared, or a text file"
LLM_C = "a file of llm.c's tokens; `tail -c +1025 FILE > train.bin` makes it one of nanoGPT's"
EXPORT = "a table, not text; write its text as JSON lines (pandas: to_json(FILE, orient='records', lines=True))"
UNREADABLE = {
    b"|".join(COMPRESSIONS.values()): "compressed twice; decompress it",
    rb"\x04\x22\x4d\x18|\xff\x06\0\0sNaPpY|\x1f\x9d|\x89LZO": DECOMPRESS,
    rb"PK\x03\x04|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|.{257}ustar": UNPACK,
    rb"PAR1\x15": "a Parquet table; end its name with .parquet",
    rb"ARROW1\0|\xff{4}..\0\0\x10\0\0\0|ORC[^\s -~]|Obj\x01": EXPORT,
    rb"\x89HDF\r\n|SQLite format 3\0": EXPORT,
    rb"\x93NUMPY": "an array, not text; write its tokens as nanoGPT does: numpy.uint16 in a file train.bin",
    rb"\x80[\x04\x05]\x95|\x80[\x02\x03][\](}c]": PICKLE,
    rb"\x88\xd84\x01": LLM_C,
    rb"%PDF-": "a PDF, whose text is compressed; extract it, for example with pdftotext",
}
"""How a file begins → what it is, and the way out."""


class _Counted(io.RawIOBase):
    """Reports the bytes that are read of a file."""

    def __init__(self, file: Any, advance: Callable[[int], None]):
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer), 0
        while filled < len(view) and (count := self._file.readinto(view[filled:])):  # a stream gives less at a time
            filled += count
        self._advance(filled)
        return filled


def decompressed(file: Any, name: str, advance: Callable[[int], None] | None, buffer_bytes: int) -> BinaryIO:
    """Return a reader of a file's content, decompressed if it is compressed, whatever its name.

    advance: called with the bytes read from the file. Raise InputError for a format that is not text.
    """
    reader = io.BufferedReader(_Counted(file, advance or (lambda count: None)), buffer_bytes)
    for compression, magic in COMPRESSIONS.items():
        if re.match(magic, reader.peek(HEAD_BYTES)):
            reader = io.BufferedReader(compr[compression](reader), buffer_bytes)
            break
    head = reader.peek(HEAD_BYTES)
    for magic, problem in UNREADABLE.items():
        if re.match(magic, head, re.DOTALL):
            raise InputError(f"{name} is {problem}")
    return cast(BinaryIO, reader)

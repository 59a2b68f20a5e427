"""Bytes as they come from a program, as whole lines."""

from collections.abc import Iterator

LONGEST = 1 << 20
"""Bytes of a line that is held back until its end comes; a longer one goes on in a new line."""


class Lines:
    """Of one stream. Nothing is lost or broken; what has no end yet waits for it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that have come to their end, each without it."""
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            self._rest += head
            yield from bytes(self._rest).split(b"\n")
            self._rest = bytearray(tail)
        else:
            self._rest += data
        while len(self._rest) > LONGEST:
            yield bytes(self._rest[:LONGEST])
            del self._rest[:LONGEST]

    def end(self) -> Iterator[bytes]:
        """What has come since the last end of a line."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()

"""Compare the output of workers that run the same cell."""

import hashlib
import re

MAX_CHARS = 1 << 16
VOLATILE = re.compile(
    r"\b0x[0-9a-f]+|/tmp/[^\s:'\"]+|\d+(:\d\d)+([.,]\d+)?|(\d[\d.,]*(e[+-]\d+)?\s?(ns|[µμ]s|us|ms|s|min|h)|[\d.,?]+(it/s|s/it))\b"
)
"""Addresses, temporary paths and times: they differ between workers that do the same."""


class Output:
    """One worker's text in one stream: its beginning, and a digest without addresses, paths and times."""

    def __init__(self) -> None:
        self.text, self.line, self.chars, self.digest = "", "", 0, hashlib.sha256()

    def add(self, text: str) -> None:
        """Add text."""
        self.text += text[: MAX_CHARS - len(self.text)]
        self.chars += len(text)
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            if not line.startswith("[Gloo]"):  # JAX's CPU collectives report each worker's number
                line = line.rpartition("\r")[2]  # the last state of a progress bar
                self.digest.update(f"{VOLATILE.sub('…', line) if len(line) < MAX_CHARS else line}\n".encode())

    def finish(self) -> bytes:
        """End the last line; return the digest."""
        self.add("\n" if self.line else "")
        return self.digest.digest()

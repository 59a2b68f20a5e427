"""Logs of processes: each line begins with when it was written."""

import io
import re
import sys
import time
from datetime import datetime
from typing import Any

TIMESTAMP = re.compile(r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{3}))? ")
"""How such a line is found again."""


def format_timestamp(at: float) -> str:
    """How a line of a process's log begins; at: seconds since 1970.

    Lines of several processes are put into order by it, and those have more than one thing to say in a second.
    """
    return f"{datetime.fromtimestamp(at).time().isoformat('milliseconds')} "


class TimestampedFile(io.FileIO):
    """A log file that says of each line when it was written."""

    fresh = True
    """Whether the next byte begins a line."""

    def write(self, data: Any) -> int:
        """As FileIO does."""
        lines, at = bytes(data).splitlines(keepends=True), format_timestamp(time.time()).encode()
        for line in lines:
            super().write(at + line if self.fresh else line)
            self.fresh = line.endswith(b"\n")
        return len(data)


def writes_timestamped_log() -> bool:
    """Whether what this process says goes to such a log, which is read line by line."""
    return isinstance(getattr(getattr(sys.stderr, "buffer", None), "raw", None), TimestampedFile)

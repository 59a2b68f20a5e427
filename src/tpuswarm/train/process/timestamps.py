"""Logs of processes, in which each line begins with its time."""

import io
import re
import sys
import time
from datetime import datetime
from typing import Any

TIMESTAMP = re.compile(r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{3}))? ")


def format_timestamp(unix_time: float) -> str:
    """Return the start of a log line; milliseconds put lines of several processes into order."""
    return f"{datetime.fromtimestamp(unix_time).time().isoformat('milliseconds')} "


class TimestampedFile(io.FileIO):
    is_at_line_start = True

    def write(self, data: Any) -> int:
        timestamp = format_timestamp(time.time()).encode()
        for line in bytes(data).splitlines(keepends=True):
            super().write(timestamp + line if self.is_at_line_start else line)
            self.is_at_line_start = line.endswith(b"\n")
        return len(data)


def writes_timestamped_log() -> bool:
    """Whether stderr is such a log."""
    return isinstance(getattr(getattr(sys.stderr, "buffer", None), "raw", None), TimestampedFile)

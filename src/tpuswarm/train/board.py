"""TensorBoard's event files, without TensorFlow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from tpuswarm.train.run import writing

EVERY = 10
"""The first of so many steps is written: an event costs time of the processor that trains."""
FLUSH = 5.0
"""Seconds between flushes; tensorboardX has each wait for the disk."""
SKIPPED = ("step", "tokens", "eval_rows")


class Board:
    """Curves of a run; written in the caller's thread, so that an error is the caller's."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = folder
        with writing(folder):
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            if first_step:  # TensorBoard then forgets what a process before this one wrote beyond its checkpoint
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step + 1, session_log=start))
            self._events.flush()
        self._flushed_at = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl; every evaluation and every tenth update is written."""
        if "eval_loss" not in row and row["step"] % EVERY != 1:
            return
        shown = {name: value for name, value in row.items() if name not in SKIPPED and value is not None}
        values = [part for name, value in shown.items() for part in summary.scalar(name, value).value]
        event = event_pb2.Event(wall_time=time.time(), step=row["step"], summary=summary.Summary(value=values))
        with writing(self._folder):
            self._events.write_event(event)
            if time.monotonic() - self._flushed_at > FLUSH:
                self._events.flush()
                self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        with writing(self._folder):
            self._events.close()

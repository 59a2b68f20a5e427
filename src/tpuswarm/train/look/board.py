"""TensorBoard's event files, without TensorFlow."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.train.run.directory import writing

STORAGE = "google.cloud.storage"


@contextmanager
def _without(name: str) -> Iterator[None]:
    """As if a package were not there, for who would import it without need."""
    there = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if there is not None:
            sys.modules[name] = there


with _without(STORAGE):  # a third of a second at each start, for gs:// files that are never written this way
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

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
            folder.mkdir(parents=True, exist_ok=True)
            # In its name tensorboardX has the second; a process that resumes within it would replace the file.
            self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
            if first_step:  # TensorBoard then forgets what a process before this one wrote beyond its checkpoint
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step + 1, session_log=start))
            self._events.flush()
        self._flushed_at = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl; of updates every tenth is written."""
        if "loss" in row and row["step"] % EVERY != 1:
            return
        shown = {name: value for name, value in row.items() if name not in SKIPPED and value is not None}
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
        event = event_pb2.Event(wall_time=time.time(), step=row["step"], summary=summary_pb2.Summary(value=values))
        with writing(self._folder):
            self._events.write_event(event)
            if time.monotonic() - self._flushed_at > FLUSH:
                self._events.flush()
                self._flushed_at = time.monotonic()

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """A picture, uint8 (height, width, 3)."""
        value = summary.image(name, picture, dataformats="HWC")
        with writing(self._folder):
            self._events.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=value))
            self._events.flush()

    def flush(self) -> None:
        """Let all that was written be read."""
        with writing(self._folder):
            self._events.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._folder):
            self._events.close()

"""Write TensorBoard's event files, without TensorFlow."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.train.run.directory import writing

GOOGLE_STORAGE = "google.cloud.storage"


@contextmanager
def _hidden_package(name: str) -> Iterator[None]:
    """Let imports of a package fail."""
    module = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


with _hidden_package(GOOGLE_STORAGE):  # tensorboardX would import it for 0.3 s, and we never write to gs://
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

UPDATE_INTERVAL_STEPS = 10
"""Writing each update would cost time of the CPU that trains."""
FLUSH_INTERVAL_S = 5.0
"""Each flush waits for the disk."""
UNPLOTTED_COLUMNS = ("step", "tokens", "eval_rows")


class TensorBoardLog:
    """Writes in the caller's thread, so that errors reach the caller."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # a process that resumes within the second in tensorboardX's file name would replace the file
            self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
            # TensorBoard then drops what a previous process wrote after its last checkpoint, or before its first one
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step + 1, session_log=start))
            self._events.flush()
        self._flushed_at = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics.jsonl; of updates only every tenth."""
        if "loss" in row and row["step"] % UPDATE_INTERVAL_STEPS != 1:
            return
        plotted = {name: value for name, value in row.items() if name not in UNPLOTTED_COLUMNS and value is not None}
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in plotted.items()]
        event = event_pb2.Event(wall_time=time.time(), step=row["step"], summary=summary_pb2.Summary(value=values))
        with writing(self._folder):
            self._events.write_event(event)
            if time.monotonic() - self._flushed_at > FLUSH_INTERVAL_S:
                self._events.flush()
                self._flushed_at = time.monotonic()

    def write_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """picture: uint8 (height, width, 3)."""
        value = summary.image(name, picture, dataformats="HWC")
        with writing(self._folder):
            self._events.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=value))
            self._events.flush()

    def flush(self) -> None:
        with writing(self._folder):
            self._events.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._events.close()

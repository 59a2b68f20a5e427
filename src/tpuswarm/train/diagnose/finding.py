"""What every diagnostic returns, and where in the user's own code something happened."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tpuswarm.train.user_code import CodeLine, owner


@dataclass(frozen=True)
class Finding:
    """Something that costs time or is not what the user believes, with the way out; said once."""

    kind: str
    """A row of the table in docs/slow-tpu.md; `unknown` for a diagnostic that failed itself."""
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence rests on, as plain values."""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called for what happens in `frame`, installed packages passed over; None if it was us."""
    while frame is not None and owner(frame.f_code.co_filename) == "installed":
        frame = frame.f_back
    return frame if frame is not None and owner(frame.f_code.co_filename) == "user" else None


def place(frame: FrameType) -> CodeLine:
    """The line that a frame is at; its file relative to the working directory where it lies under it."""
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return CodeLine(str(path.relative_to(here) if path.is_relative_to(here) else path), frame.f_lineno)

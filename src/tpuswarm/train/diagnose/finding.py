"""The result of a diagnostic, and the user's line that caused it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tpuswarm.train.user_code import CodeLine, code_owner


@dataclass(frozen=True)
class Finding:
    """A fault that costs time or surprises the user, with its remedy; reported once."""

    kind: str
    """A row of the table in docs/slow-tpu.md; `unknown` for a diagnostic that failed itself."""
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The evidence, as plain values."""


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame that caused a call, below frames of installed packages; None if tpuswarm caused it."""
    while frame is not None and code_owner(frame.f_code.co_filename) == "installed":
        frame = frame.f_back
    return frame if frame is not None and code_owner(frame.f_code.co_filename) == "user" else None


def line_of_frame(frame: FrameType) -> CodeLine:
    """Return the current line of a frame; its file relative to the working directory, if inside."""
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return CodeLine(str(path.relative_to(here) if path.is_relative_to(here) else path), frame.f_lineno)

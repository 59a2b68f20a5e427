"""Where in the user's own code something happened."""

from pathlib import Path
from types import FrameType

from tpuswarm.train.user_code import CodeLine, owner


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called for what happens in `frame`, installed packages passed over; None if it was us."""
    while frame is not None and owner(frame.f_code.co_filename) == "installed":
        frame = frame.f_back
    return frame if frame is not None and owner(frame.f_code.co_filename) == "user" else None


def place(frame: FrameType) -> CodeLine:
    """The line that a frame is at; its file relative to the working directory where it lies under it."""
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return CodeLine(str(path.relative_to(here) if path.is_relative_to(here) else path), frame.f_lineno)

"""Run programs in a pseudo-terminal and read its screen."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte

from tests.processes import ONE_DEVICE, PROGRAM, Forked

SMALL, LARGE = (80, 24), (120, 40)
PATIENCE = 600.0
"""Seconds to wait for an expected text."""
CTRL_C = b"\x03"


class Terminal:
    """A program, its controlling terminal, and the screen; the program stops writing where the test does not read."""

    def __init__(
        self, words: Sequence[str], cwd: Path, size: tuple[int, int], env: dict[str, str] | None, new: bool = False
    ):
        """words: of the command line of tpuswarm, or a program with a slash and its arguments; new: see `start`."""
        self._screen = pyte.HistoryScreen(*size, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._end, theirs = os.openpty()
        self.resize(size)
        about = {
            "cwd": cwd, "stdin": theirs, "stdout": theirs, "stderr": theirs,
            "env": {**_without_size(), **ONE_DEVICE, "TERM": "xterm-256color", **(env or {})},
        }  # fmt: skip
        if "/" in words[0] or new:
            command = list(words) if "/" in words[0] else [PROGRAM, *words]
            self.process = subprocess.Popen(["setsid", "--ctty", *command], **about)
        else:
            self.process = Forked([PROGRAM, *words], terminal=True, **about)
        os.close(theirs)

    def resize(self, size: tuple[int, int]) -> None:
        """Change its size, as a person does with the mouse."""
        columns, rows = size
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(lines=rows, columns=columns)

    def send(self, keys: bytes) -> None:
        """Press keys; at Ctrl-C the terminal signals the processes in its foreground."""
        os.write(self._end, keys)

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, without blanks at their ends."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def screen(self) -> str:
        """The text on the screen."""
        return "\n".join(self.lines)

    @property
    def text(self) -> str:
        """The text on the screen and above it."""
        gone = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join([*(line.rstrip() for line in gone), self.screen])

    @property
    def flowing(self) -> str:
        """All text without the breaks between rows."""
        return self.text.replace("\n", "")

    @property
    def sentences(self) -> str:
        """All text with single blanks between words."""
        return " ".join(self.text.split())

    def wait(self, condition: Callable[["Terminal"], bool] | str) -> str:
        """Read until `condition` holds, or that text is on the screen; return the screen."""
        seen = (lambda terminal: condition in terminal.screen) if isinstance(condition, str) else condition
        end = time.monotonic() + PATIENCE
        while not seen(self):
            assert self.read(), f"it ended before {condition!r}, which is not in:\n{self.text}"
            assert time.monotonic() < end, f"no {condition!r} in:\n{self.text}"
        return self.screen

    def asked(self, question: str) -> None:
        """Read until `question` is there and the program waits for input: Python may miss a Ctrl-C before that."""
        self.wait(lambda terminal: terminal.written.endswith(question.encode()) and terminal._sleeps())

    def _sleeps(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat[stat.rindex(")") :].split()[1] == "S"

    def finish(self, code: int = 0) -> str:
        """Read to the end of the program, which has to end with `code`; return its text."""
        end = time.monotonic() + PATIENCE
        while self.read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        found = self.process.wait(PATIENCE)
        assert found == code, f"exit {found}, not {code}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        return self.text

    def read(self) -> bool:
        """Read what comes within 0.1 s; return whether there may be more."""
        if not select.select([self._end], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)

    def hang_up(self) -> int:
        """Close the window, as a person does or a broken network; return the program's exit code."""
        os.close(self._end)
        self._end = -1
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Kill the program if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._end >= 0:
            os.close(self._end)


@contextmanager
def terminal(
    words: Sequence[str], cwd: Path, size: tuple[int, int] = SMALL, env: dict[str, str] | None = None, new: bool = False
) -> Iterator[Terminal]:
    """A program in a terminal, to the end of the block."""
    opened = Terminal(words, cwd, size, env, new)
    try:
        yield opened
    finally:
        opened.close()


def _without_size() -> dict[str, str]:
    """The environment without variables that override the terminal's size and colours."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}

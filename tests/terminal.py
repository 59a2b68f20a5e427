"""Programs in a pseudo-terminal, and what a person would see there."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte

from tests.processes import ONE_DEVICE

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
SMALL, LARGE = (80, 24), (120, 40)
PATIENCE = 600.0
"""Seconds after which what a test waits for will not come."""
CTRL_C = b"\x03"


class Terminal:
    """A program, its controlling terminal, and the screen; the test has to wait for the program to go on writing."""

    def __init__(self, words: Sequence[str], cwd: Path, size: tuple[int, int], env: dict[str, str] | None):
        """words: of the command line of tpuswarm, or a program with a slash and its arguments."""
        self._screen = pyte.HistoryScreen(*size, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._end, theirs = os.openpty()
        self.resize(size)
        command = list(words) if "/" in words[0] else [PROGRAM, *words]
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**_without_size(), **ONE_DEVICE, "TERM": "xterm-256color", **(env or {})},
        )  # fmt: skip
        os.close(theirs)

    def resize(self, size: tuple[int, int]) -> None:
        """As a person does with the mouse."""
        columns, rows = size
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(lines=rows, columns=columns)

    def send(self, keys: bytes) -> None:
        """Press keys; Ctrl-C is the terminal's, which signals whoever is in the foreground."""
        os.write(self._end, keys)

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, blanks at their ends left out."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def screen(self) -> str:
        """What is on the screen."""
        return "\n".join(self.lines)

    @property
    def text(self) -> str:
        """What is on the screen, and what has left it at the top."""
        gone = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join([*(line.rstrip() for line in gone), self.screen])

    @property
    def flowing(self) -> str:
        """All that was written, without the breaks at the end of the rows."""
        return self.text.replace("\n", "")

    @property
    def sentences(self) -> str:
        """All that was written, with a blank between two words, wherever the lines end."""
        return " ".join(self.text.split())

    def wait(self, condition: Callable[["Terminal"], bool] | str) -> str:
        """Read until `condition` holds, or until that text is on the screen; what is there then."""
        seen = (lambda terminal: condition in terminal.screen) if isinstance(condition, str) else condition
        end = time.monotonic() + PATIENCE
        while not seen(self):
            assert self.read(), f"it ended before {condition!r}, which is not in:\n{self.text}"
            assert time.monotonic() < end, f"no {condition!r} in:\n{self.text}"
        return self.screen

    def asked(self, question: str) -> None:
        """Read until `question` is there and its program waits for the answer: Python may miss a Ctrl-C before that."""
        self.wait(lambda terminal: terminal.written.endswith(question.encode()) and terminal._sleeps())

    def _sleeps(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat[stat.rindex(")") :].split()[1] == "S"

    def finish(self, code: int = 0) -> str:
        """Read to the end of the program, which has to end with `code`; all that it wrote."""
        end = time.monotonic() + PATIENCE
        while self.read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        found = self.process.wait(PATIENCE)
        assert found == code, f"exit {found}, not {code}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        return self.text

    def read(self) -> bool:
        """Take in what comes within a moment; whether there may be more."""
        if not select.select([self._end], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # nobody holds the other end any longer
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)

    def hang_up(self) -> int:
        """Close the window, as a person does or a network that is cut; the exit code of who was in the foreground."""
        os.close(self._end)
        self._end = -1
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Hang up; what still runs in the foreground is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._end >= 0:
            os.close(self._end)


@contextmanager
def terminal(
    words: Sequence[str], cwd: Path, size: tuple[int, int] = SMALL, env: dict[str, str] | None = None
) -> Iterator[Terminal]:
    """A program in a terminal, to the end of the block."""
    opened = Terminal(words, cwd, size, env)
    try:
        yield opened
    finally:
        opened.close()


def _without_size() -> dict[str, str]:
    """The environment, but for what would be believed more than the terminal itself."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}

"""Programs measured in turns: each in a process of its own that waits, so that only one works at a time."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Ended(Exception):
    """A worker ended while it had work, out of memory for example; its last line."""


class Worker:
    """A child process that prints a JSON object when it is ready, then runs blocks of steps when asked.

    For each number of steps on a line of its stdin it prints the seconds that they took.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the child
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.about: dict[str, Any] = json.loads(self._answer() or "{}")
        """Empty where it does not work here."""
        self.ended = not self.about
        """It has ended, or never worked."""
        self._last = ""

    def run(self, steps: int) -> float:
        """Seconds of a block."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{steps}\n")
            self._child.stdin.flush()
            return float(self._answer())
        except (BrokenPipeError, ValueError) as error:  # no answer
            raise Ended(self.close()) from error

    def close(self) -> str:
        """End the child; the last line it wrote to stderr, or its exit status. A second time, the same again."""
        self.ended = True
        if not self._errors.closed:
            with suppress(BrokenPipeError):
                self._child.communicate()
            self._errors.seek(0)
            lines = self._errors.read().split("\n")
            self._errors.close()
            status = f"exit status {self._child.returncode}"
            self._last = next((line for line in reversed(lines) if line.strip()), status)
        return self._last

    def _answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


def in_turns(workers: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each in each round; a round before them warms up. Raises Ended where one has `ended`."""
    took: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(-1, rounds):
        for name, worker in workers.items():
            seconds = worker.run(steps)
            if turn >= 0:
                took[name].append(seconds / steps)
    return took

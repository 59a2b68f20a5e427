"""Measure programs in turns: worker processes wait for one another."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Ended(Exception):
    """A worker died, for example without memory; the message is its last line."""


class Worker:
    """A child process that prints a JSON object when it is ready, and then runs blocks of steps.

    For each number of steps on stdin it prints their seconds. about: the object, empty if the child failed; ended:
    whether the child has ended.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the child
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.about: dict[str, Any] = json.loads(self._read_line() or "{}")
        self.ended = not self.about
        self._last = ""

    def run(self, steps: int) -> float:
        """Run a block; return its seconds."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{steps}\n")
            self._child.stdin.flush()
            return float(self._read_line())
        except (BrokenPipeError, ValueError) as error:
            raise Ended(self.close()) from error

    def close(self) -> str:
        """End the child; return its last line on stderr, or its exit status."""
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

    def _read_line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


def in_turns(workers: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds a step of each worker in each round, after a warm-up round. Raises Ended if one dies."""
    took: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(-1, rounds):
        for name, worker in workers.items():
            seconds = worker.run(steps)
            if turn >= 0:
                took[name].append(seconds / steps)
    return took

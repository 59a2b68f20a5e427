"""Finished runs that many tests look at: each is made once in a session of tests, by the first that asks for it."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tests import processes


class Finished(NamedTuple):
    """A run by `tpuswarm train … --json`. It is to look at: who changes something copies it first."""

    run: Path
    result: dict[str, Any]
    """What it printed on stdout."""
    err: str
    """What it printed on stderr."""


def finished_once(name: str, words: list[str]) -> Finished:
    """The run of a command without its --run; the parallel workers of a session share it."""
    folder = Path(os.environ["TPUSWARM_CACHE"]) / "runs" / name
    said = folder / "said.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not said.exists():
            command = processes.start([*words, "--run", "run", "--json"], folder)
            said.write_text(json.dumps(processes.finish(command)))
    out, err = json.loads(said.read_text())
    return Finished(folder / "run", json.loads(out), err)

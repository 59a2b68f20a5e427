"""Finished runs that many tests read: each is made once in a session, by the first test that needs it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tests import processes


class Finished(NamedTuple):
    """A run by `tpuswarm train … --json`, to read only: copy it before changing it."""

    run: Path
    result: dict[str, Any]
    """Its stdout."""
    err: str
    """Its stderr."""


def finished_once(name: str, words: list[str]) -> Finished:
    """Return the run of a command given without --run; parallel workers of a session share it."""
    folder = Path(os.environ["TPUSWARM_CACHE"]) / "finished" / name
    printed = folder / "printed.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not printed.exists():
            shutil.rmtree(folder / "run", ignore_errors=True)
            command = processes.start([*words, "--run", "run", "--json"], folder)
            printed.write_text(json.dumps(processes.finish(command)))
    out, err = json.loads(printed.read_text())
    return Finished(folder / "run", json.loads(out), err)

"""What many tests read: each thing is made once in a session, by the first test that needs it."""

import json
import os
import shutil
from collections.abc import Callable
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


def made_once(name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """Return a folder and what `make` returns for it, a JSON value; parallel workers of a session share both."""
    folder = Path(os.environ["TPUSWARM_CACHE"]) / "made" / name
    value = folder.with_suffix(".json")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not value.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            value.write_text(json.dumps(make(folder)))
    return folder, json.loads(value.read_text())


def finished_once(name: str, words: list[str]) -> Finished:
    """Return the run of a command given without --run."""

    def train(folder: Path) -> tuple[str, str]:
        return processes.run([*words, "--run", "run", "--json"], folder)

    folder, (out, err) = made_once(name, train)
    return Finished(folder / "run", json.loads(out), err)

"""Values of secrets: from the environment of whoever gives the command, kept for machines that come back."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import partial_path


class Secrets:
    """A file of this computer that only its owner may read. Values go nowhere else but to the machines."""

    def __init__(self, file: Path):
        self._file = file

    def gather(self, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        """Their values, those of the environment first; keeps them. InputError names those that are nowhere."""
        kept = self._read()
        found = {name: environment.get(name) or kept.get(name, "") for name in names}
        if missing := [name for name, value in found.items() if not value]:
            raise InputError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in this shell, and [setup] names "
                f"{'it' if len(missing) == 1 else 'them'} under secrets: `export {missing[0]}=…`, then give the same "
                "command again"
            )
        if found != kept:
            self._write(found)
        return found

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, values: Mapping[str, str]) -> None:
        if not values:
            self._file.unlink(missing_ok=True)
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial_path(self._file).unlink(missing_ok=True)
        handle = os.open(partial_path(self._file), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file)
        partial_path(self._file).replace(self._file)

"""Host keys that are known: one file in OpenSSH's own format, so that ssh itself believes the same as we do."""

import fcntl
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuswarm.train.process.atomic import write_atomically


class Known:
    """The file. A line is ALIAS KIND KEY; an alias never gets another key but by a person who removes its lines."""

    def __init__(self, path: Path):
        self.path = path

    def keys(self) -> dict[str, tuple[str, ...]]:
        """All, by alias."""
        found: dict[str, tuple[str, ...]] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            alias, _, key = line.strip().partition(" ")
            if key and not alias.startswith("#"):
                found[alias] = (*found.get(alias, ()), key)
        return found

    def add(self, new: Mapping[str, Iterable[str]], keep: Iterable[str] | None = None) -> dict[str, tuple[str, ...]]:
        """Write down those that are not known yet; all, by alias. `keep`: the aliases to which nothing else is left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.keys()
            found = {alias: tuple(keys) for alias, keys in new.items() if keys} | before
            if keep is not None:
                wanted = set(keep)
                found = {alias: keys for alias, keys in found.items() if alias in wanted}
            if found != before:
                lines = (f"{alias} {key}\n" for alias, keys in found.items() for key in keys)
                write_atomically(self.path, "".join(lines))
        finally:
            os.close(lock)
        return found

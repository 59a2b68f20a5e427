"""Store SSH host keys in a file that OpenSSH reads too."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.locks import locked


class KnownHosts:
    """A file of lines ALIAS KIND KEY. The keys of an alias never change unless a person removes its lines."""

    def __init__(self, path: Path):
        self.path = path

    def keys(self) -> dict[str, tuple[str, ...]]:
        """Return all keys by alias."""
        keys: dict[str, tuple[str, ...]] = {}
        if not self.path.exists():
            return keys
        for line in self.path.read_text(encoding="utf-8").splitlines():
            alias, _, key = line.strip().partition(" ")
            if key and not alias.startswith("#"):
                keys[alias] = (*keys.get(alias, ()), key)
        return keys

    def add(self, new: Mapping[str, Iterable[str]], listed: Iterable[str] | None = None) -> dict[str, tuple[str, ...]]:
        """Add keys of unknown aliases and return all. `listed`: delete every other alias; None: delete none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock"), "set XDG_STATE_HOME to a folder on a local disk"):
            before = self.keys()
            keys = {alias: tuple(values) for alias, values in new.items() if values} | before
            if listed is not None:
                kept = set(listed)
                keys = {alias: values for alias, values in keys.items() if alias in kept}
            if keys != before:
                lines = (f"{alias} {key}\n" for alias, values in keys.items() for key in values)
                write_atomically(self.path, "".join(lines))
        return keys

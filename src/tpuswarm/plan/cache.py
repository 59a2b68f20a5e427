"""Answers of the compiler, kept on disk with all that they rest on.

An answer is looked up by what was asked, and holds as long as every file and package that took part is the same: the
process that compiled noted what it imported and opened. So a look-up imports neither JAX nor the recipe.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpuswarm.plan.order import Found, Order
from tpuswarm.train.files import write_atomically

ALWAYS = ("jax", "jaxlib", "libtpu", "tpuswarm")
"""Packages that an answer rests on whether or not they show among the imported ones."""
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_")
"""Environment variables that begin so may change what a compiler does."""


class Rests:
    """What a process used, noted while it runs: Python files, packages, and files that it read."""

    def __init__(self) -> None:
        self._opened: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and isinstance(args[0], str | os.PathLike)
            and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        ):
            self._opened.add(os.fspath(args[0]))

    def all(self, but: Path) -> dict[str, dict[str, str]]:
        """Stamps of files and versions of packages by name; nothing under the folder `but`."""
        modules = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
        tops = {name.partition(".")[0] for name in sys.modules}
        homes = importlib.metadata.packages_distributions()
        packages = {package for top in tops for package in homes.get(top, ())} | set(ALWAYS)
        installed = ("site-packages", "dist-packages")
        apart = (Path(sys.base_prefix), Path(sys.prefix), but.resolve(), *map(Path, ("/proc", "/sys", "/dev")))
        files = {}
        for name in (*modules, *self._opened):
            path = Path(name).resolve()
            foreign = any(part in path.parts for part in installed) or path.suffix == ".pyc"
            if not foreign and not any(path.is_relative_to(each) for each in apart) and path.is_file():
                files[str(path)] = stamp(path)
        return {"files": files, "packages": versions(packages)}


def stamp(path: str | Path) -> str:
    """Size and time of change of a file; empty where there is none."""
    try:
        facts = Path(path).stat()
    except OSError:
        return ""
    return f"{facts.st_size}:{facts.st_mtime_ns}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions; empty for a package that is not there."""
    found = {}
    for name in sorted(set(packages)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


class Cache:
    """Answers in a folder, one file each."""

    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, order: Order, settings: Mapping[str, str]) -> Found | None:
        """The answer to the same question, if all it rests on is unchanged; settings: of the compiling process."""
        try:
            kept = json.loads(self._path(order, settings).read_text(encoding="utf-8"))
            files, packages = kept["rests"]["files"], kept["rests"]["packages"]
            if any(stamp(path) != there for path, there in files.items()) or versions(packages) != packages:
                return None
            return Found.of(kept["found"])
        except (OSError, ValueError, KeyError, TypeError):  # none, cut short, or of another time: compile again
            return None

    def put(self, order: Order, settings: Mapping[str, str], found: Found, rests: Mapping[str, Any]) -> None:
        """Keep an answer; OSError where the disk does not take it."""
        path = self._path(order, settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, json.dumps({"found": asdict(found), "rests": rests}))
        except OSError:
            path.with_name(path.name + ".part").unlink(missing_ok=True)
            raise

    def _path(self, order: Order, settings: Mapping[str, str]) -> Path:
        """Named by the question; words of it that name files stand for these files, wherever they were said."""
        words = [order.asked.target.rpartition(":")[0], *map(str, order.asked.options.values())]
        question = {
            "order": asdict(order),
            "files": [str(Path(word).resolve()) for word in words if word and _exists(word)],
            "python": platform.python_version(),
            "settings": {name: value for name, value in settings.items() if name.startswith(SETTINGS)},
        }
        text = json.dumps(question, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a name
        return False

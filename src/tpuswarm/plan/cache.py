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
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpuswarm.plan.order import Found, Order
from tpuswarm.train.process.atomic import write_atomically

ALWAYS = ("jax", "jaxlib", "libtpu", "tpuswarm")
"""Packages that an answer rests on whether or not they show among the imported ones."""
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "PYTHONPATH")
"""Environment variables that begin so may change what a compiler does, or which recipe is found."""
OURS = "tpuswarm."
"""Modules that begin so are found from every folder."""


class Rests:
    """What a process used, noted while it runs: Python files, packages, and files that it read."""

    def __init__(self) -> None:
        self._start = time.time_ns()
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
        """Stamps of files and versions of packages by name; nothing under the folder `but`.

        A file that was written since the start has a stamp that never holds: nobody knows which of its two texts was
        read.
        """
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
                files[str(path)] = stamp(path) if path.stat().st_mtime_ns < self._start else "written meanwhile"
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


def question(order: Order, settings: Mapping[str, str]) -> str:
    """All that is known before anything is compiled, in one text; settings: of the process that compiles.

    Words that name files stand for what is in them now, wherever they were said: a recipe may know them from a cache of
    its own, without opening them. A recipe of the user's also depends on the folder that it is asked for from.
    """
    asked = order.asked
    words = [asked.target.rpartition(":")[0], *map(str, asked.options.values())]
    return json.dumps(
        {
            "order": asdict(order),
            "files": [_contents(Path(word).resolve()) for word in words if word and _exists(word)],
            "folder": "" if asked.target.startswith(OURS) else str(Path.cwd()),
            "python": platform.python_version(),
            "settings": {name: value for name, value in settings.items() if name.startswith(SETTINGS)},
        },
        sort_keys=True,
    )


class Cache:
    """Answers in a folder, one file each."""

    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, question: str) -> Found | None:
        """The answer to the same question, if all it rests on is unchanged."""
        try:
            kept = json.loads(self._path(question).read_text(encoding="utf-8"))
            files, packages = kept["rests"]["files"], kept["rests"]["packages"]
            if any(stamp(path) != there for path, there in files.items()) or versions(packages) != packages:
                return None
            return Found.of(kept["found"])
        except (OSError, ValueError, KeyError, TypeError):  # none, cut short, or of another time: compile again
            return None

    def put(self, question: str, found: Found, rests: Mapping[str, Any]) -> None:
        """Keep an answer; OSError where the disk does not take it."""
        path = self._path(question)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, json.dumps({"found": asdict(found), "rests": rests}))
        except OSError:
            path.with_name(path.name + ".part").unlink(missing_ok=True)
            raise

    def _path(self, question: str) -> Path:
        return self._folder / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"


def _contents(path: Path) -> dict[str, str]:
    """Stamps of a file, or of all files of a folder."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each): stamp(each) for each in [path, *files]}


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a name
        return False

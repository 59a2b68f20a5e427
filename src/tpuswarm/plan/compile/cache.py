"""Cache the compiler's results on disk.

A result is valid while every file and package it depends on is unchanged; the compiling process tracked its imports and
opened files. So a look-up imports neither JAX nor the recipe. Where nothing tells that data elsewhere is unchanged, the
result is not cached.
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

from tpuswarm.errors import TpuswarmError
from tpuswarm.plan.compile.request import CompileRequest, CompileResult
from tpuswarm.train.data.contents import contents_digest, file_identity
from tpuswarm.train.process.atomic import write_atomically

BASE_PACKAGES = ("jax", "jaxlib", "libtpu", "tpuswarm")
SETTING_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "PYTHONPATH")
"""Environment variables with these prefixes may change the compiler or the recipe."""


class DependencyTracker:
    """Tracks the Python files, packages and data files that this process uses."""

    def __init__(self) -> None:
        self._start = time.time_ns()
        self._opened: set[str] = set()
        sys.addaudithook(self._track)

    def _track(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and isinstance(args[0], str | os.PathLike)
            and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        ):
            self._opened.add(os.fspath(args[0]))

    def stamps(self, without: Path) -> dict[str, dict[str, str]]:
        """Return stamps of files outside the folder `without`, and versions of packages.

        A file written since the start gets an invalid stamp: either of its contents may have been read.
        """
        modules = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
        top_modules = {name.partition(".")[0] for name in sys.modules}
        distributions = importlib.metadata.packages_distributions()
        packages = {package for module in top_modules for package in distributions.get(module, ())}
        excluded = (Path(sys.base_prefix), Path(sys.prefix), without.resolve(), *map(Path, ("/proc", "/sys", "/dev")))
        files = {}
        for name in (*modules, *self._opened):
            path = Path(name).resolve()
            if (
                path.suffix != ".pyc"
                and not {"site-packages", "dist-packages"} & set(path.parts)
                and not any(path.is_relative_to(folder) for folder in excluded)
                and path.is_file()
            ):
                is_unchanged = path.stat().st_ctime_ns < self._start
                files[str(path)] = _stamp(path) if is_unchanged else "written meanwhile"
        return {"files": files, "packages": _versions(packages | set(BASE_PACKAGES))}


def _stamp(path: str | Path) -> str:
    """Return the digest of a file; empty if there is none."""
    try:
        return contents_digest(Path(path))
    except OSError:
        return ""


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions; empty for a missing package."""
    found = {}
    for name in sorted(set(packages)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def cache_key(request: CompileRequest, settings: Mapping[str, str]) -> str | None:
    """Return everything known before compiling; settings: the environment of the compiling process.

    It includes the versions of files, folders, URLs and published models that options name, because a recipe may read
    them through its own cache; None if one has no version. A user's recipe also depends on the working folder.
    """
    options = request.options
    versions = [_version(str(word)) for word in options.options.values()]
    if None in versions:
        return None
    return json.dumps(
        {
            "request": asdict(request),
            "recipe": _stamp(options.target.rpartition(":")[0]),
            "versions": versions,
            "folder": "" if options.target.startswith("tpuswarm.") else str(Path.cwd()),
            "python": platform.python_version(),
            "settings": {name: value for name, value in settings.items() if name.startswith(SETTING_PREFIXES)},
        },
        sort_keys=True,
    )


class PlanCache:
    """Results in a folder, one file each."""

    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, key: str | None) -> CompileResult | None:
        """Return a result if everything it depends on is unchanged."""
        if key is None:
            return None
        try:
            entry = json.loads(self._path(key).read_text(encoding="utf-8"))
            files, packages = entry["dependencies"]["files"], entry["dependencies"]["packages"]
            if any(_stamp(path) != stamp for path, stamp in files.items()) or _versions(packages) != packages:
                return None
            return CompileResult.from_json(entry["result"])
        except (OSError, ValueError, KeyError, TypeError):  # missing, damaged, or of another version: compile again
            return None

    def put(self, key: str | None, result: CompileResult, dependencies: Mapping[str, Any]) -> None:
        """Store a result; raise OSError if the disk is full."""
        if key is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"result": asdict(result), "dependencies": dependencies}), is_shared=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _version(word: str) -> Any:
    """Return what changes with the content that an option names; empty if it names none, None if nothing tells."""
    try:
        if word.startswith("hf:"):
            from tpuswarm.recipes.language.hub import open_published

            published = open_published(word)
            return _identities_under(published.folder) if published.folder else published.commit
        if "://" in word:
            from tpuswarm.recipes.language.text import open_text

            return open_text(word, empty=True).key
        return _identities_under(Path(word).resolve()) if word and _exists(word) else ""
    except (TpuswarmError, OSError):  # the recipe reports it, if it needs the place
        return None


def _identities_under(path: Path) -> dict[str, list[int]]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file): file_identity(file) for file in [path, *files]}


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a file name
        return False

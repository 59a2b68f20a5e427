"""Name the files in a run's folder that bind it to a bucket, and find the folder of a run's URL."""

import json
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder

ORIGIN, LOCK, OWNER, PULLING = "bucket", "lock", ".owner.json", ".pulling"
CHECKPOINTS, MANIFEST, ROWS = "checkpoints", "manifest.json", "metrics.jsonl"
BEST = "best.json"
"""Names the checkpoint that is kept besides the newest (train/run/best.py)."""
NOT_UPLOADED = {
    *("commits", "headers", "objects", "payloads", "views", "members", "founding.json"),  # a swarm's store writes them
    *(LOCK, "token", "invites.json", "listen.pem", "index.sqlite", ORIGIN),  # specific to this machine, or secret
}
TEMPORARY = re.compile(r"\.part$|\.\d+$|-journal$|-wal$|-shm$")


def origin(folder: Path) -> str | None:
    """Return the URL of the run that a folder is a copy of; None for a run of this disk."""
    path = folder / ORIGIN
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def shown(folder: Path) -> str:
    """Return the name of a run for messages: its URL or its folder."""
    return origin(folder) or str(folder)


def is_url(run: str) -> bool:
    """Return whether a run lies in a bucket. Raises InputError for a URL of another kind."""
    scheme, separator, rest = run.partition("://")
    if not separator:
        return False
    if scheme != "gs" or not rest.strip("/").count("/"):
        raise InputError(f"a run is a local folder or gs://BUCKET/FOLDER, not {run}")
    return True


def copy_folder(url: str) -> Path:
    """Return the folder of this disk's copy of a run, made if it is not there; downloads nothing."""
    url = url.rstrip("/")
    folder = cache_folder("runs") / url.removeprefix("gs://")
    folder.mkdir(parents=True, exist_ok=True)
    if origin(folder) != url:
        write_atomically(folder / ORIGIN, url)
    return folder


def best_of(folder: Path) -> str:
    """Return the folder of the best checkpoint of a run that keeps it; empty if there is none."""
    with suppress(FileNotFoundError):
        return step_of((folder / BEST).read_bytes())
    return ""


def step_of(best: bytes) -> str:
    """Return the folder of the checkpoint that the content of BEST names; empty if it names none."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{json.loads(best)['step']:08d}"
    return ""


def wipe(folder: Path) -> None:
    """Remove the copy of another run, which was at this URL before."""
    for path in folder.iterdir():
        if path.name in {ORIGIN, PULLING, LOCK, "token"}:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def grows(path: Path) -> bool:
    """Return whether a file of a run only grows."""
    return path.suffix in (".jsonl", ".log") or ".tfevents." in path.name


def split_members(folder: Path, start: int) -> None:
    """Append the new rows of the run to the file of each member. start: the byte at which they begin."""
    with (folder / ROWS).open("rb") as file:
        file.seek(max(0, start - 1))
        new = file.read()
    if start and not new.startswith(b"\n"):  # a part ended within a line
        split_members(folder, 0)
        return
    rows: dict[str, list[bytes]] = {}
    for line in new.splitlines(keepends=True):
        with suppress(ValueError):
            if member := json.loads(line).get("member"):
                rows.setdefault(str(member), []).append(line)
    for member, lines in rows.items():
        own = folder / "members" / member / ROWS
        own.parent.mkdir(parents=True, exist_ok=True)
        with own.open("ab" if start else "wb") as file:
            file.writelines(lines)


def files_below(folder: Path, excluded: Collection[str] = ()) -> list[Path]:
    """Return all files but those in `excluded` entries of the folder; others may vanish meanwhile."""
    found = []
    for parent, folders, files in os.walk(folder):
        if parent == str(folder):
            folders[:] = [name for name in folders if name not in excluded]
            files = [name for name in files if name not in excluded]
        found += [Path(parent, name) for name in files]
    return sorted(found)


def files_to_upload(folder: Path) -> list[Path]:
    """Return the files of a run that its bucket gets besides checkpoints: no hidden or temporary ones."""
    paths = files_below(folder, NOT_UPLOADED | {CHECKPOINTS})
    return [path for path in paths if not TEMPORARY.search(path.name) and not _is_hidden(path.relative_to(folder))]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)

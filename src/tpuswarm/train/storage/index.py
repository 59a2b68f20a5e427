"""Remember which files of a run's copy are in its bucket, and in which objects."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.storage.record import File

INDEX, EARLIER_INDEX = ".bucket.json", ".mirror.json"


@dataclass(frozen=True)
class Synced:
    """A file of this copy that is as in the bucket."""

    file: File
    stamp: tuple[int, int]
    """Size and time of change (ns) of the local file."""


@dataclass
class Index:
    """The files of this copy that are in the bucket too."""

    run: str = ""
    """Empty: nothing was downloaded yet."""
    owners: tuple[str, ...] = ()
    """Ids of this disk's processes. If one changed the record last, this copy is ahead of the bucket."""
    files: dict[str, Synced] = field(default_factory=dict)


_INDEX: TypeAdapter[Index] = TypeAdapter(Index)


def read_index(folder: Path) -> Index:
    """Return the index of a copy; an empty one if it has none, or a torn one."""
    try:
        return _INDEX.validate_json((folder / INDEX).read_bytes())
    except FileNotFoundError:
        with suppress(FileNotFoundError, ValueError, KeyError):
            found = json.loads((folder / EARLIER_INDEX).read_text(encoding="utf-8"))
            return Index(owners=(found["owner"],))
    except ValidationError:  # everything is downloaded again
        pass
    return Index()


def write_index(folder: Path, index: Index) -> None:
    """Replace the index of a copy."""
    with suppress(FileNotFoundError):  # the run was removed
        write_atomically(folder / INDEX, _INDEX.dump_json(index))


def stamp(path: Path) -> tuple[int, int]:
    """Return size and time of change (ns) of a file."""
    found = path.stat()
    return found.st_size, found.st_ctime_ns

"""Write files and folders atomically: after a crash or power cut they are complete or absent."""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpuswarm.errors import InputError

URL_AS_PATH = re.compile(r"\w+:/")


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666, *, is_shared: bool = False) -> None:
    """Create or replace a file; `mode` is subject to the umask.

    is_shared: several processes or threads may write it at once, and the last one wins.
    """
    with _new_file(_own_partial_path(path) if is_shared else partial_path(path), path, content, mode) as part:
        part.replace(path)


def create_atomically(path: Path, content: str | bytes) -> None:
    """Create a file that only its owner may read, unless it exists; of several processes the first one wins."""
    with _new_file(_own_partial_path(path), path, content, 0o600) as part:
        with suppress(FileExistsError):
            os.link(part, path)
        part.unlink()


@contextmanager
def _new_file(part: Path, path: Path, content: str | bytes, mode: int) -> Iterator[Path]:
    """Yield the complete temporary file of `path`, which the caller puts in place; remove it after an error."""
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        yield part
        fsync_path(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        if error.errno:  # a full disk names no file
            error.filename = error.filename or str(path)
        raise


def partial_path(path: Path) -> Path:
    """Return the path of the unfinished file; a killed process leaves it behind."""
    return path.with_name(path.name + ".part")


def _own_partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")


def fsync_path(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `path` at the end; InputError as in `require_new_folder`."""
    require_new_folder(path)
    path = path.resolve()  # replace the target of a link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o755 if file.is_dir() else 0o644)  # some libraries write only for their own user
            fsync_path(file)
        temporary.chmod(0o755)
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_new_folder(path: Path) -> None:
    """Raise InputError unless `path` can become a local folder: it is absent or an empty folder."""
    if URL_AS_PATH.match(str(path)):
        raise InputError(f"{path} is not a local folder; use one, and copy it afterwards")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} already exists; use a new or empty folder")
    if path.resolve() == Path.cwd():
        raise InputError(f"{path} is the current folder; use a new one inside it")

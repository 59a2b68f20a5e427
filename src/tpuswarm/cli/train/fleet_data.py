"""Place a fleet's training data where its machines can read it: in the folder they get, or in the bucket."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tpuswarm.config.formatting import format_bytes
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.recipes.language.hub import PREFIX
from tpuswarm.remote.paths import find_project_root
from tpuswarm.remote.sync.listing import list_files
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.stored_files import StoredFiles


@dataclass(frozen=True)
class Upload:
    """A copy of local files to a folder of the bucket, named by their content."""

    data: str
    """As the file names it."""
    url: str
    files: dict[str, Path]
    """By name in the bucket's folder."""

    @property
    def says(self) -> str:
        size = format_bytes(sum(path.stat().st_size for path in self.files.values()))
        return f"copy {self.data} ({size}) to {self.url}, since machines do not get it with this folder"

    def run(self) -> None:
        """Copy the files that are not there."""
        bucket = Bucket(self.url.rpartition("/")[0])
        with waiting(f"copying {self.data} to {self.url}") as show_progress:
            for number, (name, path) in enumerate(self.files.items(), 1):
                if not bucket.exists(name):
                    show_progress(f"{number} of {len(self.files)}")
                    bucket.put_file(name, path)


def local_paths(train: Train) -> dict[str, str]:
    """Return the settings of [train] that name files of this computer."""
    values: dict[str, object] = {"data": train.data, "init_from": train.init_from}
    named = {"recipe": train.recipe} | {f"options.{name}": value for name, value in train.options.items()}
    values |= {name: value for name, value in named.items() if "/" in str(value) or str(value).startswith(PREFIX)}
    texts = {name: str(value) for name, value in values.items() if value and "://" not in str(value)}
    return {name: text for name, text in texts.items() if _to_path(text).exists()}


def _to_path(text: str) -> Path:
    return Path(text.removeprefix(PREFIX)).expanduser()


def place_data(train: Train, run_url: str) -> tuple[str | None, tuple[Upload, ...]]:
    """Return the data as machines find it, and what must be copied to the bucket first.

    Data in the folder that machines get stays there, under its path from this folder. Other local data goes to the
    bucket. Raises InputError for other settings that name local files which machines do not get, or get elsewhere.
    """
    data, sent, uploads = train.data, _SentFiles(), list[Upload]()
    if data and "\n" in data:
        raise InputError("train.data is a list, and a fleet trains on one data set: put the files into one folder")
    for name, text in local_paths(train).items():
        path = _to_path(text).resolve()
        files = _list_files(path)
        if sent.includes(files):
            if name == "data":
                data = os.path.relpath(path)
        elif name == "data":
            uploads.append(_plan_upload(text, path, files, run_url))
            data = uploads[0].url
        else:
            raise InputError(
                f"train.{name} is {text}, which machines do not get: they get the files of {sent.root} that git does "
                "not ignore. Move it there, or let git not ignore it."
            )
        if name != "data" and _to_path(text).is_absolute():
            prefix = PREFIX if text.startswith(PREFIX) else ""
            raise InputError(
                f"train.{name} is {text}, which machines have elsewhere: write {prefix}./{os.path.relpath(path)}"
            )
    return data, tuple(uploads)


class _SentFiles:
    """The files that machines get with this folder."""

    def __init__(self) -> None:
        self.root = find_project_root(Path.cwd())
        self._names: set[str] | None = None

    def includes(self, files: list[Path]) -> bool:
        targets = [path.resolve() for path in files]  # a link is sent as a link
        if not all(path.is_relative_to(self.root) for path in targets):
            return False
        if self._names is None:
            try:
                self._names = set(list_files(self.root))
            except InputError:  # this folder cannot be sent
                self._names = set()
        return {str(path.relative_to(self.root)) for path in targets} <= self._names


def _list_files(path: Path) -> list[Path]:
    """Return a file, or the files below a folder but for hidden ones, which data never includes."""
    if not path.is_dir():
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _plan_upload(data: str, path: Path, files: list[Path], run_url: str) -> Upload:
    names = {str(file.relative_to(path.parent)): file for file in files}
    digest = hashlib.sha256()
    for name, file in names.items():
        digest.update(f"{name} {contents_digest(file)}\n".encode())
    bucket = run_url.removeprefix("gs://").partition("/")[0]
    return Upload(data, f"gs://{bucket}/data/{digest.hexdigest()[:12]}/{path.name}", names)


def require_stored_data(data: str | None) -> None:
    """Raise InputError if `data` is a gs:// URL with nothing there."""
    if data is not None and data.startswith("gs://") and "\n" not in data:  # place_data refuses a list
        try:
            StoredFiles(data)
        except FileNotFoundError:
            raise InputError(f"there is nothing at {data}, which [train] names as data") from None


def with_data(file: SwarmFile, data: str | None) -> SwarmFile:
    assert file.train is not None
    return file.model_copy(update={"train": file.train.model_copy(update={"data": data})})

"""Synchronize a run in a bucket with its copy on this disk.

A process works on the copy as on any run. Files that only grow are uploaded in parts, all others whole. An upload ends
with one change of the run's record, so readers see the whole upload or nothing. A swarm's commits are not uploaded from
here: swarm/storage/store.py writes them to the bucket first. Secrets stay on the disk, except the one with which the
hosts of a run recognize each other (train/hosts/agreement.py).
"""

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.locks import locked, read_lock_holder
from tpuswarm.train.storage.bucket import Bucket, BucketFailed, Unreachable
from tpuswarm.train.storage.connection import MAX_CONNECTIONS
from tpuswarm.train.storage.folders import (
    BEST,
    CHECKPOINTS,
    LOCK,
    MANIFEST,
    ORIGIN,
    OWNER,
    PULLING,
    ROWS,
    best_of,
    copy_folder,
    files_below,
    files_to_upload,
    grows,
    is_url,
    origin,
    split_members,
    step_of,
    wipe,
)
from tpuswarm.train.storage.index import Index, Synced, read_index, stamp, write_index
from tpuswarm.train.storage.record import (
    DATA,
    RECORD,
    File,
    OwnedRecord,
    Part,
    Record,
    VersionedRecord,
    objects_of,
    read_record,
)

KEPT = ("config.toml", "events.jsonl", ROWS)
"""No owner removes these from a run."""
Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_PARTS, MAX_PART_BYTES = 256, 2**24
"""A file that has more parts, or a larger new one, is uploaded whole."""
MAX_SMALL_BYTES = 2**23
"""Larger files are downloaded only where a command needs them."""
MAX_ATTEMPTS = 5
"""Downloads of a run whose owner replaces files meanwhile."""


def refreshed_folder(run: str) -> Path:
    """Return the folder of a run that exists or is to be; the copy of one in a bucket is brought up to date."""
    if not is_url(run):
        return Path(run)
    folder = copy_folder(run)
    refresh(folder)
    return folder


def download_run(url: str, whole: bool = False) -> Path:
    """Return the up-to-date copy of a run; whole: with large files and the newest and best checkpoint.

    Raises InputError if there is no such run, or its bucket does not answer.
    """
    folder = copy_folder(url)
    if read_lock_holder(folder / LOCK) is not None:  # the copy is ahead of the bucket
        return folder
    try:
        found = RunCopy(folder).pull(whole)
    except BucketFailed as error:
        raise InputError(str(error)) from error
    if not found:
        raise InputError(f"there is no run at {url}; `tpuswarm train RECIPE --run {url}` begins one")
    return folder


def refresh(folder: Path, large: str | None = None, whole: bool = False, step: str = "") -> None:
    """Bring a copy up to date; does nothing for a run of this disk.

    large: a folder of the run from which large files are downloaded too; whole: as in `download_run`; step: the folder
    of a checkpoint to download too.
    """
    if origin(folder) and read_lock_holder(folder / LOCK) is None:
        RunCopy(folder).pull(whole, large, step)


class RunCopy:
    """A run in a bucket, and its copy in a folder of this disk."""

    def __init__(self, folder: Path):
        self.folder, self.url = folder, str(origin(folder))
        self.bucket = Bucket(self.url)
        self._index = read_index(self.folder)
        self._pushing = threading.Lock()
        self.refused = ""
        """Why the bucket keeps objects that should go."""

    # From the bucket.

    def pull(self, whole: bool = False, large: str | None = None, step: str = "") -> bool:
        """Bring the copy up to date; return whether there is a run. The options are those of `refresh`."""
        with self._lock_download():
            before: VersionedRecord | None = None
            for _ in range(MAX_ATTEMPTS):
                found = read_record(self.bucket)
                if found is None:
                    return False
                try:
                    age_s = self.bucket.age_s(found.object) if found.is_owned else 0.0
                    write_atomically(self.folder / OWNER, json.dumps(found.record.owner.__dict__ | {"age": age_s}))
                    self._pull(found.record, whole, large, step, self._is_as_new_as(found.record))
                    return True
                except FileNotFoundError as error:
                    if before and before.generation == found.generation:
                        raise self._incomplete(error) from error
                    before = found  # its owner has replaced the object since
            raise BucketFailed(f"{self.url} changes faster than it can be read; start the same command again")

    def acquire(self, owned: OwnedRecord, on_owned: Callable[[], None] = lambda: None) -> None:
        """Acquire the run and download it. Raises InputError while another process owns it.

        on_owned: called after the run is acquired, before it is downloaded.
        """
        with self._lock_download():
            (self.folder / OWNER).unlink(missing_ok=True)
            self._require_no_last_copy(read_record(self.bucket))
            before = owned.acquire()
            is_ahead = self._is_as_new_as(before)
            self._index.owners = (*(self._index.owners if is_ahead else ()), owned.record.owner.id)
            write_index(self.folder, self._index)
            try:
                on_owned()
                self._download_acquired(before, is_ahead)
            except FileNotFoundError as error:
                owned.release()  # raises Lost if another process, which owns the run by now, has deleted the object
                raise self._incomplete(error) from error
            except BaseException:
                with suppress(RunFailed):
                    owned.release()
                raise
            self._index.run = before.run
            write_index(self.folder, self._index)

    def _is_as_new_as(self, record: Record) -> bool:
        is_same = self._index.run in ("", record.run)
        return is_same and (record.changed_by in self._index.owners or (not record.changed_by and not record.files))

    def _require_no_last_copy(self, found: VersionedRecord | None) -> None:
        """Raise InputError if a run that was deleted in the bucket is still on this disk."""
        is_gone = found is None or (not found.record.files and found.record.run != self._index.run)
        if is_gone and (self._index.run or self._index.owners) and files_to_upload(self.folder):
            raise InputError(
                f"the run at {self.url} was deleted, and {self.folder} is its last copy. Delete the copy to begin a "
                "new run, or use another --run."
            )

    def _incomplete(self, error: FileNotFoundError) -> BucketFailed:
        return BucketFailed(f"{self.url}: {error} failed: an object of this run was deleted; restore it")

    def _download_acquired(self, before: Record, is_ahead: bool) -> None:
        if is_ahead:  # a process killed after its last change did not save the index
            files = self._index.files
            self._index.files = {name: files[name] for name in files if before.files.get(name) == files[name].file}
        self._pull(before, True, None, "", is_ahead)
        if not is_ahead:
            for path in [*files_to_upload(self.folder), *files_below(self.folder / CHECKPOINTS)]:
                if self._name(path) not in before.files:
                    path.unlink()

    def _pull(self, record: Record, whole: bool, large: str | None, step: str, is_ahead: bool) -> None:
        if self._index.run not in ("", record.run):
            if not record.files:  # a new run begins where another was: nothing to see yet
                return
            wipe(self.folder)
            self._index = Index()
        self._index.run = record.run
        has_newer = is_ahead and bool(self._complete_local_steps())
        steps = {step} | (self._newest_and_best_steps(record) if whole and not has_newer else set())
        wanted = {}
        for name, file in record.files.items():
            first, _, rest = name.partition("/")
            if first == CHECKPOINTS:
                is_wanted = rest.partition("/")[0] in steps
            else:
                is_wanted = whole or file.size <= MAX_SMALL_BYTES or (bool(large) and name.startswith(f"{large}/"))
            if is_wanted:
                wanted[name] = file
        manifests = [name for name in wanted if name.endswith(f"/{MANIFEST}")]
        others = [name for name in wanted if name not in manifests]
        try:
            for names in (others, manifests):  # a manifest comes after the files that it names
                self._for_each(names, lambda name: self._pull_file(name, wanted[name], is_ahead))
            if not is_ahead:
                for name in [name for name in self._index.files if name not in record.files]:
                    if name.startswith(f"{CHECKPOINTS}/") and not whole:
                        continue  # another process may be reading the checkpoint, and gets no newer one here
                    (self.folder / name).unlink(missing_ok=True)
                    del self._index.files[name]
        finally:
            write_index(self.folder, self._index)

    def _newest_and_best_steps(self, record: Record) -> set[str]:
        folders = {name.split("/")[1] for name in record.files if name.startswith(f"{CHECKPOINTS}/")}
        steps = sorted(filter(str.isdigit, folders))  # others are damaged
        best = record.files.get(BEST, File(()))
        step = step_of(b"".join(self.bucket.read(part.object) for part in best.parts))
        return {*steps[-1:], *({step} & set(steps))}

    def _pull_file(self, name: str, file: File, is_ahead: bool) -> None:
        path, synced = self.folder / name, self._index.files.get(name)
        start, parts = 0, file.parts
        if path.exists():
            if is_ahead:
                return
            if synced and stamp(path) == synced.stamp:
                count = len(synced.file.parts)
                if file.parts == synced.file.parts:
                    return
                if synced.file.parts == file.parts[:count]:
                    start, parts = synced.file.size, file.parts[count:]
        path.parent.mkdir(parents=True, exist_ok=True)
        if start:
            self._append(path, parts)
        elif len(parts) == 1:
            self.bucket.fetch(parts[0].object, path)
            self._check_size(parts[0], path.stat().st_size)
        else:
            part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
            try:
                self._append(part, parts)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        os.utime(path, (file.written, file.written))
        self._index.files[name] = Synced(file, stamp(path))
        if name == ROWS:
            split_members(self.folder, start)

    def _append(self, path: Path, parts: Iterable[Part]) -> None:
        """Append the content of objects to a file, completely or not at all."""
        with path.open("ab") as file, TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            start, fetched = file.tell(), Path(folder) / "part"
            try:
                for part in parts:
                    self.bucket.fetch(part.object, fetched)
                    self._check_size(part, fetched.stat().st_size)
                    with fetched.open("rb") as source:
                        shutil.copyfileobj(source, file)
            except BaseException:
                file.truncate(start)
                raise

    def _check_size(self, part: Part, size: int) -> None:
        if size != part.size:
            raise BucketFailed(f"{self.url}/{part.object} has {size} bytes, not {part.size}; restore it")

    # To the bucket.

    def push(self, owned: OwnedRecord) -> None:
        """Upload changed files and name them in the run's record. Raises Lost and BucketFailed."""
        with self._pushing:
            if not (self.folder / ORIGIN).exists():
                raise RunFailed(f"{self.folder}, the copy of {self.url}, was deleted; start the same command again")
            changed = self._upload_files(owned) | self._upload_checkpoints(owned)
            before = owned.record.files
            removed = self._removed(before, changed)
            best = changed.get(BEST)
            if best and f"{CHECKPOINTS}/{best_of(self.folder)}/{MANIFEST}" not in {*before, *changed} - removed:
                del changed[BEST]  # its checkpoint is not there yet
            if changed or removed:
                new = {name: synced.file for name, synced in changed.items()}
                owned.change(lambda files: {name: files[name] for name in files if name not in removed} | new)
            for name in removed:
                self._index.files.pop(name, None)
            self._index.files |= changed
            write_index(self.folder, self._index)
            self._delete(objects_of(before.values()) - objects_of(owned.record.files.values()))

    def unsent(self) -> list[str]:
        """Return the files that are newer here than in the bucket."""
        names = []
        for path in [*files_to_upload(self.folder), *(self.folder / CHECKPOINTS).glob(f"[0-9]*/{MANIFEST}")]:
            synced = self._index.files.get(self._name(path))
            with suppress(FileNotFoundError):
                if synced is None or synced.stamp != stamp(path):
                    names.append(self._name(path))
        return names

    def sweep(self, owned: OwnedRecord) -> None:
        """Delete objects that earlier owners uploaded and never named."""
        named, epoch = objects_of(owned.record.files.values()), f"{DATA}{owned.record.epoch:06d}."
        listed = self.bucket.listed(DATA)
        self._delete({name for name in listed if name < epoch and not name.startswith(owned.prefix)} - named)

    def clear(self, owned: OwnedRecord) -> None:
        """Delete the run from the bucket. Raises Lost and BucketFailed."""
        objects = self.bucket.listed("").keys() - {RECORD}  # listed first: the next run may begin without the record
        owned.delete()
        for name in objects:
            self.bucket.delete(name)

    def _upload_files(self, owned: OwnedRecord) -> dict[str, Synced]:
        changed = {}
        for path in files_to_upload(self.folder):
            with suppress(FileNotFoundError):  # removed meanwhile
                if synced := self._upload(path, owned):
                    changed[self._name(path)] = synced
        return changed

    def _upload_checkpoints(self, owned: OwnedRecord) -> dict[str, Synced]:
        """Upload each checkpoint that is whole here; one that is pruned meanwhile is left out."""
        changed: dict[str, Synced] = {}
        for step in self._complete_local_steps():
            if f"{CHECKPOINTS}/{step}/{MANIFEST}" in self._index.files:
                continue
            paths = files_below(self.folder / CHECKPOINTS / step)
            with suppress(FileNotFoundError):
                found = self._for_each(paths, lambda path: self._upload(path, owned))
                if (self.folder / CHECKPOINTS / step / MANIFEST).exists():
                    changed |= {self._name(path): new for path, new in zip(paths, found, strict=True) if new}
        return changed

    def _upload(self, path: Path, owned: OwnedRecord) -> Synced | None:
        """Upload a changed file, or its new end; return None for an unchanged one. Raises FileNotFoundError."""
        name, about = self._name(path), path.stat()
        synced, now = self._index.files.get(name), (about.st_size, about.st_ctime_ns)
        if synced and synced.stamp == now:
            return None
        parts = synced.file.parts if synced else ()
        sent = synced.file.size if synced else 0
        if grows(path) and sent < about.st_size <= sent + MAX_PART_BYTES and len(parts) < MAX_PARTS:
            with path.open("rb") as file:
                file.seek(sent)
                data = file.read(about.st_size - sent)
            added = Part(owned.new_object(name), len(data))
            self.bucket.create(added.object, data)
            parts = (*parts, added)
        else:
            new = owned.new_object(name)
            parts = (Part(new, self.bucket.put_file(new, path)),)
        return Synced(File(parts, about.st_mtime), now)

    def _removed(self, before: Iterable[str], changed: Iterable[str]) -> set[str]:
        """Return the files of the record that this disk has no more."""
        has_checkpoint = bool(self._complete_local_steps())
        return {
            name
            for name in before
            if name not in (*changed, *KEPT)
            and not (self.folder / name).exists()
            and (has_checkpoint or not name.startswith(f"{CHECKPOINTS}/"))
        }

    def _complete_local_steps(self) -> list[str]:
        return sorted(path.parent.name for path in (self.folder / CHECKPOINTS).glob(f"[0-9]*/{MANIFEST}"))

    def _delete(self, objects: Iterable[str]) -> None:
        try:
            self._for_each(sorted(objects), self.bucket.delete)
        except Unreachable:  # the next owner sweeps them
            pass
        except BucketFailed as error:
            self.refused = str(error)

    def _for_each(self, items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
        """Work on several items at a time; an interrupt does not wait for those under way."""
        pool = ThreadPoolExecutor(MAX_CONNECTIONS)
        try:
            return list(pool.map(work, items))
        except BaseException as error:
            self.bucket.gave_up |= not isinstance(error, Exception)
            raise
        finally:
            pool.shutdown(wait=not self.bucket.gave_up, cancel_futures=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    @contextmanager
    def _lock_download(self) -> Iterator[None]:
        with locked(self.folder / PULLING, "set TPUSWARM_CACHE to a folder on a local disk"):
            self._index = read_index(self.folder)
            yield

"""Checkpoints: written beside the training, proved by digests, the damaged ones passed over.

A checkpoint is a folder named by its step: `state/` by Orbax, and `manifest.json`, written last, with the SHA-256 of
every file. What has no matching manifest is no checkpoint: Orbax restores most single-bit errors silently.
"""

import errno
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.metadata.array_metadata_store import Store
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.paths import by_path, other_model
from tpuswarm.train.process.atomic import fsync_path, write_atomically
from tpuswarm.train.run.directory import writing

MANIFEST = "manifest.json"
POSITION = "position.json"
"""Where the run's data goes on, for data that has positions."""
SMALLEST_SLICE = 64 * 2**20
"""In bytes. Orbax saves an array that several devices hold in slices, one from each of them. Every slice takes a
program of its own, 0.06 s to compile for TPUs, and a state would have hundreds of small ones."""
WAY_OUT = "make room and start the same command again"


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its step, folder, and what the trainer kept beside the state."""

    step: int
    folder: Path
    about: dict[str, float]
    seconds: float
    """What saving it took."""
    digest: str
    """SHA-256 of its manifest, and so of all its files."""

    @property
    def position(self) -> Any:
        """Of the run's data, as it was saved; None where it has none."""
        file = self.folder / POSITION
        return json.loads(file.read_bytes()) if file.exists() else None


class _Manifest(TypedDict):
    """manifest.json."""

    step: int
    about: dict[str, float]
    seconds: float
    files: dict[str, str]


_MANIFEST = TypeAdapter(_Manifest)


class Checkpoints:
    """The checkpoints of one run; one save at a time is under way.

    Several hosts save together, each its part of the state, all of them at the same steps.
    """

    def __init__(self, folder: Path, keep: int, seconds: float | None = None, leads: bool = True):
        """leads: of several hosts, the one that makes and proves the folders."""
        self._folder, self._keep, self._leads = folder, keep, leads
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that we raise in words
        read_arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=SMALLEST_SLICE, array_metadata_store=Store()
        )
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, read_arrays))
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=handlers))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.pinned: int | None = None
        """The step of one that is kept however old it is."""
        self._next: tuple[int, Callable[[], None]] | None = None
        """The one to pin in its place, and whom to tell, once the save under way is whole."""
        self.seconds = seconds
        """What the last save took, from its start to its manifest; at first, that of the process before."""

    def save(self, step: int, state: Any, about: dict[str, float], position: Any = None) -> None:
        """Begin to save; returns when the state is copied off the devices. Raises what the save before it raised.

        position: of the run's data, plain values; None where it has none.
        """
        self.wait()
        start = time.monotonic()
        folder = self._folder / f"{step:08d}"
        try:
            if self._leads:
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same step
                folder.mkdir(parents=True)
                _require_room(folder, state)
                if position is not None:
                    (folder / POSITION).write_text(json.dumps(position))
            self._orbax.save((folder / "state").absolute(), args=ocp.args.PyTreeSave(state))
        except RunFailed:
            shutil.rmtree(folder)
            raise
        except Exception as error:  # Orbax raises many types; all mean that nothing was saved
            raise _save_failed(folder, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, folder, about, start), name="checkpoint")
        self._thread.start()

    def pin(self, step: int, whole: Callable[[], None]) -> None:
        """Keep the newest, that of `step`, however old it gets, and the one pinned before no more.

        This happens when it is whole: now, or in a later `check`, `wait` or `close`. First `whole` is called, so that
        a process that is killed meanwhile leaves both; of several hosts on the one that leads.
        """
        self._next = step, whole
        self.check()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what a finished save in the background raised."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way; raises RunFailed if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error, self._next = self._error, None, None
            raise error
        if self._next is not None:
            (step, whole), self._next = self._next, None
            if self._leads:
                whole()
                self.pinned = step
                with writing(self._folder):
                    self._prune()

    def close(self) -> None:
        """Wait without raising, and end Orbax's threads."""
        with suppress(RunFailed):
            self.wait()
        self._orbax.close()

    def _finish(self, step: int, folder: Path, about: dict[str, float], start: float) -> None:
        try:
            self._orbax.wait_until_finished()  # of all hosts
            if not self._leads:
                return
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            digests = {str(path.relative_to(folder)): _digest(path) for path in files}
            for path in files:
                fsync_path(path)
            self.seconds = time.monotonic() - start
            manifest = {"step": step, "about": about, "seconds": self.seconds, "files": digests}
            write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
            self._prune()
        except Exception as error:  # noqa: BLE001  # raised by the training thread at its next look
            self._error = _save_failed(folder, error)

    def _prune(self) -> None:
        folders = checkpoint_folders(self._folder)
        whole = [folder for folder in folders if (folder / MANIFEST).exists()]
        unfinished = [folder for folder in folders if folder not in whole]
        for folder in unfinished + whole[self._keep :]:
            if int(folder.name) != self.pinned or folder in unfinished:
                shutil.rmtree(folder)


def checkpoint_folders(folder: Path) -> list[Path]:
    """All folders named by a step, whole or not, newest first."""
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if path.name.isdigit()), key=lambda path: -int(path.name))


def newest_intact(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint of a run's `checkpoints/`, and a sentence for each damaged one passed over."""
    passed: list[str] = []
    for candidate in checkpoint_folders(folder):
        found = inspect(candidate)
        if isinstance(found, Saved):
            return found, passed
        passed.append(f"checkpoint {candidate.name} is damaged ({found}); skipping it")
    return None, passed


def require_intact(folder: Path) -> tuple[Saved, list[str]]:
    """As `newest`, of a run's folder; InputError where there is none."""
    saved, notes = newest_intact(folder / "checkpoints")
    if saved is None:
        raise InputError(f"{folder} has no intact checkpoint" + "".join(f"; {note}" for note in notes))
    return saved, notes


def set_aside(folder: Path, restored: Saved | None) -> None:
    """Put what is newer than the checkpoint gone on from out of the way of new ones.

    Damaged checkpoints are renamed to STEP.damaged, unfinished ones removed, but for the very first: it shows that the
    run has begun, and is written anew. Raises RunFailed if nothing could be
    restored although checkpoints were once finished, which the first one is before another is begun: to begin again
    from nothing is the user's decision.
    """
    passed = [path for path in checkpoint_folders(folder) if restored is None or int(path.name) > restored.step]
    damaged = [path for path in passed if (path / MANIFEST).exists()]
    if restored is None and (damaged or any(int(path.name) > 0 for path in passed)):
        raise RunFailed(
            f"every checkpoint in {folder} is damaged ({', '.join(path.name for path in passed)}); restore a copy, "
            "or use another --run to start over"
        )
    for path in passed if restored else ():
        if path in damaged:
            shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
            path.rename(path.with_suffix(".damaged"))
        else:
            shutil.rmtree(path)


def inspect(folder: Path) -> Saved | str:
    """The checkpoint in a folder, or what is wrong with it in words."""
    try:
        written = (folder / MANIFEST).read_bytes()
        manifest = _MANIFEST.validate_json(written)
        for name, digest in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} does not match its digest"
        if manifest["step"] != int(folder.name):
            return f"its manifest is that of step {manifest['step']}"
        digest = hashlib.sha256(written).hexdigest()
        return Saved(manifest["step"], folder, manifest["about"], manifest["seconds"], digest)
    except FileNotFoundError:
        return "no manifest: its save did not finish"
    except ValueError:
        return "its manifest cannot be read"
    except OSError as error:
        return f"it cannot be read: {error}"


def restore(saved: Saved, abstract: Any) -> Any:
    """The state of a checkpoint in the shapes, dtypes and shardings of `abstract`.

    The devices may be others than those that saved. Raises RunFailed where the checkpoint holds another state.
    """
    place = (saved.folder / "state").absolute()
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        there, here = _shapes(orbax.metadata(place).item_metadata.tree), _shapes(abstract)
        if different := other_model(there, here):
            raise RunFailed(f"checkpoint {saved.folder} holds a different model: {different}")
        return orbax.restore(place, args=ocp.args.PyTreeRestore(abstract, restore_args=args))


def read_arrays(saved: Saved) -> dict[str, np.ndarray]:
    """Every array of a checkpoint on the host, by its path; the program that made it is not needed."""
    place = (saved.folder / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        there = orbax.metadata(place).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)
        return by_path(orbax.restore(place, args=ocp.args.PyTreeRestore(restore_args=args)))


def _shapes(tree: Any) -> dict[str, str]:
    return {name: f"{_held(leaf).dtype} {tuple(_held(leaf).shape)}" for name, leaf in by_path(tree).items()}


def _held(leaf: Any) -> Any:
    """What Orbax says that a file holds of a leaf: of a typed PRNG key its data."""
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, leaf) if key else leaf


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_room(folder: Path, state: Any) -> None:
    """Raise RunFailed before anything is written, if the disk cannot hold the state."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFailed(
            f"checkpoint {folder} could not be written: it needs {needed / 2**20:.1f} MiB, only "
            f"{free / 2**20:.1f} MiB free; {WAY_OUT}"
        )


def _save_failed(folder: Path, error: BaseException) -> RunFailed:
    full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
    reason = "the disk is full" if full else " ".join(str(error).split())[:300]
    return RunFailed(f"checkpoint {folder} could not be written: {reason}; {WAY_OUT}")

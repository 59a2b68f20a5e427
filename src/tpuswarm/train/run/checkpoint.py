"""Save checkpoints in the background, verify them by digests, and skip damaged ones.

A checkpoint is a folder named by its step: `state/` by Orbax, and `manifest.json`, written last, with the SHA-256 of
every file. Orbax alone would load most files with a flipped bit without an error. It is imported where it is needed:
that takes half a second, and members of a swarm have no checkpoints.
"""

import errno
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.paths import by_path, describe_mismatch
from tpuswarm.train.process.atomic import fsync_path, write_atomically
from tpuswarm.train.run.directory import writing

MANIFEST = "manifest.json"
POSITION = "position.json"
"""Position of the data after the saved step."""
MIN_SLICE_BYTES = 64 * 2**20
"""Orbax saves a replicated array in slices, one from each device. Each slice needs a program (0.06 s to compile for
TPUs), so small arrays are not sliced."""
ADVICE = "make room and start the same command again"


@dataclass(frozen=True)
class Saved:
    """An intact checkpoint."""

    step: int
    folder: Path
    about: dict[str, float]
    """Values that the trainer saved beside the state."""
    seconds: float
    """Duration of the save."""
    digest: str
    """SHA-256 of the manifest, and so of all files."""

    @property
    def position(self) -> Any:
        """The saved position of the data; None without one."""
        file = self.folder / POSITION
        return json.loads(file.read_bytes()) if file.exists() else None


class _Manifest(TypedDict):
    step: int
    about: dict[str, float]
    seconds: float
    files: dict[str, str]


_MANIFEST = TypeAdapter(_Manifest)


class Checkpoints:
    """The checkpoints of a run; saves one at a time. Several hosts save their shards together, at the same steps."""

    def __init__(self, folder: Path, keep: int, last_save_s: float | None = None, is_leader: bool = True):
        """keep: number of checkpoints. is_leader: True on one of several hosts, which makes and verifies folders."""
        import orbax.checkpoint as ocp
        from orbax.checkpoint._src.metadata.array_metadata_store import Store

        self._folder, self._keep, self._is_leader = folder, keep, is_leader
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that we raise
        array_handler = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES, array_metadata_store=Store()
        )
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, array_handler))
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=handlers))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.pinned: int | None = None
        """The step of a checkpoint that is never pruned."""
        self._next_pin: tuple[int, Callable[[], None]] | None = None
        self.last_save_s = last_save_s

    def save(self, step: int, state: Any, about: dict[str, float], position: Any = None) -> None:
        """Begin to save; return once the state is copied off the devices. Raises the error of the previous save.

        position: of the data, as JSON values; None without one.
        """
        import orbax.checkpoint as ocp

        self.wait()
        start = time.monotonic()
        folder = self._folder / f"{step:08d}"
        try:
            if self._is_leader:
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same step
                folder.mkdir(parents=True)
                _require_room(folder, state)
                if position is not None:
                    (folder / POSITION).write_text(json.dumps(position))
            self._orbax.save((folder / "state").absolute(), args=ocp.args.PyTreeSave(state))
        except RunFailed:
            shutil.rmtree(folder)
            raise
        except Exception as error:  # Orbax raises many types
            raise _save_failed(folder, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, folder, about, start), name="checkpoint")
        self._thread.start()

    def pin(self, step: int, on_complete: Callable[[], None]) -> None:
        """Never prune the newest checkpoint, and unpin the previous one.

        Takes effect when the save is complete: now, or in a later `check`, `wait` or `close`. Calls `on_complete` on
        the leading host before it unpins, so that a killed process leaves both.
        """
        self._next_pin = step, on_complete
        self.check()

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a finished save."""
        if not self.is_saving:
            self.wait()

    def wait(self) -> None:
        """Wait for the current save; RunFailed if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error, self._next_pin = self._error, None, None
            raise error
        if self._next_pin is not None:
            (step, on_complete), self._next_pin = self._next_pin, None
            if self._is_leader:
                on_complete()
                self.pinned = step
                with writing(self._folder):
                    self._prune()

    def close(self) -> None:
        """Wait without raising, and stop Orbax's threads."""
        with suppress(RunFailed):
            self.wait()
        self._orbax.close()

    def _finish(self, step: int, folder: Path, about: dict[str, float], start: float) -> None:
        try:
            self._orbax.wait_until_finished()  # on all hosts
            if not self._is_leader:
                return
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            digests = {str(path.relative_to(folder)): _digest(path) for path in files}
            for path in files:
                fsync_path(path)
            self.last_save_s = time.monotonic() - start
            manifest = {"step": step, "about": about, "seconds": self.last_save_s, "files": digests}
            write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
            self._prune()
        except Exception as error:  # noqa: BLE001  # the training thread raises it
            self._error = _save_failed(folder, error)

    def _prune(self) -> None:
        folders = checkpoint_folders(self._folder)
        complete = [folder for folder in folders if (folder / MANIFEST).exists()]
        unfinished = [folder for folder in folders if folder not in complete]
        for folder in unfinished + complete[self._keep :]:
            if int(folder.name) != self.pinned or folder in unfinished:
                shutil.rmtree(folder)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return all folders named by a step, complete or not, newest first."""
    entries = folder.iterdir() if folder.is_dir() else ()  # glob would hide that it cannot be read
    return sorted((path for path in entries if path.name.isdigit()), key=lambda path: -int(path.name))


def newest_intact(folder: Path) -> tuple[Saved | None, list[str]]:
    """Return the newest intact checkpoint of a `checkpoints/`, and a sentence for each damaged one that it skips."""
    notes: list[str] = []
    for candidate in checkpoint_folders(folder):
        found = inspect(candidate)
        if isinstance(found, Saved):
            return found, notes
        notes.append(f"checkpoint {candidate.name} is damaged ({found}); skipping it")
    return None, notes


def require_intact(folder: Path) -> tuple[Saved, list[str]]:
    """Return the newest intact checkpoint of a run's folder, and notes; InputError without one."""
    saved, notes = newest_intact(folder / "checkpoints")
    if saved is None:
        raise InputError(f"{folder} has no intact checkpoint" + "".join(f"; {note}" for note in notes))
    return saved, notes


def set_aside(folder: Path, restored: Saved | None) -> None:
    """Rename damaged checkpoints that are newer than the restored one to STEP.damaged, and remove unfinished ones.

    Without a restored one keep an unfinished first checkpoint, which shows that the run has begun. Raises RunFailed if
    nothing could be restored although a checkpoint was once complete: the user decides whether to start over.
    """
    skipped = [path for path in checkpoint_folders(folder) if restored is None or int(path.name) > restored.step]
    damaged = [path for path in skipped if (path / MANIFEST).exists()]
    if restored is None and (damaged or any(int(path.name) > 0 for path in skipped)):
        raise RunFailed(
            f"every checkpoint in {folder} is damaged ({', '.join(path.name for path in skipped)}); restore a copy, "
            "or use another --run to start over"
        )
    for path in skipped if restored else ():
        if path in damaged:
            shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
            path.rename(path.with_suffix(".damaged"))
        else:
            shutil.rmtree(path)


def inspect(folder: Path) -> Saved | str:
    """Return the checkpoint in a folder, or why it is damaged."""
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


def restore(saved: Saved, abstract: Any, recorded: Mapping[str, str] | None = None) -> Any:
    """Return the state of a checkpoint in the shapes, dtypes and shardings of `abstract`, on any devices.

    recorded: settings of JAX under which the run began. Raises RunFailed if the checkpoint holds a different model,
    InputError if 64-bit types are the reason.
    """
    import orbax.checkpoint as ocp

    path = (saved.folder / "state").absolute()
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        there, here = _shapes(orbax.metadata(path).item_metadata.tree), _shapes(abstract)
        if different := describe_mismatch(there, here):
            before, now = (recorded or {}).get("jax_enable_x64"), str(jax.config.values["jax_enable_x64"])
            if before not in (None, now):
                raise InputError(
                    f"JAX_ENABLE_X64 was {before} when this run began and is {now}, so its arrays have other types: "
                    f"set JAX_ENABLE_X64={before}"
                )
            raise RunFailed(f"checkpoint {saved.folder} holds a different model: {different}")
        return orbax.restore(path, args=ocp.args.PyTreeRestore(abstract, restore_args=args))


def read_arrays(saved: Saved) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint on the host, by its path; needs no recipe."""
    import orbax.checkpoint as ocp

    path = (saved.folder / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        there = orbax.metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)
        return by_path(orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=args)))


def _shapes(tree: Any) -> dict[str, str]:
    return {name: _stored_type(leaf) for name, leaf in by_path(tree).items()}


def _stored_type(leaf: Any) -> str:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # Orbax stores the data of a typed key
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{leaf.dtype} {tuple(leaf.shape)}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_room(folder: Path, state: Any) -> None:
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFailed(
            f"checkpoint {folder} could not be written: it needs {needed / 2**20:.1f} MiB, only "
            f"{free / 2**20:.1f} MiB free; {ADVICE}"
        )


def _save_failed(folder: Path, error: BaseException) -> RunFailed:
    full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
    reason = "the disk is full" if full else " ".join(str(error).split())[:300]
    return RunFailed(f"checkpoint {folder} could not be written: {reason}; {ADVICE}")

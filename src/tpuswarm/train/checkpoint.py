"""Checkpoints: written beside the training, proved by digests, the damaged ones passed over.

A checkpoint is a folder named by its step: `state/` by Orbax, and `manifest.json`, written last, with the SHA-256 of
every file. What has no matching manifest is no checkpoint: Orbax restores most single-bit errors silently.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tpuswarm.errors import RunFailed

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its step, folder, and what the trainer kept beside the state."""

    step: int
    folder: Path
    about: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; one save at a time is under way."""

    def __init__(self, folder: Path, keep: int):
        self._folder, self._keep = folder, keep
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds: float | None = None
        """What the last save took, from its start to its manifest."""

    def save(self, step: int, state: Any, about: dict[str, Any]) -> None:
        """Begin to save; returns when the state is copied off the devices. Raises what the save before it raised."""
        self.wait()
        start = time.monotonic()
        folder = self._folder / f"{step:08d}"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same step
            folder.mkdir(parents=True)
            self._orbax.save((folder / "state").absolute(), args=ocp.args.PyTreeSave(state))
        except Exception as error:  # Orbax raises many types; all mean that nothing was saved
            raise _save_failed(folder, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, folder, about, start), name="checkpoint")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what a finished save in the background raised."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way; raises RunFailed if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait without raising, and end Orbax's threads."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._orbax.close()

    def _finish(self, step: int, folder: Path, about: dict[str, Any], start: float) -> None:
        try:
            self._orbax.wait_until_finished()
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            digests = {str(path.relative_to(folder)): _digest(path) for path in files}
            for path in files:
                _sync(path)
            write_atomically(folder / MANIFEST, json.dumps({"step": step, "about": about, "files": digests}, indent=1))
            self.seconds = time.monotonic() - start
            self._prune()
        except Exception as error:  # noqa: BLE001  # raised by the training thread at its next look
            self._error = _save_failed(folder, error)

    def _prune(self) -> None:
        whole = [folder for folder in self.folders() if (folder / MANIFEST).exists()]
        for folder in whole[self._keep :]:
            shutil.rmtree(folder)

    def folders(self) -> list[Path]:
        """All checkpoint folders, whole or not, newest first."""
        return checkpoint_folders(self._folder)


def checkpoint_folders(folder: Path) -> list[Path]:
    """All folders named by a step, whole or not, newest first."""
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if path.name.isdigit()), key=lambda path: -int(path.name))


def newest(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint of a run's `checkpoints/`, and a sentence for each damaged one passed over."""
    passed: list[str] = []
    for candidate in checkpoint_folders(folder):
        found = inspect(candidate)
        if isinstance(found, Saved):
            return found, passed
        passed.append(f"checkpoint {candidate.name} is damaged ({found}) and is passed over")
    return None, passed


def inspect(folder: Path) -> Saved | str:
    """The checkpoint in a folder, or what is wrong with it in words."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} does not have the digest in its manifest"
        return Saved(manifest["step"], folder, manifest["about"])
    except FileNotFoundError:
        return "it has no manifest: its save did not finish"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"


def restore(saved: Saved, abstract: Any) -> Any:
    """The state of a checkpoint in the shapes, dtypes and shardings of `abstract`.

    The devices may be others than those that saved. Raises RunFailed where the checkpoint holds another state.
    """
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        try:
            state = orbax.restore(
                (saved.folder / "state").absolute(), args=ocp.args.PyTreeRestore(abstract, restore_args=args)
            )
        except (ValueError, KeyError, TypeError) as error:
            first = " ".join(str(error).split())[:300]
            raise RunFailed(f"checkpoint {saved.folder} holds another model than this run's: {first}") from error
    # Orbax pads or cuts silently where shapes differ.
    differing = jax.tree.map(lambda got, want: got.shape == want.shape and got.dtype == want.dtype, state, abstract)
    if not all(jax.tree.leaves(differing)):
        raise RunFailed(f"checkpoint {saved.folder} holds arrays of other shapes than this run's")
    return state


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_failed(folder: Path, error: BaseException) -> RunFailed:
    free = shutil.disk_usage(folder if folder.exists() else folder.parents[1]).free
    full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
    reason = f"the disk is full ({free / 2**20:.1f} MiB free)" if full else " ".join(str(error).split())[:300]
    return RunFailed(f"checkpoint {folder} could not be written: {reason}; make room and start the same command again")

"""Save the checkpoints of a run in the background, and remove old ones."""

import errno
import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from asyncio import BaseEventLoop
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from tpuswarm.errors import RunFailed
from tpuswarm.train.data.placing import replicate_over_hosts
from tpuswarm.train.process.atomic import fsync_path, write_atomically
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.checkpoint import (
    MANIFEST,
    POSITION,
    Saved,
    checkpoint_folders,
    file_digest,
    manifest_digest,
)
from tpuswarm.train.run.directory import writing
from tpuswarm.train.run.schema import EVENTS, METRICS

MIN_SLICE_BYTES = 64 * 2**20
"""Orbax saves a replicated array in slices, one from each device. Each slice needs a program (0.06 s to compile for
TPUs), so small arrays are not sliced."""
START_AGAIN = "start the same command again"


class Checkpoints:
    """The checkpoints of a run; saves one at a time. Several hosts save at the same steps."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        last_save_s: float | None = None,
        is_leader: bool = True,
        leader_process: int = 0,
        leader_saves_all: bool = False,
    ):
        """keep: number of checkpoints. is_leader: True on one of several hosts, which makes and verifies folders.

        leader_process: JAX's index of its process. leader_saves_all: other hosts do not see the folder; else each host
        saves its shards. The leader's devices must be the first of the mesh: then it has the first replica of an array.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint._src.metadata.array_metadata_store import Store

        self._folder, self._keep, self._is_leader = folder, keep, is_leader
        self._leader_saves_all = leader_saves_all
        _silence_orbax()
        hosts = ocp.options.MultiprocessingOptions(leader_process)
        if leader_saves_all:  # without a primary host Orbax expects no files of other processes
            hosts = ocp.options.MultiprocessingOptions(None, active_processes={leader_process})
        array_handler = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES,
            primary_host=hosts.primary_host,
            use_replica_parallel=not leader_saves_all,
            array_metadata_store=Store(),
        )
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, array_handler))
        self._orbax: Any = None
        if is_leader or not leader_saves_all:
            handler = ocp.PyTreeCheckpointHandler(type_handler_registry=handlers, multiprocessing_options=hosts)
            self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=hosts)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.warn: Callable[[str], None] = partial(echo, err=True)
        """Called with a sentence if an old checkpoint could not be removed."""
        self._warning = ""
        self.pinned: int | None = None
        """The step of a checkpoint that is never pruned."""
        self._next_pin: tuple[int, Callable[[], None]] | None = None
        self.last_save_s = last_save_s

    def save(self, step: int, state: Any, about: dict[str, Any], position: Any = None) -> None:
        """Begin to save; return once the state is copied off the devices. Raises the error of the previous save.

        position: of the data, as JSON values; None without one.
        """
        import orbax.checkpoint as ocp

        self.wait()
        start = time.monotonic()
        folder = self._folder / f"{step:08d}"
        if self._leader_saves_all:
            leaves, structure = jax.tree.flatten(state)
            state = jax.tree.unflatten(structure, replicate_over_hosts(leaves))
            if not self._is_leader:
                return
        try:
            if self._is_leader:
                if os.path.lexists(folder) and _remove(folder):  # a damaged one of the same step
                    _move_aside(folder)
                folder.mkdir(parents=True)
                _require_room(folder, state)
                if position is not None:
                    (folder / POSITION).write_text(json.dumps(position))
            self._orbax.save((folder / "state").absolute(), args=ocp.args.PyTreeSave(state))
        except RunFailed:
            shutil.rmtree(folder, ignore_errors=True)
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
        if self._warning:
            warning, self._warning = self._warning, ""
            self.warn(warning)

    def close(self) -> None:
        """Wait without raising, and stop Orbax's threads."""
        with suppress(RunFailed):
            self.wait()
        if self._orbax is not None:
            self._orbax.close()

    def _finish(self, step: int, folder: Path, about: dict[str, Any], start: float) -> None:
        try:
            self._orbax.wait_until_finished()  # on all hosts
            if not self._is_leader:
                return
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            digests = {str(path.relative_to(folder)): file_digest(path) for path in files}
            for path in [*files, *(self._folder.parent / name for name in (METRICS, EVENTS))]:
                with suppress(FileNotFoundError):  # a run's first checkpoint comes before any row
                    fsync_path(path)
            for path in [*(path for path in folder.rglob("*") if path.is_dir()), self._folder, self._folder.parent]:
                fsync_path(path)
            self.last_save_s = time.monotonic() - start
            manifest = {"step": step, "about": about, "seconds": self.last_save_s, "files": digests}
            manifest["sha256"] = manifest_digest(manifest)
            write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
            self._prune()
        except Exception as error:  # noqa: BLE001  # the training thread raises it
            self._error = _save_failed(folder, error)

    def _prune(self) -> None:
        folders = checkpoint_folders(self._folder)
        complete = [folder for folder in folders if (folder / MANIFEST).exists()]
        unfinished = [folder for folder in folders if folder not in complete]
        for folder in unfinished + complete[self._keep :]:
            is_pinned = int(folder.name) == self.pinned and folder in complete
            if is_pinned or _is_being_read(folder):
                continue
            if reason := _remove(folder):
                self._warning = (
                    f"the old checkpoint {folder} could not be removed: {reason}; training continues, and each save "
                    "tries again"
                )


def set_aside(folder: Path, restored: Saved | None) -> None:
    """Rename damaged checkpoints that are newer than the restored one to STEP.damaged, and remove unfinished ones.

    One that cannot be moved or removed stays until its step is saved. Without a restored one keep an unfinished first
    checkpoint, which shows that the run has begun. Raises RunFailed if nothing could be restored although a checkpoint
    was once complete: the user decides whether to start over.
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
            with suppress(OSError):
                _move_aside(path)
        else:
            _remove(path)


@cache
def _silence_orbax() -> None:
    """Hide what the libraries print about a failed save, for the rest of the process: we raise its error.

    TensorStore reports the other writes to an event loop that Orbax has closed by then.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    report_other = sys.unraisablehook

    def report(error: Any) -> None:
        trace = error.exc_traceback
        if trace is None or trace.tb_frame.f_code is not BaseEventLoop.call_soon_threadsafe.__code__:
            report_other(error)

    sys.unraisablehook = report


def _is_being_read(folder: Path) -> bool:
    try:
        with (folder / MANIFEST).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no manifest, or no locks
        pass
    return False


def _remove(folder: Path) -> str:
    """Remove a checkpoint, first the manifest, so that the rest is no checkpoint; return why it is not removed."""
    if folder.is_symlink():
        return "it is a link"
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _move_aside(folder: Path) -> None:
    aside = folder.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _require_room(folder: Path, state: Any) -> None:
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFailed(
            f"checkpoint {folder} could not be written: it needs {needed / 2**20:.1f} MiB, only "
            f"{free / 2**20:.1f} MiB free; make room and {START_AGAIN}"
        )


def _save_failed(folder: Path, error: BaseException) -> RunFailed:
    full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
    reason, advice = ("the disk is full", "make room") if full else (" ".join(str(error).split())[:300], "fix that")
    return RunFailed(f"checkpoint {folder} could not be written: {reason}; {advice} and {START_AGAIN}")

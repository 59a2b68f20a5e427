"""Find the checkpoints of a run, verify them by digests, skip damaged ones, and restore them.

A checkpoint is a folder named by its step: `state/` by Orbax, and `manifest.json`, written last, with the SHA-256 of
every file. Orbax alone would load most files with a flipped bit without an error. It is imported where it is needed:
that takes half a second, and members of a swarm have no checkpoints.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.paths import by_path, describe_mismatch
from tpuswarm.train.run.directory import holder_pid

MANIFEST = "manifest.json"
POSITION = "position.json"
"""Position of the data after the saved step."""
UNFINISHED = "no manifest: its save did not finish"

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """An intact checkpoint."""

    step: int
    folder: Path
    about: dict[str, Any]
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

    @property
    def is_there(self) -> bool:
        """Whether it has not been pruned since it was found."""
        try:
            return hashlib.sha256((self.folder / MANIFEST).read_bytes()).hexdigest() == self.digest
        except OSError:
            return False


Find = Callable[[], tuple[Saved, list[str]]]
"""Returns a checkpoint, and a sentence for each damaged one that was skipped."""


class _Manifest(TypedDict):
    step: int
    about: dict[str, Any]
    seconds: float
    files: dict[str, str]
    sha256: NotRequired[str]
    """Digest of the other values; earlier versions did not write it."""


_MANIFEST = TypeAdapter(_Manifest)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return all folders named by a step, complete or not, newest first."""
    entries = folder.iterdir() if folder.is_dir() else ()  # glob would hide that it cannot be read
    return sorted((path for path in entries if path.name.isdigit()), key=lambda path: -int(path.name))


def newest_intact(folder: Path, is_live: bool = False) -> tuple[Saved | None, list[str]]:
    """Return the newest intact checkpoint of a `checkpoints/`, and a sentence for each damaged one that it skips.

    is_live: another process is saving and pruning, so a folder without a manifest is not damaged.
    """
    while True:
        damaged: dict[Path, str] = {}
        for candidate in checkpoint_folders(folder):
            found = inspect(candidate)
            if isinstance(found, Saved):
                return found, [*damaged.values()]
            if not (is_live and found == UNFINISHED):
                damaged[candidate] = f"checkpoint {candidate.name} is damaged ({found}); skipping it"
            elif _whole_since(candidate) - damaged.keys():
                break  # it was pruned, because a newer one was finished meanwhile
        else:
            return None, [*damaged.values()]


def _whole_since(candidate: Path) -> set[Path]:
    """Return the checkpoints, finished by now, from `candidate` on."""
    folders = checkpoint_folders(candidate.parent)
    return {path for path in folders if int(path.name) >= int(candidate.name) and (path / MANIFEST).exists()}


def require_intact(folder: Path) -> tuple[Saved, list[str]]:
    """Return the newest intact checkpoint of a run's folder, and notes; InputError without one."""
    is_live = holder_pid(folder) is not None
    saved, notes = newest_intact(folder / "checkpoints", is_live)
    if saved is None:
        yet = " yet" if is_live and not notes else ""
        raise InputError(f"{folder} has no intact checkpoint{yet}" + "".join(f"; {note}" for note in notes))
    return saved, notes


def read_unpruned(find: Find, read: Callable[[Saved], T]) -> tuple[Saved, T, list[str]]:
    """Find and read a checkpoint, and again if it has been pruned by the process that trains, or damaged, meanwhile.

    Return the checkpoint, its content, and the notes. Where the file system has locks, a checkpoint is not pruned while
    it is being read.
    """
    while True:
        saved, notes = find()
        with ExitStack() as stack:
            with suppress(OSError):  # pruned, or no locks
                file = stack.enter_context((saved.folder / MANIFEST).open("rb"))
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            try:
                found = read(saved)
            except Exception:  # Orbax raises many types
                if saved.is_there and isinstance(inspect(saved.folder), Saved):
                    raise
                continue
            if saved.is_there:
                return saved, found, notes


def inspect(folder: Path) -> Saved | str:
    """Return the checkpoint in a folder, or why it is damaged."""
    found = _inspect(folder)
    is_pruned = isinstance(found, str) and not (folder / MANIFEST).exists()
    return UNFINISHED if is_pruned else found


def _inspect(folder: Path) -> Saved | str:
    try:
        written = (folder / MANIFEST).read_bytes()
        manifest = _MANIFEST.validate_json(written)
        own_digest = manifest.pop("sha256", None)
        if own_digest not in (None, manifest_digest(manifest)):
            return "its manifest does not match its digest"
        for name, digest in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if file_digest(folder / name) != digest:
                return f"{name} does not match its digest"
        if manifest["step"] != int(folder.name):
            return f"its manifest is that of step {manifest['step']}"
        digest = hashlib.sha256(written).hexdigest()
        return Saved(manifest["step"], folder, manifest["about"], manifest["seconds"], digest)
    except ValueError:
        return "its manifest cannot be read"
    except OSError as error:
        return f"it cannot be read: {error}"


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

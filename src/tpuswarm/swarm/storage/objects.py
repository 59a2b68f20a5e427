"""The arrays of a run: fragments of the shared parameters, named by their content, and payloads of pushes."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE, Quantized
from tpuswarm.swarm.core.values import Identity
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.store import Conflict, Corrupt, Store

MEMBER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ARRAY_KEY = "array"
"""Name of an object's single array in its file."""
MAX_STAMPS = 20_000
"""Files to remember; the oldest are dropped."""
SETTLED_S = 1.0
"""A file system's clock ticks in milliseconds, and a second change within a tick does not show in a file's time. So a
file counts only once its time is this old, and our own files get a time that old."""


def object_name(digest: str) -> str:
    return f"objects/{digest}.safetensors"


def object_digest(name: str) -> str:
    return name.removeprefix("objects/").removesuffix(".safetensors")


def payload_name(identity: Identity, fragment: int) -> str:
    key = identity.incarnation
    return f"payloads/{check_member_name(key.member)}/{key.name}/{identity.sequence}-{fragment}.safetensors"


def check_member_name(member: str) -> str:
    """Return the name of a member. Raise InputError if it cannot be part of a file name."""
    if not MEMBER_NAME.fullmatch(member):
        raise InputError(
            f"{member!r} cannot be the name of a member: use 1 to 64 letters, digits, dots, hyphens and underscores, "
            "the first a letter or digit"
        )
    return member


def payload_fits(payload: Mapping[str, np.ndarray], size: int) -> bool:
    """Whether a payload has the form of a fragment of `size` elements."""
    if payload.keys() == {"s"}:
        return payload["s"].shape == (size,)
    if payload.keys() != {"codes", "scales"}:
        return False
    codes, blocks = payload["codes"], -(-size // BLOCK_SIZE)
    widths = [BLOCK_SIZE * bits // 8 for bits in (2, 4, 8)]
    return codes.shape in [(blocks, width) for width in widths] and payload["scales"].shape == (blocks,)


def to_quantized(payload: Mapping[str, np.ndarray]) -> Quantized:
    return Quantized(payload["codes"], payload["scales"], payload["codes"].shape[1] * 8 // BLOCK_SIZE)


def array_digest(array: np.ndarray) -> str:
    """Return the digest that `Objects.put_array` gives a float32 array; SHA-256 in hexadecimal."""
    if array.dtype != np.float32:
        raise ValueError(f"a swarm shares float32 arrays, not {array.dtype}")
    return tensors.digest({ARRAY_KEY: array})


def update_digest(update: Quantized) -> str:
    """Return the digest of stored codes; SHA-256 in hexadecimal."""
    return tensors.digest({"codes": update.codes, "scales": update.scales})


class Objects:
    """The arrays in a run's storage. Everything read is checked against its digest first; nothing is unpickled.

    A file that this process has checked or written, and that was not touched since, is not hashed again.
    """

    def __init__(self, store: Store):
        self._store, self._stamps = store, Stamps()

    def put_array(self, array: np.ndarray) -> str:
        """Store a float32 array; return its digest, SHA-256 in hexadecimal. Repeating it changes nothing."""
        digest = array_digest(array)
        name = object_name(digest)
        self._store.put(name, tensors.parts({ARRAY_KEY: array}))
        self._stamp_written(name, digest)
        return digest

    def get_array(self, digest: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return a read-only float32 array, memory-mapped if the store is a local folder.

        Raise Missing, or Corrupt if the bytes do not match the digest or are not a float32 array of `shape`, if given.
        """
        name = object_name(digest)
        found = self._load(name, digest)
        array = found.get(ARRAY_KEY)
        if len(found) != 1 or array is None or array.dtype != np.float32 or shape not in (None, array.shape):
            wanted = "one float32 array" if shape is None else f"float32{list(shape)}"
            raise self._corrupt(name, f"it holds {_describe(found)}, not {wanted}")
        return array

    def get_finite(self, digest: str) -> np.ndarray:
        """Return an array as `get_array`; raise Corrupt for NaN or infinity too."""
        array = self.get_array(digest)
        if not np.isfinite(array).all():
            raise self._corrupt(object_name(digest), "it has NaN or infinity")
        return array

    def check(self, digest: str) -> None:
        """Read and hash an object. Raise Missing or Corrupt."""
        self._load(object_name(digest), digest, rehash=True)

    @contextmanager
    def writing_array(self, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, Callable[[], str]]]:
        """Yield a float32 memory map to fill, and a function that stores it and returns its digest.

        Do not write to the map afterwards. Without that call nothing is stored.
        """
        with self._writing({ARRAY_KEY: ("F32", shape)}) as (arrays, finish):
            yield arrays[ARRAY_KEY], finish

    @contextmanager
    def writing_update(self, size: int, bits: int) -> Iterator[tuple[Quantized, Callable[[], str]]]:
        """Do the same as `writing_array` for quantized codes of `size` elements."""
        blocks = -(-size // BLOCK_SIZE)
        specs: tensors.Specs = {"codes": ("U8", (blocks, BLOCK_SIZE * bits // 8)), "scales": ("F32", (blocks,))}
        with self._writing(specs) as (arrays, finish):
            yield Quantized(arrays["codes"], arrays["scales"], bits), finish

    def get_update(self, digest: str, size: int) -> Quantized:
        """Return quantized codes of `size` elements; as `get_array`."""
        name = object_name(digest)
        found = self._load(name, digest)
        if "codes" not in found or not payload_fits(found, size):
            raise self._corrupt(name, f"it holds {_describe(found)}, no codes of {size} elements")
        return to_quantized(found)

    @contextmanager
    def _writing(self, specs: tensors.Specs) -> Iterator[tuple[dict[str, np.ndarray], Callable[[], str]]]:
        head = tensors.header(specs)
        size = len(head) + tensors.length(specs)
        with self._store.temporary("objects/array") as part:
            with self._store.translate_errors("a new object", "written"), part.open("r+b") as file:
                file.write(head)
                file.flush()
                if hasattr(os, "posix_fallocate"):  # or a full disk would end the process by a bus error
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
                whole = np.memmap(file, np.uint8, "r+")
            arrays = tensors.map_arrays(specs, whole, len(head))

            def finish() -> str:
                with self._store.translate_errors("a new object", "written"):
                    whole.flush()
                    for array in arrays.values():
                        array.flags.writeable = False
                    with part.open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._store.put_file(object_name(digest), part)
                self._stamp_written(object_name(digest), digest)
                return digest

            yield arrays, finish

    def put_payload(
        self, identity: Identity, fragment: int, payload: Mapping[str, np.ndarray], known: str | None = None
    ) -> str:
        """Store a fragment of a contribution, {"s": float32} or {"codes": uint8, "scales": float32}; return its digest.

        known: that digest, if the caller has it. Repeating it changes nothing. Raise Conflict if other bytes are stored
        for this identity, InputError for a member's name that cannot be part of a file name.
        """
        name = payload_name(identity, fragment)
        digest = known or tensors.digest(payload)
        if self._store.create(name, tensors.parts(payload)):
            self._stamp_written(name, digest)
        elif self._digest(name) != digest:
            raise Conflict(
                f"{name} is already stored with other bytes: a push is resent unchanged; start a new incarnation"
            )
        return digest

    def get_payload(self, identity: Identity, fragment: int, digest: str) -> dict[str, np.ndarray]:
        """Return read-only arrays by name, memory-mapped if the store is a local folder. Raise Missing or Corrupt."""
        name = payload_name(identity, fragment)
        found = self._load(name, digest)
        if {key: array.dtype.name for key, array in found.items()} not in (
            {"s": "float32"},
            {"codes": "uint8", "scales": "float32"},
        ):
            raise self._corrupt(name, f"it holds {_describe(found)}, which is no payload")
        return found

    def drop_copies(self, digests: Iterable[str], payloads: Iterable[tuple[Identity, int]]) -> None:
        """Remove this disk's copies of objects and payloads in a bucket."""
        names = [*map(object_name, digests), *(payload_name(*payload) for payload in payloads)]
        for name in names:
            self._store.drop_copy(name)

    def _stamp_written(self, name: str, digest: str) -> None:
        with self._store.translate_errors(name, "written"):
            self._stamps.add_written(name, self._store.local_path(name), digest)

    def _load(self, name: str, digest: str, rehash: bool = False) -> dict[str, np.ndarray]:
        path = self._store.path(name)
        data: bytes | mmap
        if path is None:
            data = self._store.read(name)
            found = hashlib.sha256(data).hexdigest()
        else:
            with self._store.translate_errors(name, "read"), path.open("rb") as file:
                if not rehash and self._stamps.matches(name, path, digest):
                    found = digest
                else:
                    before = os.fstat(file.fileno())
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    self._stamps.add_read(name, before, path, found)
                if found == digest:
                    data = mmap(file.fileno(), 0, access=ACCESS_READ)
        if found != digest:
            raise self._corrupt(name, f"its bytes have the digest {found[:12]}…, not {digest[:12]}…")
        try:
            return tensors.decode(data)
        except ValueError as error:
            raise self._corrupt(name, str(error)) from error

    def _digest(self, name: str) -> str:
        path = self._store.path(name)
        if path is None:
            return hashlib.sha256(self._store.read(name)).hexdigest()
        with self._store.translate_errors(name, "read"), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _corrupt(self, name: str, why: str) -> Corrupt:
        return Corrupt(name, self._store.root, why)


def _describe(found: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype.name}{list(array.shape)}" for name, array in found.items()) or "nothing"


class _Stamp(NamedTuple):
    inode: int
    size: int
    written_ns: int


class Stamps:
    """Digests of files that this process has hashed or written; for several threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Stamp, str]] = {}
        self._lock = threading.Lock()

    def matches(self, name: str, path: Path, digest: str) -> bool:
        """Whether the file is known to have this digest. Raise OSError if it cannot be read."""
        return self._known.get(name) == (_stamp(path), digest)

    def add_written(self, name: str, path: Path | None, digest: str) -> None:
        """Remember a file that this process has just written; None if it is not on this disk."""
        if path is not None:
            now = time.time_ns()
            os.utime(path, ns=(now, now - int(SETTLED_S * 1e9)))
            self._add(name, _stamp(path), digest)

    def add_read(self, name: str, before: os.stat_result, path: Path, digest: str) -> None:
        """Remember a file that was hashed; before: its state when it was opened."""
        stamp = _stamp(path)
        if stamp == _from_stat(before) and time.time_ns() - stamp.written_ns > SETTLED_S * 1e9:
            self._add(name, stamp, digest)

    def _add(self, name: str, stamp: _Stamp, digest: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            if len(self._known) >= MAX_STAMPS:
                del self._known[next(iter(self._known))]
            self._known[name] = stamp, digest


def _stamp(path: Path) -> _Stamp:
    return _from_stat(path.stat())


def _from_stat(found: os.stat_result) -> _Stamp:
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)

"""The arrays of a run: fragments of the shared state, named by their content, and payloads of pushes."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK, Quantized
from tpuswarm.swarm.core.values import Identity
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.stamps import Stamps
from tpuswarm.swarm.storage.store import Conflict, Corrupt, Store

MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ONLY = "array"
"""The name that an object's one array has in its file."""


def object_name(digest: str) -> str:
    """Of a content-addressed array."""
    return f"objects/{digest}.safetensors"


def payload_name(identity: Identity, fragment: int) -> str:
    """Of one fragment of a contribution."""
    key = identity.incarnation
    return f"payloads/{checked_member(key.member)}/{key.name}/{identity.sequence}-{fragment}.safetensors"


def checked_member(member: str) -> str:
    """The name of a member if it can be part of a file's name; InputError if not."""
    if not MEMBER.fullmatch(member):
        raise InputError(
            f"{member!r} cannot be the name of a member: use 1 to 64 letters, digits, dots, hyphens and underscores, "
            "the first a letter or digit"
        )
    return member


def fits(payload: Mapping[str, np.ndarray], size: int) -> bool:
    """Whether a payload is one of a fragment of `size` elements."""
    if payload.keys() == {"s"}:
        return payload["s"].shape == (size,)
    if payload.keys() != {"codes", "scales"}:
        return False
    codes, blocks = payload["codes"], -(-size // BLOCK)
    widths = [BLOCK * bits // 8 for bits in (2, 4, 8)]
    return codes.shape in [(blocks, width) for width in widths] and payload["scales"].shape == (blocks,)


def quantized(payload: Mapping[str, np.ndarray]) -> Quantized:
    """A payload of codes."""
    return Quantized(payload["codes"], payload["scales"], payload["codes"].shape[1] * 8 // BLOCK)


def array_digest(array: np.ndarray) -> str:
    """The digest that `Objects.put_array` gives a float32 array; SHA-256 in hexadecimal."""
    if array.dtype != np.float32:
        raise ValueError(f"a swarm shares float32 arrays, not {array.dtype}")
    return tensors.digest({ONLY: array})


def update_digest(update: Quantized) -> str:
    """The digest of stored codes; SHA-256 in hexadecimal."""
    return tensors.digest({"codes": update.codes, "scales": update.scales})


class Objects:
    """The arrays in a run's storage. What is read is checked against its digest first; nothing is unpickled.

    A file that this process has read so, or written, and that was not touched since is not hashed again.
    """

    def __init__(self, store: Store):
        self._store, self._stamps = store, Stamps()

    def put_array(self, array: np.ndarray) -> str:
        """Store a float32 array; its digest, SHA-256 in hexadecimal. The same array again changes nothing."""
        digest = array_digest(array)
        name = object_name(digest)
        self._store.put(name, tensors.parts({ONLY: array}))
        self._wrote(name, digest)
        return digest

    def get_array(self, digest: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A read-only float32 array, memory-mapped where the store is a local folder.

        Raises Missing, or Corrupt where the bytes are not those of the digest or no float32 array of `shape` (None:
        of any shape).
        """
        name = object_name(digest)
        found = self._load(name, digest)
        array = found.get(ONLY)
        if len(found) != 1 or array is None or array.dtype != np.float32 or shape not in (None, array.shape):
            wanted = "one float32 array" if shape is None else f"float32{list(shape)}"
            raise self._corrupt(name, f"it holds {_described(found)}, not {wanted}")
        return array

    def check(self, digest: str) -> None:
        """Read an object, whatever it is, and hash it, whatever is known of it; raises Missing and Corrupt."""
        self._load(object_name(digest), digest, again=True)

    @contextmanager
    def writing_array(self, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, Callable[[], str]]]:
        """A float32 memory map to fill, and a function that stores it and gives its digest.

        Nothing may be written to the map after that; without that call nothing is stored.
        """
        with self._writing({ONLY: ("F32", shape)}) as (arrays, finish):
            yield arrays[ONLY], finish

    @contextmanager
    def writing_update(self, size: int, bits: int) -> Iterator[tuple[Quantized, Callable[[], str]]]:
        """As `writing_array`, for quantized codes of `size` elements."""
        blocks = -(-size // BLOCK)
        specs: tensors.Specs = {"codes": ("U8", (blocks, BLOCK * bits // 8)), "scales": ("F32", (blocks,))}
        with self._writing(specs) as (arrays, finish):
            yield Quantized(arrays["codes"], arrays["scales"], bits), finish

    def get_update(self, digest: str, size: int) -> Quantized:
        """Quantized codes of `size` elements, as `get_array` gives arrays."""
        name = object_name(digest)
        found = self._load(name, digest)
        if "codes" not in found or not fits(found, size):
            raise self._corrupt(name, f"it holds {_described(found)}, no codes of {size} elements")
        return quantized(found)

    @contextmanager
    def _writing(self, specs: tensors.Specs) -> Iterator[tuple[dict[str, np.ndarray], Callable[[], str]]]:
        head = tensors.header(specs)
        size = len(head) + tensors.length(specs)
        with self._store.temporary("objects/array") as part:
            with self._store.writing("a new object"), part.open("r+b") as file:
                file.write(head)
                file.flush()
                if hasattr(os, "posix_fallocate"):  # else a disk that fills up later ends the process by a bus error
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
                whole = np.memmap(file, np.uint8, "r+")
            arrays = tensors.over(specs, whole, len(head))

            def finish() -> str:
                with self._store.writing("a new object"):
                    whole.flush()
                    for array in arrays.values():
                        array.flags.writeable = False
                    with part.open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._store.put_file(object_name(digest), part)
                self._wrote(object_name(digest), digest)
                return digest

            yield arrays, finish

    def put_payload(
        self, identity: Identity, fragment: int, payload: Mapping[str, np.ndarray], known: str | None = None
    ) -> str:
        """Store one fragment of a contribution, {"s": float32} or {"codes": uint8, "scales": float32}.

        Its digest, that of `tensors.digest`, which the caller may know. The same again changes nothing. Raises Conflict
        where other bytes are stored for this identity, InputError for a member's name that cannot be part of a file's.
        """
        name = payload_name(identity, fragment)
        digest = known or tensors.digest(payload)
        if self._store.create(name, tensors.parts(payload)):
            self._wrote(name, digest)
        elif self._digest(name) != digest:
            raise Conflict(
                f"{name} is already stored with other bytes: a push is resent unchanged; start a new incarnation"
            )
        return digest

    def get_payload(self, identity: Identity, fragment: int, digest: str) -> dict[str, np.ndarray]:
        """Read-only arrays by name, memory-mapped where the store is a local folder; raises Missing and Corrupt."""
        name = payload_name(identity, fragment)
        found = self._load(name, digest)
        if {key: array.dtype.name for key, array in found.items()} not in (
            {"s": "float32"},
            {"codes": "uint8", "scales": "float32"},
        ):
            raise self._corrupt(name, f"it holds {_described(found)}, which is no payload")
        return found

    def _wrote(self, name: str, digest: str) -> None:
        with self._store.writing(name):
            self._stamps.wrote(name, self._store.here(name), digest)

    def _load(self, name: str, digest: str, again: bool = False) -> dict[str, np.ndarray]:
        path = self._store.path(name)
        data: bytes | mmap
        if path is None:
            data = self._store.read(name)
            found = hashlib.sha256(data).hexdigest()
        else:
            with self._store.reading(name), path.open("rb") as file:
                if not again and self._stamps.holds(name, path, digest):
                    found = digest
                else:
                    before = os.fstat(file.fileno())
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    self._stamps.read(name, before, path, found)
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
        with self._store.reading(name), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _corrupt(self, name: str, why: str) -> Corrupt:
        return Corrupt(name, self._store.root, why)


def _described(found: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype.name}{list(array.shape)}" for name, array in found.items()) or "nothing"

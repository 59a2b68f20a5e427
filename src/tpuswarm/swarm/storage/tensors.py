"""The safetensors format for a swarm's float32 and uint8 arrays; nothing is unpickled.

https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header in JSON, the arrays. Equal
arrays have equal bytes, those of the safetensors library, so that a digest of the bytes identifies the arrays.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from mmap import mmap
from typing import Any

import numpy as np

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (a key of DTYPES) and shape of each array by name."""

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
MAX_HEADER_BYTES = 2**16


def specs(tensors: Mapping[str, np.ndarray]) -> Specs:
    """Return dtypes and shapes. Raise ValueError for a dtype that a swarm does not send."""
    known = {dtype: name for name, dtype in DTYPES.items()}
    for name, array in tensors.items():
        if array.dtype not in known:
            raise ValueError(f"{name} is {array.dtype}, but a swarm sends only float32 and uint8")
    return {name: (known[array.dtype], array.shape) for name, array in tensors.items()}


def header(of: Specs) -> bytes:
    """Return the bytes before the arrays, which follow in the order that it names."""
    about = {
        name: {"dtype": of[name][0], "shape": list(of[name][1]), "data_offsets": [start, stop]}
        for name, (start, stop) in _offsets(of).items()
    }
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def length(of: Specs) -> int:
    """Return the size of all arrays in bytes."""
    return max((stop for _, stop in _offsets(of).values()), default=0)


def map_arrays(of: Specs, data: Any, offset: int) -> dict[str, np.ndarray]:
    """Return arrays over a buffer, in which they start at `offset`."""
    return {
        name: np.ndarray(of[name][1], DTYPES[of[name][0]], data, offset=offset + start)
        for name, (start, _) in _offsets(of).items()
    }


def parts(tensors: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """Return the bytes of `encode` in parts, without copying the arrays."""
    of = specs(tensors)
    return [header(of), *(tensors[name].reshape(-1).view(np.uint8).data for name in _ordered(of))]


def encode(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays as bytes. Raise ValueError for a dtype that a swarm does not send."""
    return b"".join(parts(tensors))


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256, in hexadecimal, of the bytes of `encode`, without copying the arrays."""
    found = hashlib.sha256()
    for part in parts(tensors):
        found.update(part)
    return found.hexdigest()


def decode(data: bytes | mmap) -> dict[str, np.ndarray]:
    """Return read-only arrays over these bytes. Raise ValueError for bytes that `encode` did not make."""
    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data)):
        raise ValueError("it is too short for its header, or its header is too long")
    try:
        about = json.loads(data[8 : 8 + size])
        of: Specs = {name: (spec["dtype"], tuple(spec["shape"])) for name, spec in about.items()}
        numbers = [number for _, shape in of.values() for number in shape]
        ours = all(type(number) is int and number >= 0 for number in numbers) and header(of) == data[: 8 + size]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ours = False
    if not ours:
        raise ValueError("its header is not one of ours")
    end = 8 + size + length(of)
    if len(data) != end:
        raise ValueError(f"it has {len(data)} bytes, its header says {end}")
    return map_arrays(of, data, 8 + size)


def _ordered(of: Specs) -> list[str]:
    return sorted(of, key=lambda name: (-DTYPES[of[name][0]].itemsize, name))


def _offsets(of: Specs) -> dict[str, tuple[int, int]]:
    """Return start and stop of each array after the header, in the order of the file."""
    offsets, start = {}, 0
    for name in _ordered(of):
        dtype, shape = of[name]
        stop = start + math.prod(shape) * DTYPES[dtype].itemsize
        offsets[name] = (start, stop)
        start = stop
    return offsets

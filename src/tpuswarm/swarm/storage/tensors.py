"""The safetensors format, as far as a swarm uses it: float32 and uint8 arrays as bytes, never unpickled.

https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header in JSON, the arrays. One
content has one form, the one that the safetensors library gives it, so that a digest of the bytes is one of the arrays.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from mmap import mmap
from typing import Any

import numpy as np

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each array, by name, its dtype (a key of DTYPES) and shape."""

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
LONGEST = 2**16
"""Bytes of a header, at most."""


def specs(tensors: Mapping[str, np.ndarray]) -> Specs:
    """Dtypes and shapes; ValueError for a dtype that is not exchanged."""
    known = {dtype: name for name, dtype in DTYPES.items()}
    for name, array in tensors.items():
        if array.dtype not in known:
            raise ValueError(f"{name} is {array.dtype}, but a swarm sends only float32 and uint8")
    return {name: (known[array.dtype], array.shape) for name, array in tensors.items()}


def header(of: Specs) -> bytes:
    """What stands before the arrays, which follow in the order that it names."""
    about = {
        name: {"dtype": of[name][0], "shape": list(of[name][1]), "data_offsets": [start, stop]}
        for name, (start, stop) in _places(of).items()
    }
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def length(of: Specs) -> int:
    """Bytes of all arrays."""
    return max((stop for _, stop in _places(of).values()), default=0)


def over(of: Specs, data: Any, offset: int) -> dict[str, np.ndarray]:
    """Arrays over a buffer, in which they begin at `offset`."""
    return {
        name: np.ndarray(of[name][1], DTYPES[of[name][0]], data, offset=offset + start)
        for name, (start, _) in _places(of).items()
    }


def parts(tensors: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """The bytes of `encode`, one part after the other, without copying the arrays."""
    of = specs(tensors)
    return [header(of), *(tensors[name].reshape(-1).view(np.uint8).data for name in _ordered(of))]


def encode(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as bytes; ValueError for a dtype that is not exchanged."""
    return b"".join(parts(tensors))


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256, in hexadecimal, of the bytes of `encode`, without making them."""
    found = hashlib.sha256()
    for part in parts(tensors):
        found.update(part)
    return found.hexdigest()


def decode(data: bytes | mmap) -> dict[str, np.ndarray]:
    """Read-only arrays over these bytes, not copied; ValueError, in words, for what `encode` did not make."""
    size = int.from_bytes(data[:8], "little")
    if size > min(LONGEST, len(data)):
        raise ValueError("it is too short for its header, or its header is too long")
    try:
        about = json.loads(data[8 : 8 + size])
        of: Specs = {name: (each["dtype"], tuple(each["shape"])) for name, each in about.items()}
        numbers = [number for _, shape in of.values() for number in shape]
        ours = all(type(number) is int and number >= 0 for number in numbers) and header(of) == data[: 8 + size]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ours = False
    if not ours:
        raise ValueError("its header is not one of ours")
    end = 8 + size + length(of)
    if len(data) != end:
        raise ValueError(f"it has {len(data)} bytes, its header says {end}")
    return over(of, data, 8 + size)


def _ordered(of: Specs) -> list[str]:
    """Wider elements first, so that all are aligned."""
    return sorted(of, key=lambda name: (-DTYPES[of[name][0]].itemsize, name))


def _places(of: Specs) -> dict[str, tuple[int, int]]:
    """Of each array, in the order of the file, where it begins and ends; from the first byte after the header."""
    places, start = {}, 0
    for name in _ordered(of):
        dtype, shape = of[name]
        stop = start + math.prod(shape) * DTYPES[dtype].itemsize
        places[name] = (start, stop)
        start = stop
    return places

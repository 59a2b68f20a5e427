"""Encode the messages of a swarm as safetensors: arrays as tensors, everything else as JSON in one more tensor.

Decoding creates arrays, plain values and instances of MESSAGES, and nothing else; no code of the sender runs. Types of
fields are not checked here: `processes/requests.py` checks the arguments of each request.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from tpuswarm.swarm.anywhere.gateway import Admitted, Reported
from tpuswarm.swarm.core.arithmetic.fragments import Layout, Piece
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule
from tpuswarm.swarm.core.arithmetic.quantize import Quantized
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.messages import (
    Accepted,
    Granted,
    Heartbeat,
    PayloadDamaged,
    Refused,
    Terms,
    VersionExpired,
)
from tpuswarm.swarm.core.rounds import RoundTimeouts
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import AveragedSlice, Decision, Digests, Header, Identity, Incarnation
from tpuswarm.swarm.processes.coordinator import Begin, Joining, Wait
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.swarm.storage.downlink import Chain
from tpuswarm.swarm.storage.founding import Founding

VERSION = 1
"""Of this encoding and of the messages; member and head must have the same one."""
HEADER = "tpuswarm-wire"
"""HTTP header of every request and answer, with the version: it tells a swarm from any other web server."""
CONTENT, SIZE = "tpuswarm-content", "tpuswarm-size"
"""HTTP headers with the SHA-256 and the size of a message that travels in parts."""
MEDIA_TYPE = "application/x-tpuswarm"
MESSAGES: tuple[type, ...] = (
    Accepted, Admitted, AveragedSlice, Begin, Call, Chain, Decision, Digests, Founding, Granted, Header, Heartbeat,
    Identity, Incarnation, Joining, Layout, MovingAverage, OuterRule, PayloadDamaged, Piece, Quantized, Refused,
    Reported, RoundTimeouts, Rows, Staleness, Terms, Unreachable, VersionExpired, Wait,
)  # fmt: skip
MAX_TEXT_BYTES = 2**22
"""Size of a message besides its arrays: Python's objects for it need many times as much."""
_BY_NAME = {message.__name__: message for message in MESSAGES}
_KIND = "$"
"""Key of a JSON object that tells what it stands for."""
_MESSAGE = "message"
"""Name of the tensor with the JSON; the others are numbered."""


class Malformed(Exception):
    """These bytes are no message."""


def encode(value: Any) -> bytes:
    """Encode a message. Raise TypeError for a value that messages do not have."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_pack(value, arrays), separators=(",", ":")).encode()
    return save(arrays | {_MESSAGE: np.frombuffer(text, np.uint8)})


def decode(content: bytes) -> Any:
    """Decode a message; sequences become tuples. Raise Malformed."""
    try:
        arrays = load(content)
        text = arrays.pop(_MESSAGE)
        if text.nbytes > MAX_TEXT_BYTES:
            raise ValueError(f"its text has {text.nbytes} bytes")
        return _unpack(json.loads(text.tobytes()), arrays)
    except Exception as error:  # a stranger wrote them, and a message's constructor may raise anything
        raise Malformed(f"{type(error).__name__}: {error}") from error


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return _pack_array("array", value, arrays)
    if isinstance(value, bytes):
        return _pack_array("bytes", np.frombuffer(value, np.uint8), arrays)
    if isinstance(value, Mapping):
        return {_KIND: "dict", "items": [[_pack(part, arrays) for part in item] for item in value.items()]}
    if type(value) in MESSAGES:
        return {_KIND: type(value).__name__} | {name: _pack(getattr(value, name), arrays) for name in _names(value)}
    if isinstance(value, list | tuple):
        return [_pack(part, arrays) for part in value]
    raise TypeError(f"a message has no {type(value).__name__}")


def _pack_array(kind: str, array: np.ndarray, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    name = str(len(arrays))
    arrays[name] = np.ascontiguousarray(array)
    return {_KIND: kind, "name": name}


def _names(value: Any) -> list[str]:
    if is_dataclass(value):
        return [field.name for field in fields(value) if field.init]
    return list(getattr(value, "_fields", ()))


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(part, arrays) for part in value)
    if not isinstance(value, dict):
        return value
    kind = value.pop(_KIND)
    if kind == "array":
        return arrays[value["name"]]
    if kind == "bytes":
        return arrays[value["name"]].tobytes()
    if kind == "dict":
        return {_unpack(key, arrays): _unpack(part, arrays) for key, part in value["items"]}
    return _BY_NAME[kind](**{name: _unpack(part, arrays) for name, part in value.items()})

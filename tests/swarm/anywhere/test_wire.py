"""Messages keep their values over HTTPS, and bytes of a stranger become nothing but messages."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from tpuswarm.swarm.anywhere import wire
from tpuswarm.swarm.anywhere.gateway import Admitted, Reported
from tpuswarm.swarm.core.arithmetic.fragments import Piece
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule
from tpuswarm.swarm.core.arithmetic.quantize import Quantized
from tpuswarm.swarm.core.messages import Granted, Heartbeat, Refused, Terms
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import AveragedSlice, Decision, Digests, Header, Identity, Incarnation
from tpuswarm.swarm.processes.coordinator import Joining
from tpuswarm.swarm.processes.effects import Call
from tpuswarm.swarm.storage.downlink import Chain
from tpuswarm.swarm.storage.founding import Founding

WHO = Incarnation("ada-colab", "a" * 32)
ROWS = Rows(((0, 4), (8, 12)))
DIGESTS = Digests("layout", "config", "data", "code")
RULE = OuterRule("nesterov", average=MovingAverage(float("inf"), 0.5), averaged=(AveragedSlice(0, 1, 2),))
FOUNDING = Founding(((Piece("b", (2,)),), (Piece("w", (3, 4), (0, 12)),)), {"shard": "replicate", "list": (1, 2)})
MESSAGES = [
    Header(Identity(WHO, 3), "run", 7, ROWS, 96, 2, "int8", 0.25, True, ("d" * 64,)),
    Heartbeat(WHO, DIGESTS, True, 7, ROWS, NO_ROWS, Identity(WHO, 3), 12.5, 960),
    Granted(ROWS, 8, 7, 960, ("d",), Decision(Identity(WHO, 3), "applied", "", ROWS, 7, 96, 0.5), False, 2.0, False),
    Joining(Terms("run", DIGESTS, 4, 16, 64, 8, ("m0",), RULE), FOUNDING, 7, 960, ("d" * 64,)),
    Admitted("ada-colab", "{}", ("aggregator-0",), "aggregator-0", 12, False),
    Reported(5, True),
    Refused("no"),
    None,
    "text",
    b"bytes\0",
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message):
    call = Call("coordinator", "method", (message, {"key": 1.5, "rows": (1, None, True)}))
    assert wire.decode(wire.encode(call)) == call


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3)])
def test_array_arrives_bit_by_bit(dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    (found,) = wire.decode(wire.encode((array,)))
    assert found.dtype == array.dtype and found.shape == shape and found.tobytes() == array.tobytes()


def test_updates_apply_after_their_journey():
    updates = tuple(Quantized(np.full((1, 64), code, np.uint8), np.ones(1, np.float32), 64) for code in (120, 130))
    sent = wire.decode(wire.encode(Chain(updates, "d" * 64)))
    assert isinstance(sent, Chain) and sent.digest == "d" * 64
    for before, after in zip(updates, sent.updates, strict=True):
        for name in (field.name for field in fields(before)) if is_dataclass(before) else before._fields:
            assert np.array_equal(getattr(before, name), getattr(after, name))


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_fail(content):
    with pytest.raises(wire.Malformed):
        wire.decode(content)


@pytest.mark.parametrize(
    "text",
    [
        '{"$": "os.system", "command": "true"}',
        '{"$": "RunPlan", "target": "os:system"}',
        '{"$": "Rows", "ranges": [[4, 2]]}',
        '{"$": "Header"}',
        '{"$": "Refused", "reason": "a", "more": 1}',
        '{"$": "array", "name": "7"}',
        '{"no": "kind"}',
        "[" * 100_000,
        "[" + "0," * 2**21 + "0]",
        "not JSON",
    ],
)
def test_what_is_no_message_is_malformed(text):
    with pytest.raises(wire.Malformed):
        wire.decode(save({"message": np.frombuffer(text.encode(), np.uint8)}))

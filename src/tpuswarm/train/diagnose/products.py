"""Matrix products that run slower than they could: in float32 where bf16 was asked, or on a half empty matrix unit."""

from collections.abc import Sequence
from typing import Any

from tpuswarm.catalog import generation_of
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.float32 import float32_products
from tpuswarm.train.program.flops import Flops
from tpuswarm.train.program.underfilled import underfilled

MOST = 3
"""Places of each kind that are named; they come in the order of what they cost."""


def float32_in_bf16(compiled: Compiled) -> list[Finding]:
    """The places that compute most in float32; none where that was asked."""
    return _findings("precision", float32_products(compiled))


def half_empty(flops: Flops, device_kind: str, batch: int, devices: int) -> list[Finding]:
    """The places that cost most on `device_kind`; none on what is no TPU. batch: rows of a micro-batch, all devices."""
    generation = generation_of(device_kind)
    return _findings("matrix-unit", underfilled(flops, generation.matrix_unit, batch, devices) if generation else [])


def _findings(kind: str, found: Sequence[Any]) -> list[Finding]:
    return [
        Finding(kind, f"{each.place or 'the step'}: {each}", vars(each) | {"place": str(each.place)})
        for each in found[:MOST]
    ]

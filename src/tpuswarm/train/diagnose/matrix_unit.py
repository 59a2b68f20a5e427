"""A batch or a width that leaves a TPU's matrix unit half empty, said when training begins on one."""

from tpuswarm.catalog import generation_of
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.program.flops import Flops
from tpuswarm.train.program.underfilled import underfilled

MOST = 3
"""Places that are named; they come in the order of what they cost."""


def half_empty(flops: Flops, device_kind: str, batch: int, devices: int) -> list[Finding]:
    """The places that cost most on `device_kind`; none on what is no TPU. batch: rows of a micro-batch, all devices."""
    generation = generation_of(device_kind)
    if generation is None:
        return []
    return [
        Finding(
            "matrix-unit",
            f"{each.place or 'the step'}: {each}",
            {"place": str(each.place), "size": each.size, "unit": each.unit, "fill": each.fill, "waste": each.waste},
        )
        for each in underfilled(flops, generation.matrix_unit, batch, devices)[:MOST]
    ]

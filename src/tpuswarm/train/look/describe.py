"""Describe a compiled run: its parameters, and the memory of one device."""

import math
from dataclasses import dataclass

import jax

from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.mesh import bytes_per_device


@dataclass(frozen=True)
class ParameterRow:
    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    frozen: bool
    decayed: bool
    tied: str
    statistic: bool
    bytes_per_device: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def parameter_rows(compiled: Compiled) -> list[ParameterRow]:
    leaves = jax.tree.leaves(compiled.program.exchange().get(compiled.state))
    return [
        ParameterRow(
            path=parameter.path,
            shape=leaf.shape,
            dtype=leaf.dtype.name,
            sharding=_describe_sharding(leaf),
            frozen=parameter.frozen,
            decayed=parameter.decayed,
            tied=parameter.tied,
            statistic=parameter.statistic,
            bytes_per_device=bytes_per_device(leaf),
        )
        for parameter, leaf in zip(compiled.program.parameters(compiled.state), leaves, strict=True)
    ]


def _describe_sharding(leaf: jax.ShapeDtypeStruct) -> str:
    shard_counts = [
        size // shard for size, shard in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True)
    ]
    split = [f"axis {axis} / {count}" for axis, count in enumerate(shard_counts) if count > 1]
    return ", ".join(split) or "replicated"


def memory_sentence(compiled: Compiled) -> str:
    """State the memory of one device, with the compiler's temporaries."""
    state = bytes_per_device(compiled.state)
    rows = parameter_rows(compiled)
    parameters = sum(row.bytes_per_device for row in rows if not row.statistic)
    statistic_count = sum(row.count for row in rows if row.statistic)
    count = sum(row.count for row in rows if not row.statistic)
    statistics = f" and {statistic_count:,} running statistics" if statistic_count else ""
    parts = ["optimizer", *["average"] * (compiled.options.ema is not None), *["statistics"] * (statistic_count > 0)]
    rest = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    decayed = sum(row.count for row in rows if row.decayed)
    decay = f", {decayed:,} of them in the decay mask" if decayed else ""
    mib = 2**20
    return (
        f"{count:,} parameters{decay}{statistics}; memory per device: {parameters / mib:.1f} MiB parameters "
        f"+ {(state - parameters) / mib:.1f} MiB {rest} "
        f"+ {compiled.memory.temporaries / mib:.1f} MiB temporaries"
    )

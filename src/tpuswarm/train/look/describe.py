"""What a run is made of, in one table: every parameter group and the memory of one device."""

import math
from dataclasses import dataclass

import jax

from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.mesh import bytes_per_device


@dataclass(frozen=True)
class ParameterRow:
    """One parameter leaf as the table shows it."""

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
        """Numbers in it."""
        return math.prod(self.shape)


def parameter_rows(compiled: Compiled) -> list[ParameterRow]:
    """One row for each leaf that the program names."""
    leaves = jax.tree.leaves(compiled.program.exchange().get(compiled.state))
    return [
        ParameterRow(
            path=parameter.path,
            shape=leaf.shape,
            dtype=leaf.dtype.name,
            sharding=_axes(leaf),
            frozen=parameter.frozen,
            decayed=parameter.decayed,
            tied=parameter.tied,
            statistic=parameter.statistic,
            bytes_per_device=bytes_per_device(leaf),
        )
        for parameter, leaf in zip(compiled.program.parameters(compiled.state), leaves, strict=True)
    ]


def _axes(leaf: jax.ShapeDtypeStruct) -> str:
    parts = [whole // part for whole, part in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True)]
    split = [f"axis {axis} / {count}" for axis, count in enumerate(parts) if count > 1]
    return ", ".join(split) or "replicated"


def memory_sentence(compiled: Compiled) -> str:
    """Memory of one device in words, the compiler's figures beside the state's."""
    state = bytes_per_device(compiled.state)
    rows = parameter_rows(compiled)
    parameters = sum(row.bytes_per_device for row in rows if not row.statistic)
    observed = sum(row.count for row in rows if row.statistic)
    count = sum(row.count for row in rows if not row.statistic)
    statistics = f" and {observed:,} running statistics" if observed else ""
    rest = "optimizer, average and statistics" if observed else "optimizer and average"
    decayed = sum(row.count for row in rows if row.decayed)
    decay = f", {decayed:,} of them in the decay mask" if decayed else ""
    mib = 2**20
    return (
        f"{count:,} parameters{decay}{statistics}; memory per device: {parameters / mib:.1f} MiB parameters "
        f"+ {(state - parameters) / mib:.1f} MiB {rest} "
        f"+ {compiled.memory.temporaries / mib:.1f} MiB temporaries"
    )

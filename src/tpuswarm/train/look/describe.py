"""Describe a run at its start: model, data and settings; its parameters, and the memory of one device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from tpuswarm.train.look.widgets import Column, make_table
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.mesh import bytes_per_device
from tpuswarm.train.recipe import Recipe, Source
from tpuswarm.train.supervised import Supervised
from tpuswarm.train.user_code import blame

LOG_WIDTH = 120


def describe_start(
    recipe: Recipe, settings: Mapping[str, Any], parameters: int, form: str, source: Source, held_out_rows: int
) -> dict[str, str]:
    """Describe model, data and settings; form: how the program is divided over the devices."""
    with blame(f"describe of {recipe.name} fails"):
        words = dict(recipe.describe())
    rows = getattr(source, "rows_per_epoch", None)
    trained = "a stream of rows" if rows is None else f"{rows:,} rows to train on"
    held_out = f"{held_out_rows:,} held out" if held_out_rows else "none held out"
    rate = words.get("learning rate", "")
    if not rate and isinstance(recipe, Supervised):
        rate = recipe.describe_rate(settings["steps"], settings["batch"])
    learning_rate = f"learning rate {rate}" if rate else ""
    parts = {
        "model": (words.get("model"), f"{parameters:,} parameters"),
        "data": (words.get("data") or f"{trained}, {held_out}",),
        "settings": (f"{settings['batch']:,} rows a step", learning_rate, settings["precision"], form),
    }
    return {name: ", ".join(filter(None, facts)) for name, facts in parts.items()}


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


def parameter_table(rows: Sequence[ParameterRow], width: int) -> Table:
    """Show a row for each parameter; a dtype or sharding that all share moves below the table."""
    common = [word for word in ("dtype", "sharding") if len({getattr(row, word) for row in rows}) == 1]
    names = ("parameter", "shape", "dtype", "sharding", "frozen", "decayed", "tied", "statistic", "KiB/device")
    cells = [
        (
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            "" if "dtype" in common else row.dtype,
            "" if "sharding" in common else row.sharding,
            "yes" if row.frozen else "",
            "yes" if row.decayed else "",
            row.tied,
            "yes" if row.statistic else "",
            f"{row.bytes_per_device / 1024:,.1f}",
        )
        for row in rows
    ]
    table = make_table([Column(name, right=name == "KiB/device") for name in names], cells, width)
    if common:
        table.caption = f"all {', '.join(getattr(rows[0], word) for word in common)}"
        table.caption_justify = "left"
    return table


def parameter_lines(compiled: Compiled) -> list[str]:
    """Return the table of parameters as text, for the log of a run."""
    console = Console(width=LOG_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(parameter_table(parameter_rows(compiled), LOG_WIDTH))
    return [line.rstrip() for line in captured.get().splitlines()]

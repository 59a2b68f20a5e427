"""Print a plan."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpuswarm.catalog import Gpu
from tpuswarm.plan.format import UNKNOWN, format_gib, format_hours, format_number, format_range, make_table
from tpuswarm.plan.row import Row
from tpuswarm.plan.speed import Cost

Line = tuple[str, Row | None, str]
"""A target's name, its row, and the state of its compilation before there is a row."""


def plan_table(title: str, lines: Sequence[Line]) -> RenderableType:
    """Return tables of memory, speed and price, a sentence for each target, and all warnings."""
    memory = make_table(
        f"{title}: memory of one device in GiB",
        ("on", "fits", "batch", "rows", "micro-\nbatches", "sharding", "remat", "used", "of", "args", "temps", "code"),
        [(name, *(_memory_cells(row) if row else ("…",))) for name, row, _ in lines],
        left=("fits", "sharding", "remat"),
    )
    rows = [row for _, row, _ in lines if row]
    parts: list[RenderableType] = [memory]
    if fast := [row for row in rows if row.speed]:
        parts += ["", _speed_table(fast)]
    if priced := [row for row in rows if row.cost]:
        parts += ["", _cost_table(priced)]
    sentences = [Text(f"{name}: {row.sentence if row else state}") for name, row, state in lines]
    hazards: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.warnings:
            hazards.setdefault(warning, []).append(row.accelerator.name)
    warnings = [Text(f"{', '.join(names)}: hazard: {warning}") for warning, names in hazards.items()]
    return Group(*parts, "", *sentences, *warnings)


def _memory_cells(row: Row) -> tuple[str, ...]:
    result, program = row.result, row.result.program
    available = format_gib(row.accelerator.program_bytes)
    if program is None:
        return row.verdict, "", "", "", "", "", format_gib(result.needed), available
    return (
        row.verdict,
        f"{program.batch:,}",
        f"{program.micro_batch:,}",
        f"{program.micro_batches:,}",
        program.sharding,
        program.remat,
        format_gib(result.used),
        available,
        *(format_gib(part) for part in (result.arguments, result.temporaries, result.code)),
    )


def _speed_table(rows: Sequence[Row]) -> Table:
    speeds = [(row.accelerator.name, row.speed) for row in rows if row.speed]
    table = make_table(
        "one step: floor, and expected time (estimate)",
        ("on", "floor, ms", "by", "expected, ms", f"{rows[0].unit}/s expected"),
        [
            (
                name,
                format_number(speed.floor_seconds * 1e3),
                speed.bound,
                format_range(speed.seconds, 1e3),
                format_range(speed.tokens_per_s),
            )
            for name, speed in speeds
        ],
        left=("by",),
    )
    table.caption = f"expected from {'; '.join(dict.fromkeys(speed.source for _, speed in speeds))}"
    return table


def _cost_table(rows: Sequence[Row]) -> Table:
    costs = [(row, row.cost) for row in rows if row.cost]
    return make_table(
        f"{rows[0].tokens:,} {rows[0].unit} (estimate)",
        ("on", "time", "$ on demand", "$ spot", "in"),
        [(row.accelerator.name, format_hours(cost.hours), *_price_cells(row, cost)) for row, cost in costs],
        left=("in",),
    )


def _price_cells(row: Row, cost: Cost) -> tuple[str, str, str]:
    if isinstance(row.accelerator, Gpu) and not row.free:
        return "your own", "", ""
    return format_range(cost.on_demand), format_range(cost.spot), cost.region or UNKNOWN

"""A plan for a person."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpuswarm.plan.row import Row
from tpuswarm.plan.words import UNKNOWN, columns, gib, short, span, time_span

Line = tuple[str, Row | None, str]
"""A slice's name, its row, and what is done for it while there is none."""


def table(title: str, lines: Sequence[Line]) -> RenderableType:
    """What fits, how fast, at what price, and under it a sentence for each slice."""
    memory = columns(
        f"{title}: memory of one device in GiB",
        ("TPU", "fits", "batch", "rows", "micro-\nbatches", "sharding", "remat", "used", "of", "args", "temps", "code"),
        [(name, *(_memory(row) if row else ("…",))) for name, row, _ in lines],
        left=("fits", "sharding", "remat"),
    )
    rows = [row for _, row, _ in lines if row]
    parts: list[RenderableType] = [memory]
    if fast := [row for row in rows if row.speed]:
        parts += ["", _speeds(fast)]
    if priced := [row for row in rows if row.cost]:
        parts += ["", _costs(priced)]
    said = [Text(f"{name}: {row.sentence if row else doing}") for name, row, doing in lines]
    hazards: dict[str, list[str]] = {}
    for row in rows:
        for each in row.warnings:
            hazards.setdefault(each, []).append(row.accelerator.name)
    warned = [Text(f"{', '.join(names)}: hazard: {each}") for each, names in hazards.items()]
    return Group(*parts, "", *said, *warned)


def _memory(row: Row) -> tuple[str, ...]:
    found, program = row.found, row.found.program
    of = gib(row.accelerator.generation.compiler_hbm_bytes)
    if program is None:
        return row.verdict, "", "", "", "", "", gib(found.needed), of
    return (
        row.verdict,
        f"{program.batch:,}",
        f"{program.micro_batch:,}",
        f"{program.micro_batches:,}",
        program.sharding,
        program.remat,
        gib(found.used),
        of,
        *(gib(each) for each in (found.arguments, found.temporaries, found.code)),
    )


def _speeds(rows: Sequence[Row]) -> Table:
    """Floors are computed; what is called expected is an estimate."""
    found = [(row.accelerator.name, row.speed) for row in rows if row.speed]
    table = columns(
        "one step: floor, and expected time (estimate)",
        ("TPU", "floor, ms", "by", "expected, ms", f"{rows[0].unit}/s expected"),
        [
            (name, short(each.floor_seconds * 1e3), each.bound, span(each.seconds, 1e3), span(each.tokens_per_s))
            for name, each in found
        ],
        left=("by",),
    )
    table.caption = f"expected from {'; '.join(dict.fromkeys(each.source for _, each in found))}"
    return table


def _costs(rows: Sequence[Row]) -> Table:
    found = [(row.accelerator.name, row.cost) for row in rows if row.cost]
    return columns(
        f"{rows[0].tokens:,} {rows[0].unit} (estimate)",
        ("TPU", "time", "$ on demand", "$ spot", "in"),
        [
            (name, time_span(each.hours), span(each.on_demand), span(each.spot), each.region or UNKNOWN)
            for name, each in found
        ],
        left=("in",),
    )

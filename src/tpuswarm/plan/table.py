"""A plan for a person."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpuswarm.plan.row import Row
from tpuswarm.plan.words import UNKNOWN, gib, short, span

Line = tuple[str, Row | None, str]
"""A slice's name, its row, and what is done for it while there is none."""


def table(title: str, lines: Sequence[Line]) -> RenderableType:
    """What fits, how fast, at what price, and under it a sentence for each slice."""
    memory = Table(box=None, pad_edge=False, title=f"{title}: memory of one device in GiB", title_justify="left")
    for name in ("TPU", "fits", "batch", "rows", "times", "sharding", "remat"):
        memory.add_column(name, no_wrap=True, justify="right" if name in ("batch", "rows", "times") else "left")
    for name in ("used", "of", "arguments", "temporaries", "code"):
        memory.add_column(name, no_wrap=True, justify="right")
    for name, row, doing in lines:
        memory.add_row(name, *(_memory(row) if row else (doing,)))
    rows = [row for _, row, _ in lines if row]
    parts: list[RenderableType] = [memory]
    if any(row.speed for row in rows):
        parts += ["", _speeds([row for row in rows if row.speed])]
    said = [Text(f"{row.accelerator.name}: {row.sentence}") for row in rows]
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
        "yes" if program.remat else "no",
        gib(found.used),
        of,
        *(gib(each) for each in (found.arguments, found.temporaries, found.code)),
    )


def _speeds(rows: Sequence[Row]) -> Table:
    """Floors are computed; all that is called expected is an estimate, and so is what follows from it."""
    priced = any(row.cost for row in rows)
    tokens = f" for {rows[0].tokens:,} tokens" if priced else ""
    title = f"one step, floor and expected (estimate){tokens}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    names = ["TPU", "floor, ms", "by", "expected, ms", "tokens/s expected"]
    for name in names + (["hours", "$ on demand", "$ spot", "in"] if priced else []):
        table.add_column(name, no_wrap=True, justify="left" if name in ("TPU", "by", "in") else "right")
    for row in rows:
        speed, cost = row.speed, row.cost
        assert speed is not None
        cells = [short(speed.floor_seconds * 1e3), speed.bound, span(speed.seconds, 1e3)]
        cells += [span(speed.tokens_per_s)]
        if cost is not None:
            cells += [span(cost.hours), *(span(each) for each in (cost.on_demand, cost.spot))]
            cells += [cost.region or UNKNOWN]
        table.add_row(row.accelerator.name, *cells)
    sources = dict.fromkeys(row.speed.source for row in rows if row.speed)
    table.caption = f"expected by {'; '.join(sources)}"
    table.caption_justify = "left"
    return table

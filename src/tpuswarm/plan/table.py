"""A plan for a person."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpuswarm.plan.row import GIB, UNKNOWN, Row

Line = tuple[str, Row | None, str]
"""A slice's name, its row, and what is done for it while there is none."""


def table(title: str, lines: Sequence[Line]) -> RenderableType:
    """What fits, and under it a sentence for each slice."""
    memory = Table(box=None, pad_edge=False, title=f"{title}: memory of one device, GiB", title_justify="left")
    for name in ("TPU", "fits", "batch", "rows", "times", "sharding", "remat"):
        memory.add_column(name, no_wrap=True, justify="right" if name in ("batch", "rows", "times") else "left")
    for name in ("used", "of", "arguments", "temporaries", "code"):
        memory.add_column(name, no_wrap=True, justify="right")
    for name, row, doing in lines:
        memory.add_row(name, *(_memory(row) if row else (doing,)))
    said = [Text(f"{name}: {row.sentence}") for name, row, _ in lines if row]
    hazards: dict[str, list[str]] = {}
    for name, row, _ in lines:
        for each in row.warnings if row else ():
            hazards.setdefault(each, []).append(name)
    warned = [Text(f"{', '.join(names)}: hazard: {each}") for each, names in hazards.items()]
    return Group(memory, "", *said, *warned)


def _memory(row: Row) -> tuple[str, ...]:
    found, program = row.found, row.found.program
    of = _gib(row.accelerator.generation.compiler_hbm_bytes)
    if program is None:
        return row.verdict, "", "", "", "", "", _gib(found.needed), of
    return (
        row.verdict,
        f"{program.batch:,}",
        f"{program.micro_batch:,}",
        f"{program.micro_batches:,}",
        program.sharding,
        "yes" if program.remat else "no",
        *(_gib(each) for each in (found.used,)),
        of,
        *(_gib(each) for each in (found.arguments, found.temporaries, found.code)),
    )


def _gib(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count / GIB:.2f}"

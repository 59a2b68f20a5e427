"""Format the numbers of a plan."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from tpuswarm.config.units import GIB
from tpuswarm.plan.speed import Range

UNKNOWN = "unknown"


def make_table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[str] = ()) -> Table:
    """Make a table for 80 columns; only the first column and those in `left` are left-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.caption_justify = "left"
    for name in names:
        is_left = name == names[0] or name in left
        table.add_column(name, no_wrap=True, justify="left" if is_left else "right", vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table


def format_range(values: Range | None, factor: float = 1.0) -> str:
    """Format `low to high` with two digits: estimates have no more."""
    if values is None:
        return UNKNOWN
    return f"{format_number(values.low * factor, 2)} to {format_number(values.high * factor, 2)}"


def format_hours(hours: Range) -> str:
    """Format `low to high` in hours, minutes or seconds, whichever suits the higher one."""
    units = (("h", 1), ("min", 60))
    unit, factor = next(((unit, factor) for unit, factor in units if hours.high * factor >= 1), ("s", 3600))
    return f"{format_range(hours, factor)} {unit}"


def format_number(value: float, digits: int = 3) -> str:
    """Round to significant digits; write millions as M and billions as B."""
    rounded = float(f"{value:.{digits}g}")
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if rounded >= size:
            return format_number(rounded / size, digits) + unit
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def format_gib(count: int | None) -> str:
    """Write bytes in GiB."""
    return UNKNOWN if count is None else f"{count / GIB:.2f}"

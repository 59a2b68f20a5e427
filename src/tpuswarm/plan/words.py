"""Numbers of a plan in words."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from tpuswarm.config.units import GIB
from tpuswarm.plan.roofline import Range

UNKNOWN = "unknown"


def columns(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[str] = ()) -> Table:
    """A table that a terminal of 80 columns holds; figures to the right, the first column and those of `left` not."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.caption_justify = "left"
    for name in names:
        leftwards = name == names[0] or name in left
        table.add_column(name, no_wrap=True, justify="left" if leftwards else "right", vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table


def span(each: Range | None, times: float = 1.0) -> str:
    """`low to high` in two digits, for no estimate has more; unknown where nobody can say."""
    return UNKNOWN if each is None else f"{short(each.low * times, 2)} to {short(each.high * times, 2)}"


def time_span(hours: Range) -> str:
    """`low to high` and the unit that the higher one is read in: hours, minutes or seconds."""
    units = (("h", 1), ("min", 60))
    unit, times = next(((unit, times) for unit, times in units if hours.high * times >= 1), ("s", 3600))
    return f"{span(hours, times)} {unit}"


def short(value: float, digits: int = 3) -> str:
    """So many digits; from millions on with M or B."""
    rounded = float(f"{value:.{digits}g}")
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if rounded >= size:
            return short(rounded / size, digits) + unit
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def gib(count: int | None) -> str:
    """Bytes in GiB."""
    return UNKNOWN if count is None else f"{count / GIB:.2f}"

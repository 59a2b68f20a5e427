"""Numbers of a plan in words."""

from tpuswarm.plan.roofline import Range

UNKNOWN = "unknown"
GIB = 2**30


def span(each: Range | None, times: float = 1.0) -> str:
    """`low to high`; unknown where nobody can say."""
    return UNKNOWN if each is None else f"{short(each.low * times)} to {short(each.high * times)}"


def short(value: float) -> str:
    """Three digits where that is enough."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gib(count: int | None) -> str:
    """Bytes in GiB."""
    return UNKNOWN if count is None else f"{count / GIB:.2f}"

"""Look up measured preemptions of spot TPUs."""

from dataclasses import dataclass
from functools import cache

from tpuswarm.catalog.figures import Source, find_source, read_data


@dataclass(frozen=True)
class SpotRecord:
    """One spot TPU whose owner requested it again after each preemption."""

    type: str
    hours: float
    """Since the first request."""
    ran: float
    """Hours in which its job ran."""
    lost: int
    """Number of preemptions."""
    source: Source

    @property
    def hours_between(self) -> float:
        """Mean hours in which its job ran between two preemptions."""
        return self.ran / self.lost

    @property
    def hours_away(self) -> float:
        """Mean hours from a preemption, or from the first request, until its job ran."""
        return (self.hours - self.ran) / (self.lost + 1)


@cache
def spot_records() -> tuple[SpotRecord, ...]:
    found = read_data("preemptions")
    return tuple(SpotRecord(**entry, source=find_source(found["source"])) for entry in found["kept"])

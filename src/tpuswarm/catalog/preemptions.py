"""How often spot TPUs were taken away, and how long until their job ran again, where somebody has shown it."""

from dataclasses import dataclass
from functools import cache

from tpuswarm.catalog.figures import Source, data, source


@dataclass(frozen=True)
class KeptSpot:
    """One spot TPU that somebody kept, each time on another machine."""

    type: str
    hours: float
    """From the first request on."""
    ran: float
    """Hours of them that its job ran."""
    lost: int
    """Times that it was taken away."""
    source: Source

    @property
    def hours_between(self) -> float:
        """That its job ran between two losses, on average."""
        return self.ran / self.lost

    @property
    def hours_away(self) -> float:
        """From a loss, or the first request, until its job ran, on average: the wait for a machine, and its set-up."""
        return (self.hours - self.ran) / (self.lost + 1)


@cache
def kept_spot_tpus() -> tuple[KeptSpot, ...]:
    """All that are known."""
    found = data("preemptions")
    return tuple(KeptSpot(**entry, source=source(found["source"])) for entry in found["kept"])

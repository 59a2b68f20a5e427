"""What members of a swarm send and receive, and what that costs between places.

All of it is computed, for members that are equally fast and never preempted; each preemption adds the whole
model once. `tpuswarm simulate` is the tool for anything less even.
"""

from dataclasses import dataclass, field
from typing import get_args

from tpuswarm.catalog import Figure, network
from tpuswarm.config.units import GIB
from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.values import Form

DAY = 86_400.0
MESSAGES = (1_700.0, 1_100.0)
"""Bytes a second that a member sends and receives in heartbeats, headers and leases: 2.2 and 1.4 bytes a token at 768
tokens a second, `python -m benchmarks traffic` (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Exchanged:
    """What a member shares, and how often."""

    elements: int
    """Float32 numbers that the swarm shares: the parameters."""
    step_seconds: float
    cycle: int
    """Steps between two pushes."""
    form: Form = "plain"
    """Of both links."""
    data_bytes: int = 0
    """Of one member's step, where its data is read over the network; 0: it has the data."""
    averaged: bool = False
    """Whether the swarm keeps a moving average of them."""

    @property
    def cycle_seconds(self) -> float:
        """Between two pushes of a member."""
        return self.cycle * self.step_seconds


@dataclass(frozen=True)
class Traffic:
    """Bytes a day of one member, each by what they are for."""

    sent: dict[str, float] = field(hash=False)
    received: dict[str, float] = field(hash=False)
    data: float
    """Read from a bucket, or wherever the data lies."""

    @property
    def mbit_up(self) -> float:
        """Megabits a second that a member sends, over the whole time."""
        return sum(self.sent.values()) * 8 / DAY / 1e6

    @property
    def mbit_down(self) -> float:
        """Megabits a second that a member receives, its data included."""
        return (sum(self.received.values()) + self.data) * 8 / DAY / 1e6


def traffic(exchanged: Exchanged) -> Traffic:
    """Of one member, which in each cycle sends one contribution and receives one version."""
    once = exchanged.elements * bytes_per_element(exchanged.form)
    cycles = DAY / exchanged.cycle_seconds
    beats_up, beats_down = (each * DAY for each in MESSAGES)
    return Traffic(
        {"contributions": cycles * once, "messages": beats_up},
        {"versions": cycles * once, "messages": beats_down},
        exchanged.data_bytes / exchanged.step_seconds * DAY,
    )


@dataclass(frozen=True)
class Bill:
    """Dollars a day of one member's traffic with a head at some distance; None: a price is unknown."""

    relation: network.Relation
    exchange: float | None
    data: float | None
    """Of a bucket beside the head."""

    @property
    def parts(self) -> dict[str, float | None]:
        """By what they are for."""
        return {"exchange": self.exchange, "data": self.data}


def bill(member: Traffic, place: str, relation: network.Relation) -> Bill:
    """Traffic of a member in the zone `place` with a head so far away, a day; no other continent is Oceania.

    What leaves a machine of Google's is paid for at the price of its way; what arrives is free, and what a head on the
    internet sends costs what its owner pays there, which is not in it.
    """
    up = _dollars(network.transfer_price(relation, place))
    exchanged = sum(member.sent.values()) / GIB
    if relation != "internet":  # between two places of Google's a GiB costs the same in both ways
        exchanged += sum(member.received.values()) / GIB
    read: float | None = 0.0
    if member.data and relation != "internet":
        read = _dollars(network.read_price(relation))
    return Bill(
        relation,
        None if up is None else up * exchanged,
        None if read is None else read * member.data / GIB,
    )


def bills(member: Traffic, place: str) -> list[Bill]:
    """One for each distance of a head from the zone `place`, nearest first."""
    return [bill(member, place, each) for each in get_args(network.Relation)]


def _dollars(price: Figure | None) -> float | None:
    return None if price is None else float(price.value)

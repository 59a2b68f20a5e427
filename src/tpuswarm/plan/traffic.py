"""Compute what members of a swarm send and receive, and what that costs between places.

Members are equally fast and never preempted; each preemption adds the whole model once. `tpuswarm simulate` covers
uneven swarms.
"""

from dataclasses import dataclass, field
from typing import get_args

from tpuswarm.catalog import Figure, network
from tpuswarm.config.units import GIB
from tpuswarm.swarm.core.arithmetic.quantize import sent_bytes
from tpuswarm.swarm.core.values import Form

DAY_S = 86_400.0
SENT_MESSAGES_BYTES_PER_S, RECEIVED_MESSAGES_BYTES_PER_S = 1_700.0, 1_100.0
"""One member's heartbeats, headers and leases: `python -m benchmarks traffic` (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Exchange:
    """Parameters that a member shares, and its cycle."""

    elements: int
    """Float32 numbers that the swarm shares: the parameters."""
    step_seconds: float
    cycle: int
    """Steps between two pushes."""
    form: Form = "plain"
    """In both directions."""
    data_bytes: int = 0
    """Read over the network per step; 0: the member has its data."""
    averaged: bool = False
    """The swarm keeps a moving average."""

    @property
    def cycle_seconds(self) -> float:
        """Time between two pushes."""
        return self.cycle * self.step_seconds


@dataclass(frozen=True)
class Traffic:
    """Bytes a day of one member."""

    sent: dict[str, float] = field(hash=False)
    received: dict[str, float] = field(hash=False)
    data: float
    """Training data, read from a bucket or elsewhere."""

    @property
    def mbit_up(self) -> float:
        """Mean Mbit/s sent."""
        return sum(self.sent.values()) * 8 / DAY_S / 1e6

    @property
    def mbit_down(self) -> float:
        """Mean Mbit/s received, with data."""
        return (sum(self.received.values()) + self.data) * 8 / DAY_S / 1e6


def member_traffic(exchange: Exchange) -> Traffic:
    """Return the traffic of one member: a contribution and a version per cycle, messages, data."""
    version_bytes = sent_bytes(exchange.elements, exchange.form)  # however many fragments: only the last is padded
    cycles = DAY_S / exchange.cycle_seconds
    return Traffic(
        {"contributions": cycles * version_bytes, "messages": SENT_MESSAGES_BYTES_PER_S * DAY_S},
        {"versions": cycles * version_bytes, "messages": RECEIVED_MESSAGES_BYTES_PER_S * DAY_S},
        exchange.data_bytes / exchange.step_seconds * DAY_S,
    )


@dataclass(frozen=True)
class TrafficBill:
    """Dollars a day of one member's traffic with a head at some distance; None: a price is unknown."""

    relation: network.Relation
    exchange: float | None
    data: float | None
    """From a bucket next to the head."""

    @property
    def parts(self) -> dict[str, float | None]:
        """By purpose."""
        return {"exchange": self.exchange, "data": self.data}


def traffic_bills(member: Traffic, place: str) -> list[TrafficBill]:
    """Return a bill for each distance of the head from the zone `place`, nearest first."""
    return [_bill(member, place, relation) for relation in get_args(network.Relation)]


def _bill(member: Traffic, place: str, relation: network.Relation) -> TrafficBill:
    """Google bills outgoing traffic. Traffic sent by a head outside Google costs its owner, and is not included."""
    price = _dollars(network.transfer_price(relation, place))
    paid_gib = sum(member.sent.values()) / GIB
    if relation != "internet":  # a GiB costs the same in both directions
        paid_gib += sum(member.received.values()) / GIB
    read: float | None = 0.0
    if member.data and relation != "internet":
        read = _dollars(network.read_price(relation))
    return TrafficBill(
        relation,
        None if price is None else price * paid_gib,
        None if read is None else read * member.data / GIB,
    )


def _dollars(price: Figure | None) -> float | None:
    return None if price is None else float(price.value)

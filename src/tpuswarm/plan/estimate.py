"""A swarm of equal members, each on the slice of a row: speed, price, traffic, and the head that serves them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rich.table import Table

from tpuswarm.catalog import network
from tpuswarm.config.units import GIB
from tpuswarm.plan.head import Head, Holder, head, holders
from tpuswarm.plan.roofline import Cost, Range, cost
from tpuswarm.plan.row import Row, known, span_object
from tpuswarm.plan.swarm import Bill, Exchanged, Traffic, bills, traffic
from tpuswarm.plan.words import UNKNOWN, columns, short, span, time_span
from tpuswarm.swarm.processes.plan import DEFAULT_CYCLE_STEPS

RELATIONS = get_args(network.Relation)


@dataclass(frozen=True)
class Estimate:
    """What a swarm of `members` such slices does; all of it is an estimate."""

    row: Row
    members: int
    exchanged: Exchanged
    tokens_per_s: Range
    cost: Cost | None
    traffic: Traffic
    """Of one member."""
    bills: Sequence[Bill]
    """Dollars a day of one member's traffic, by the distance of its head; none where no zone has the slice."""
    head: Head
    holders: Sequence[Holder]

    def document(self) -> dict[str, Any]:
        """For JSON; traffic and bills are of all members together, a day."""
        members, one = self.members, self.traffic
        return known(
            {
                "members": members,
                "cycle": self.exchanged.cycle,
                "quantize": self.exchanged.form,
                "tokens_per_s": span_object(self.tokens_per_s),
                "hours": span_object(self.cost.hours if self.cost else None),
                "dollars": {
                    "on_demand": span_object(self.cost.on_demand if self.cost else None),
                    "spot": span_object(self.cost.spot if self.cost else None),
                },
                "member_bytes_a_day": {"sent": dict(one.sent), "received": dict(one.received), "data": one.data},
                "traffic_dollars_a_day": {
                    each.relation: {name: None if part is None else members * part for name, part in each.parts.items()}
                    for each in self.bills
                },
                "head": asdict(self.head),
                "head_machines": [
                    {"name": each.name, "dollars_an_hour": each.dollars, "network_known": each.network_known}
                    for each in self.holders
                ],
                "estimate": True,
            }
        )


def estimate(row: Row, members: int) -> Estimate | None:
    """The swarm of a row; None for a row without a program.

    Members are as fast as the best that is expected, so that the traffic is the most there can be; a push every 50
    steps, in full precision; data is read from a bucket beside the head.
    """
    program, speed, slice_ = row.found.program, row.speed, row.accelerator
    if program is None or speed is None:
        return None
    exchanged = Exchanged(
        program.exchanged,
        speed.seconds.low,
        DEFAULT_CYCLE_STEPS,
        data_bytes=program.batch * program.row_bytes,
        averaged=program.averaged,
    )
    one, rate = traffic(exchanged), speed.tokens_per_s
    all_rates = Range(members * rate.low, members * rate.high)
    price, zones = slice_.price(), slice_.zones()
    place = next((zone for zone in zones if price and zone.startswith(price.region)), zones[0] if zones else None)
    serving = head(members, exchanged, one, "average" if program.outer == "average" else "nesterov")
    return Estimate(
        row,
        members,
        exchanged,
        all_rates,
        cost(all_rates, row.tokens, price, members=members, free=row.free) if row.tokens else None,
        one,
        bills(one, place) if place else (),
        serving,
        holders(serving, slice_, exchanged, place) if place else (),
    )


def tables(swarms: Sequence[Estimate]) -> list[Table]:
    """Speed and price of each swarm, its traffic and what that costs, its head."""
    first = swarms[0]
    speeds = columns(
        f"a swarm of {first.members} members (estimate)",
        ("TPU", f"{first.row.unit}/s", *(("time", "$ on demand", "$ spot") if first.cost else ())),
        [
            (
                each.row.accelerator.name,
                span(each.tokens_per_s),
                *([time_span(each.cost.hours), span(each.cost.on_demand), span(each.cost.spot)] if each.cost else []),
            )
            for each in swarms
        ],
    )
    sizes = columns(
        "traffic per member, GiB/day",
        ("TPU", "sends", "receives", "data"),
        [(each.row.accelerator.name, *(short(part / GIB) for part in _parts(each.traffic))) for each in swarms],
    )
    money = columns(
        f"traffic of all {first.members} members, $/day, by distance to the head",
        ("TPU", *RELATIONS),
        [(each.row.accelerator.name, *(_dollars(each, relation) for relation in RELATIONS)) for each in swarms],
    )
    money.caption = (
        f"at the fastest expected speed, a push every {first.exchanged.cycle} steps in full precision; "
        "data read from a bucket next to the head; a name after + has no known price"
    )
    heads = columns(
        "the head",
        ("TPU", "RAM,\nGiB", "disk,\nGiB", "growth\nper day", "Mbit/s\nin", "\nout", "cores"),
        [
            (
                each.row.accelerator.name,
                *(short(getattr(each.head, name) / GIB) for name in ("memory_bytes", "disk_bytes", "disk_bytes_a_day")),
                short(each.head.mbit_in),
                short(each.head.mbit_out),
                str(each.head.cores),
            )
            for each in swarms
        ],
    )
    machines = columns(
        "cheapest machines for the head, $/hour",
        ("TPU", "machines"),
        [
            (each.row.accelerator.name, ", ".join(_machine(holder) for holder in each.holders) or "none known")
            for each in swarms
        ],
        left=("machines",),
    )
    machines.columns[-1].no_wrap = False
    if unknown := [
        each.row.accelerator.name for each in swarms if not all(part.network_known for part in each.holders)
    ]:
        machines.caption = f"no published network speed for a host of {', '.join(unknown)}"
    return [speeds, sizes, money, heads, machines]


def _parts(one: Traffic) -> tuple[float, float, float]:
    return sum(one.sent.values()), sum(one.received.values()), one.data


def _dollars(swarm: Estimate, relation: str) -> str:
    """What is known, and by name what is not."""
    parts = next((each.parts for each in swarm.bills if each.relation == relation), {})
    unknown = [name for name, part in parts.items() if part is None]
    dollars = sum(part or 0.0 for part in parts.values())
    if not parts or (unknown and not dollars):
        return UNKNOWN
    return " + ".join([short(swarm.members * dollars), *unknown])


def _machine(holder: Holder) -> str:
    if holder.own:
        return f"{holder.name} (no extra cost)"
    return f"{holder.name} {UNKNOWN if holder.dollars is None else f'{holder.dollars:.2f}'}"

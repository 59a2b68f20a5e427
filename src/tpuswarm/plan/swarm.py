"""Estimate a swarm of equal members: speed, price, traffic, and its head."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from rich.table import Table

from tpuswarm.catalog import Accelerator, network
from tpuswarm.config.units import GIB
from tpuswarm.plan.format import UNKNOWN, format_hours, format_number, format_range, make_table
from tpuswarm.plan.head import Head, HeadMachine, NetworkLoad, head_machines, network_load, size_head
from tpuswarm.plan.row import Row, mark_unknown, range_object
from tpuswarm.plan.speed import Cost, Range, estimate_cost
from tpuswarm.plan.traffic import Exchange, Traffic, TrafficBill, member_traffic, traffic_bills
from tpuswarm.swarm.core.values import Form, Rule
from tpuswarm.swarm.processes.run_plan import DEFAULT_CYCLE_STEPS

RELATIONS = get_args(network.Relation)


@dataclass(frozen=True)
class SwarmEstimate:
    """A swarm of `members` equal slices or GPUs."""

    row: Row
    members: int
    exchange: Exchange
    tokens_per_s: Range
    cost: Cost | None
    traffic: Traffic
    bills: Sequence[TrafficBill]
    """One member's, by distance to the head; empty if no zone has it."""
    head: Head
    head_machines: Sequence[HeadMachine]
    networks: Sequence[NetworkLoad]
    """In each form of the exchange."""

    @property
    def name(self) -> str:
        """Name of the slice or GPU."""
        return self.row.accelerator.name

    def document(self) -> dict[str, Any]:
        """Return the estimate for JSON; traffic dollars are of all members."""
        members, traffic = self.members, self.traffic
        return mark_unknown(
            {
                "members": members,
                "cycle": self.exchange.cycle,
                "quantize": self.exchange.form,
                "tokens_per_s": range_object(self.tokens_per_s),
                "hours": range_object(self.cost.hours if self.cost else None),
                "dollars": {
                    "on_demand": range_object(self.cost.on_demand if self.cost else None),
                    "spot": range_object(self.cost.spot if self.cost else None),
                },
                "member_bytes_a_day": {
                    "sent": dict(traffic.sent),
                    "received": dict(traffic.received),
                    "data": traffic.data,
                },
                "traffic_dollars_a_day": {
                    bill.relation: {name: None if part is None else members * part for name, part in bill.parts.items()}
                    for bill in self.bills
                },
                "head": asdict(self.head),
                "network_gbit_s": [asdict(load) for load in self.networks],
                "head_machines": [
                    {"name": machine.name, "dollars_an_hour": machine.dollars, "network_known": machine.network_known}
                    for machine in self.head_machines
                ],
                "estimate": True,
            }
        )


def estimate_swarm(row: Row, members: int) -> SwarmEstimate | None:
    """Estimate the swarm of a row; None without a program.

    Traffic is the most possible: members at the fastest expected speed, pushes in full precision, data read from a
    bucket next to the head.
    """
    program, speed, hardware = row.result.program, row.speed, row.accelerator
    if program is None or speed is None:
        return None
    exchange = Exchange(
        program.shared_elements,
        speed.seconds.low,
        DEFAULT_CYCLE_STEPS,
        data_bytes=program.batch * program.row_bytes,
        averaged=program.is_averaged,
    )
    traffic, rate = member_traffic(exchange), speed.tokens_per_s
    total_rate = Range(members * rate.low, members * rate.high)
    price, zones = hardware.price(), hardware.zones()
    place = next((zone for zone in zones if price and zone.startswith(price.region)), zones[0] if zones else None)
    rule: Rule = "average" if program.outer == "average" else "nesterov"
    head = size_head(members, exchange, traffic, rule)
    return SwarmEstimate(
        row,
        members,
        exchange,
        total_rate,
        estimate_cost(total_rate, row.tokens, price, members=members, free=row.free) if row.tokens else None,
        traffic,
        traffic_bills(traffic, place) if place else (),
        head,
        head_machines(head, hardware, exchange, place) if place and isinstance(hardware, Accelerator) else (),
        [network_load(members, replace(exchange, form=form), rule) for form in get_args(Form)],
    )


def swarm_tables(swarms: Sequence[SwarmEstimate]) -> list[Table]:
    """Return tables of speed and price, traffic and its price, and the head."""
    first = swarms[0]
    speeds = make_table(
        f"a swarm of {first.members} members (estimate)",
        ("on", f"{first.row.unit}/s", *(("time", "$ on demand", "$ spot") if first.cost else ())),
        [
            (
                swarm.name,
                format_range(swarm.tokens_per_s),
                *(
                    [format_hours(swarm.cost.hours), format_range(swarm.cost.on_demand), format_range(swarm.cost.spot)]
                    if swarm.cost
                    else []
                ),
            )
            for swarm in swarms
        ],
    )
    sizes = make_table(
        "traffic per member, GiB/day",
        ("on", "sends", "receives", "data"),
        [(swarm.name, *(format_number(part / GIB) for part in _totals(swarm.traffic))) for swarm in swarms],
    )
    money = make_table(
        f"traffic of all {first.members} members, $/day, by distance to the head",
        ("on", *RELATIONS),
        [(swarm.name, *(_dollars(swarm, relation) for relation in RELATIONS)) for swarm in swarms],
    )
    money.caption = (
        f"at the fastest expected speed, a push every {first.exchange.cycle} steps in full precision; "
        "data read from a bucket next to the head; a name after + has no known price"
    )
    heads = make_table(
        "the head",
        ("on", "RAM,\nGiB", "disk,\nGiB", "growth\nper day", "Mbit/s\nin", "\nout", "cores"),
        [
            (
                swarm.name,
                *(
                    format_number(getattr(swarm.head, name) / GIB)
                    for name in ("memory_bytes", "disk_bytes", "disk_bytes_a_day")
                ),
                format_number(swarm.head.mbit_in),
                format_number(swarm.head.mbit_out),
                str(swarm.head.cores),
            )
            for swarm in swarms
        ],
    )
    loads = make_table(
        "network in Gbit/s: all aggregators on the head, or each elsewhere",
        ("on", "quantize", "head\nin", "\nout", "aggre-\ngators", "each\nin", "\nout", "head\nalone"),
        [
            (
                swarm.name,
                load.form,
                format_number(load.head.received),
                format_number(load.head.sent),
                f"{load.aggregators} / {load.fragments}",
                format_number(load.aggregator.received),
                format_number(load.aggregator.sent),
                "< 0.001" if load.head_alone.received < 0.001 else format_number(load.head_alone.received),
            )
            for swarm in swarms
            for load in swarm.networks
        ],
        left=("quantize",),
    )
    loads.caption = "aggregators / fragments; out: to members and to the run's bucket"
    machines = make_table(
        "cheapest machines for the head, $/hour",
        ("on", "machines"),
        [
            (swarm.name, ", ".join(_format_machine(machine) for machine in swarm.head_machines) or "none known")
            for swarm in swarms
        ],
        left=("machines",),
    )
    machines.columns[-1].no_wrap = False
    if unknown := [swarm.name for swarm in swarms if not all(machine.network_known for machine in swarm.head_machines)]:
        machines.caption = f"no published network speed for a host of {', '.join(unknown)}"
    return [speeds, sizes, money, heads, loads, machines]


def _totals(traffic: Traffic) -> tuple[float, float, float]:
    return sum(traffic.sent.values()), sum(traffic.received.values()), traffic.data


def _dollars(swarm: SwarmEstimate, relation: str) -> str:
    """Return the known dollars, and the names of parts without a price."""
    parts = next((bill.parts for bill in swarm.bills if bill.relation == relation), {})
    unknown = [name for name, part in parts.items() if part is None]
    dollars = sum(part or 0.0 for part in parts.values())
    if not parts or (unknown and not dollars):
        return UNKNOWN
    return " + ".join([format_number(swarm.members * dollars), *unknown])


def _format_machine(machine: HeadMachine) -> str:
    if machine.own:
        return f"{machine.name} (no extra cost)"
    return f"{machine.name} {UNKNOWN if machine.dollars is None else f'{machine.dollars:.2f}'}"

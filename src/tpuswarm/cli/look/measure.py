"""`tpuswarm measure`: the network between two machines, beside what the catalogue says."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from tpuswarm.catalog import find, machines
from tpuswarm.catalog.network import relation_of, transfer_price
from tpuswarm.cli.console import FleetOption, Json, Yes, confirm, make_console
from tpuswarm.cli.machine.setup import SetupProgress
from tpuswarm.cloud.protocol import Machine
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.connect import Connections, fan_out, run_shell
from tpuswarm.remote.host import Host
from tpuswarm.remote.measure import INSTALL_IPERF3, Flow, Measurement
from tpuswarm.remote.measure import measure as measure_network
from tpuswarm.remote.setup.run import set_up
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting


def measure(
    first: Annotated[str, typer.Argument(metavar="A", help="A machine, or NAME/2: a worker of a slice.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    yes: Yes = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Measure throughput and latency between two machines of a fleet with iperf3, over internal addresses.

    Takes some 15 seconds, and slows down what else uses the network of the two.
    """
    routes = open_routes(find_fleet(fleet)[0])
    pairs = [_find_host(routes, where) for where in (first, second)]
    hosts, targets = [host for host, _ in pairs], [machine for _, machine in pairs]
    if hosts[0].label == hosts[1].label:
        raise InputError(f"{first} and {second} are the same host: name two")
    asyncio.run(_install(routes, hosts, yes))
    addresses = [_internal_address(host, machine) for host, machine in pairs]
    with waiting(f"measuring between {hosts[0].label} and {hosts[1].label}"):
        found = asyncio.run(_measure(routes, hosts, addresses))
    limits = [network_gbps(machine) for machine in targets]
    if as_json:
        print(json.dumps({**asdict(found), "catalog_gbps": limits}))
        return
    for line in describe(hosts, targets, limits, found):
        echo(line)


def _find_host(routes: Routes, where: str) -> tuple[Host, Machine]:
    found = routes.find(where)
    if len(found.hosts) != 1:
        labels = [host.label for host in found.hosts]
        raise InputError(f"{where} is {len(labels)} hosts; name one, such as {labels[0]}")
    (host,) = found.hosts
    return host, found.machines[host.label]


def _internal_address(host: Host, machine: Machine) -> str:
    return machine.workers[int(host.label.rpartition("/")[2])].internal or ""


async def _install(routes: Routes, hosts: list[Host], yes: bool) -> None:
    async with Connections(routes.key) as connections:
        answers = await fan_out(hosts, lambda host: run_shell(connections, host, INSTALL_IPERF3.check))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        lacking = [host for host, answer in zip(hosts, answers, strict=True) if answer[0] != 0]  # type: ignore[index]
        if not lacking:
            return
        echo(f"{' and '.join(host.label for host in lacking)} will get the Debian package iperf3")
        confirm(yes)
        with SetupProgress(make_console(), lacking) as progress:
            outcome = await set_up(connections, dict.fromkeys(lacking, (INSTALL_IPERF3,)), progress.set_step)
    for error in outcome.failed.values():
        raise error


async def _measure(routes: Routes, hosts: list[Host], addresses: list[str]) -> Measurement:
    async with Connections(routes.key) as connections:
        return await measure_network(connections, hosts, addresses)


def network_gbps(machine: Machine) -> float | None:
    """Return the most that a host sends, in Gbit/s, by the catalogue; None: unknown."""
    if machine.kind == "vm":
        return next((known.network_gbps for known in machines() if known.name == machine.type), None)
    try:
        tpu = find(machine.type)
    except InputError:
        return None
    per_chip = tpu.generation.network_gbps
    return None if per_chip is None else per_chip * tpu.chips_per_host


def describe(hosts: list[Host], targets: list[Machine], limits: list[float | None], found: Measurement) -> list[str]:
    """Return a line for each direction, for latency, and for what the traffic costs."""
    names = [host.label for host in hosts]

    def line(flow: Flow, sender: int) -> str:
        limit, type_ = limits[sender], targets[sender].type
        known = (
            f"the catalogue has at most {limit:g} for a host of {type_}"
            if limit
            else f"the catalogue has no figure for {type_}"
        )
        resent = f"; {flow.retransmits:,} packets sent again" if flow.retransmits else ""
        return f"{names[sender]} to {names[1 - sender]}: {flow.gbps:.2f} Gbit/s ({known}{resent})"

    relation = relation_of(targets[0].zone, targets[1].zone)
    price = transfer_price(relation, targets[0].zone)
    costs = f"${price.value:g} a GiB" if price else "a price that is unknown"
    loaded = max(found.there.round_trip_ms, found.back.round_trip_ms)
    return [
        line(found.there, 0),
        line(found.back, 1),
        f"round trip: {found.quiet.round_trip_ms:.2f} ms, {loaded:.2f} ms under this load",
        f"distance: {relation}; what {names[0]} sends there costs {costs}",
    ]

"""Size a swarm's head, and find the cheapest machines with that size."""

import math
from dataclasses import dataclass

from tpuswarm.catalog import Accelerator, Price, machines
from tpuswarm.config.units import GIB
from tpuswarm.plan.traffic import (
    DAY_S,
    RECEIVED_MESSAGES_BYTES_PER_S,
    SENT_MESSAGES_BYTES_PER_S,
    Exchange,
    Traffic,
)
from tpuswarm.swarm.core.arithmetic.fragments import aggregators_for, fragments_for
from tpuswarm.swarm.core.arithmetic.quantize import sent_bytes
from tpuswarm.swarm.core.ledger_view import LANDMARK_INTERVAL
from tpuswarm.swarm.core.values import Form, Rule
from tpuswarm.swarm.simulation.stand_ins import MERGED_PARAMETERS_PER_S
from tpuswarm.swarm.storage.retention import estimate_disk
from tpuswarm.swarm.supervision.needs import HOST_COPIES, PROCESS_BYTES, serving_bytes
from tpuswarm.train.recipe import Options, Recipe

PEAK_TO_MEAN_RATIO = 2.0
"""Head traffic comes in bursts."""
MEASURED_CORES_COUNT = 2
"""Cores used to measure MERGED_PARAMETERS_PER_S."""
RECORD_BYTES = 512.0
"""One contribution in the ledger: 410 KB for a record of 980 (`python -m benchmarks scale`), plus its header."""


@dataclass(frozen=True)
class Head:
    """Requirements of a head."""

    memory_bytes: float
    """Processes, and the arrays of one commit; a head with less reads them from disk each time."""
    disk_bytes: float
    """The last 20 versions and contributions."""
    disk_bytes_a_day: float
    """Permanent growth: every 50th version, and the ledger."""
    mbit_in: float
    """Mean, as `mbit_out`."""
    mbit_out: float
    cores: int


def count_shared_elements(recipe: Recipe) -> int:
    """Count the numbers that a swarm of this recipe shares; takes a second or two."""
    import jax

    from tpuswarm.train.program.contract import abstract_state, program_of
    from tpuswarm.train.program.exchanged import exchanged

    program = program_of(recipe, Options())
    state = abstract_state(program, recipe.name)
    return sum(leaf.size for leaf in jax.tree.leaves(exchanged(program, state).get(state)))


def head_memory_bytes(members: int, elements: int, form: Form, rule: Rule, averaged: bool = False) -> float:
    """Return the memory of a head's processes, with the arrays of one commit and incoming payloads."""
    payload = sent_bytes(elements, form)
    copies = 1 + 2 * (rule == "nesterov") + averaged + (form != "plain")  # state; momentum, buffer; mean; error
    update = payload if form != "plain" else 0.0
    processes = serving_bytes(members, aggregators_for(members), payload, payload / fragments_for(elements, members))
    return processes + 8.0 * copies * elements + update + members * payload


def size_head(members: int, exchange: Exchange, member: Traffic, rule: Rule) -> Head:
    """Compute the requirements for members with this traffic."""
    stored = estimate_disk(exchange.elements, exchange.form, rule, members, exchange.averaged)
    versions = DAY_S / exchange.cycle_seconds
    merging_cores = (
        members * exchange.elements / exchange.cycle_seconds / (MERGED_PARAMETERS_PER_S / MEASURED_CORES_COUNT)
    )
    return Head(
        head_memory_bytes(members, exchange.elements, exchange.form, rule, exchange.averaged),
        stored.held,
        versions * (stored.version / LANDMARK_INTERVAL + members * RECORD_BYTES),
        members * member.mbit_up,
        members * sum(member.received.values()) * 8 / DAY_S / 1e6,
        1 + math.ceil(merging_cores),
    )


@dataclass(frozen=True)
class Flow:
    """Mean Gbit/s of a machine."""

    received: float
    sent: float


@dataclass(frozen=True)
class NetworkLoad:
    """Network traffic of a run in a bucket."""

    form: Form
    aggregators: int
    fragments: int
    """Of all aggregators."""
    head: Flow
    """With all aggregators on it."""
    aggregator: Flow
    """Each, on a machine of its own."""
    head_alone: Flow
    """With the aggregators on other machines."""


def network_load(members: int, exchange: Exchange, rule: Rule) -> NetworkLoad:
    """Compute the load of members that push into one commit each cycle.

    An aggregator receives payloads, and sends versions to members, and payloads and versions to the bucket.
    """
    arriving = members * sent_bytes(exchange.elements, exchange.form)
    kept = estimate_disk(exchange.elements, exchange.form, rule, members, exchange.averaged).commit
    gbit = 8 / exchange.cycle_seconds / 1e9
    messages = members * 8 / 1e9
    alone = Flow(messages * SENT_MESSAGES_BYTES_PER_S, messages * RECEIVED_MESSAGES_BYTES_PER_S)
    fragments = fragments_for(exchange.elements, members)
    aggregators = min(fragments, aggregators_for(members))
    received, sent = arriving * gbit, (arriving + kept) * gbit
    return NetworkLoad(
        exchange.form,
        aggregators,
        fragments,
        Flow(received + alone.received, sent + alone.sent),
        Flow(received / aggregators, sent / aggregators),
        alone,
    )


@dataclass(frozen=True)
class HeadMachine:
    """A machine for the head."""

    name: str
    price: Price | None
    own: bool
    """A member's host: free, but lost when its TPU is preempted."""
    network_known: bool = True

    @property
    def dollars(self) -> float | None:
        """Extra cost per hour; None: unknown."""
        return 0.0 if self.own else self.price.on_demand if self.price else None


def head_machines(
    needed: Head, accelerator: Accelerator, exchange: Exchange, place: str, limit: int = 3
) -> list[HeadMachine]:
    """Return a member's host if it has room for the head, then the cheapest machines in a region or zone."""
    found = []
    host, mbit = accelerator.host, PEAK_TO_MEAN_RATIO * max(needed.mbit_in, needed.mbit_out)
    member_bytes = PROCESS_BYTES + HOST_COPIES * 4.0 * exchange.elements
    has_memory = (host.memory_gb or 0.0) * 1e9 >= member_bytes + needed.memory_bytes
    gbps = accelerator.generation.network_gbps
    has_network = gbps is None or gbps * accelerator.chips_per_host * 1000 >= mbit
    if has_memory and has_network and (host.vcpus or 0) > needed.cores:
        found.append(HeadMachine(f"a host of {accelerator.name}", None, own=True, network_known=gbps is not None))
    large = [
        machine
        for machine in machines()
        if machine.memory_gib * GIB >= needed.memory_bytes
        and machine.vcpus >= needed.cores
        and machine.network_gbps * 1000 >= mbit
    ]
    priced = [(price, machine.name) for machine in large if (price := machine.price(place)) and price.on_demand]
    priced.sort(key=lambda item: (item[0].on_demand or 0.0, item[1]))
    return found + [HeadMachine(name, price, own=False) for price, name in priced[:limit]]

"""The head of a swarm: what its coordinator and aggregators need, and the cheapest machines that have it."""

import math
from dataclasses import dataclass

from tpuswarm.catalog import Accelerator, Price, machines
from tpuswarm.config.units import GIB
from tpuswarm.plan.swarm import DAY, Exchanged, Traffic
from tpuswarm.swarm.core.arithmetic.fragments import aggregators_for
from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.ledger_view import LANDMARK_INTERVAL
from tpuswarm.swarm.core.values import Form, Rule
from tpuswarm.swarm.simulation.stand_ins import MERGED_PARAMETERS_PER_S
from tpuswarm.swarm.storage.retention import estimate_disk
from tpuswarm.swarm.supervision.needs import HOST_COPIES, PROCESS_BYTES, serving_bytes
from tpuswarm.train.recipe import Options, Recipe

ROOM = 2.0
"""Times the average traffic that a head's network carries: pushes come in bursts."""
MERGING_CORES = 2
"""Of the machine on which MERGED_PARAMETERS_PER_S was measured."""
RECORD_BYTES = 512.0
"""A contribution takes in the ledger, its header and its line in a record: 410 KB are a record of 980 (`python -m
benchmarks scale`), a header is about 100 bytes more."""


@dataclass(frozen=True)
class Head:
    """What a head needs; all of it is computed."""

    memory_bytes: float
    """Processes, and the arrays of one commit: a head with less reads them from its disk each time."""
    disk_bytes: float
    """Held at any time: the last 20 versions and contributions."""
    disk_bytes_a_day: float
    """What stays for ever of a day: every 50th version, and the ledger."""
    mbit_in: float
    mbit_out: float
    """Megabits a second, on average."""
    cores: int


def elements_of(recipe: Recipe) -> int:
    """The numbers that a swarm shares of a recipe: shapes alone, in a second or two."""
    import jax

    from tpuswarm.train.program.contract import abstract_state, program_of

    program = program_of(recipe, Options())
    state = abstract_state(program, recipe.name)
    return sum(leaf.size for leaf in jax.tree.leaves(program.exchange().get(state)))


def memory_bytes(members: int, elements: int, form: Form, rule: Rule, averaged: bool = False) -> float:
    """What the processes of a head hold, with the arrays of one commit and the payloads on their way to it."""
    sent = elements * bytes_per_element(form)
    rows = 1 + 2 * (rule == "nesterov") + averaged + (form != "plain")  # state; momentum and buffer; mean; unsent
    update = sent if form != "plain" else 0.0
    processes = serving_bytes(members, aggregators_for(members), sent, 0.0)  # its arrays are not looked at here
    return processes + 8.0 * rows * elements + update + members * sent


def head(members: int, exchanged: Exchanged, member: Traffic, rule: Rule) -> Head:
    """For so many members, each with this traffic."""
    kept = estimate_disk(exchanged.elements, exchanged.form, rule, members, exchanged.averaged)
    versions = DAY / exchanged.cycle_seconds
    merging = members * exchanged.elements / exchanged.cycle_seconds / (MERGED_PARAMETERS_PER_S / MERGING_CORES)
    return Head(
        memory_bytes(members, exchanged.elements, exchanged.form, rule, exchanged.averaged),
        kept.held,
        versions * (kept.version / LANDMARK_INTERVAL + members * RECORD_BYTES),
        members * member.mbit_up,
        members * sum(member.received.values()) * 8 / DAY / 1e6,
        1 + math.ceil(merging),
    )


@dataclass(frozen=True)
class Holder:
    """A machine that can be the head."""

    name: str
    price: Price | None
    """Dollars an hour; None: unknown."""
    own: bool
    """It is the host of a member: it costs nothing more, and goes when that member's TPU is preempted."""
    network_known: bool = True
    """Whether a source says that its network carries the traffic."""

    @property
    def dollars(self) -> float | None:
        """An hour, beside what the swarm costs already."""
        return 0.0 if self.own else self.price.on_demand if self.price else None


def holders(needed: Head, accelerator: Accelerator, exchanged: Exchanged, place: str, most: int = 3) -> list[Holder]:
    """The host of a member, where it has room for both; then the cheapest machines at `place` (region or zone)."""
    found = []
    host, mbit = accelerator.host, ROOM * max(needed.mbit_in, needed.mbit_out)
    member = PROCESS_BYTES + HOST_COPIES * 4.0 * exchanged.elements
    room = (host.memory_gb or 0.0) * 1e9 >= member + needed.memory_bytes and (host.vcpus or 0) > needed.cores
    gbps = accelerator.generation.network_gbps
    if room and (gbps is None or gbps * accelerator.chips_per_host * 1000 >= mbit):
        found.append(Holder(f"a host of {accelerator.name}", None, own=True, network_known=gbps is not None))
    large = [
        each
        for each in machines()
        if each.memory_gib * GIB >= needed.memory_bytes
        and each.vcpus >= needed.cores
        and each.network_gbps * 1000 >= mbit
    ]
    priced = [(price.on_demand, each.name, price) for each in large if (price := each.price(place)) and price.on_demand]
    return found + [Holder(name, price, own=False) for _, name, price in sorted(priced)[:most]]

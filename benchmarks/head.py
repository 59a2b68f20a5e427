"""Whether one head carries 200 members of GPT-2 124M that push every 100 steps. About 3 minutes.

What merges take of its processors is measured, of four contributions and of sixteen: what one more costs follows. What
the coordinator takes, and what goes over the network, comes from the simulation, whose steps take a second, as on a
v2-8 in the plan. The head is an n2-highmem-8, as docs/journey.md has it.
"""

import time

from benchmarks import scale
from benchmarks.merge import MEMBERS, SMALL, Case, Run, room_for
from benchmarks.report import Settings, Table, verdict
from tpuswarm.catalog import machines
from tpuswarm.swarm.core.arithmetic.outer import OuterRule

AIM, CYCLE_S, HEAD = 200, 100.0, "n2-highmem-8"
SECONDS = 650
"""Simulated."""
MORE, ROUNDS = 16, 3


def run(settings: Settings) -> Table:
    """Merges, then the simulation."""
    size, members, seconds = (2**20, 20, 350) if settings.quick else (SMALL, AIM, SECONDS)
    few, many = (merging(size, count) for count in (MEMBERS, MORE))
    one_more = (many - few) / (MORE - MEMBERS)
    merges = (few + (members - MEMBERS) * one_more) / CYCLE_S
    found = scale.simulate(members, seconds)
    cores = merges + found.cpu
    gbps = max(found.up, found.down) * members / 1e3
    (machine,) = [each for each in machines() if each.name == HEAD]
    rows = [
        ("merging, cores", f"{merges:.2f}", ""),
        ("the coordinator, without the carrying of messages, cores", f"{found.cpu:.2f}", ""),
        ("together, cores", f"{cores:.2f}", f"{machine.vcpus} vCPUs: {verdict(cores <= machine.vcpus / 2)}"),
        ("network, Gbit/s, the busier way", f"{gbps:.2f}",
         f"{machine.network_gbps:g}: {verdict(gbps <= machine.network_gbps / 2)}"),
    ]  # fmt: skip
    notes = [
        f"a merge of {MEMBERS}: {few:.2f} s of a core; of {MORE}: {many:.2f}; so {one_more:.2f} for one more",
        "int8 up and down, Nesterov; a push of each member every 100 s",
        f"limit: half of what an {HEAD} has, for pushes come in bursts",
    ]
    return Table(f"One head for {members} members of GPT-2 124M", ("", "needs", "has"), rows, notes)


def merging(parameters: int, members: int) -> float:
    """Seconds of a core that a merge of so many contributions takes: the median of some."""
    case = Case(
        f"{members} contributions",
        parameters,
        "int8",
        OuterRule("nesterov", downlink="int8"),
        cold=False,
        members=members,
    )
    with room_for(case) as folder:
        made, took = Run(folder, case), []
        for _ in range(ROUNDS):
            start = time.process_time()
            made.merge()
            took.append(time.process_time() - start)
    return sorted(took)[ROUNDS // 2]

"""Compute whether one head is enough for 200 members of GPT-2 124M that push every 100 steps. About 3 minutes.

Merges of four and of sixteen contributions are measured. The coordinator's processor time and the traffic come from the
simulation with steps of a second. The head is an n2-highmem-8, as in docs/journey.md.
"""

import time

from benchmarks import scale
from benchmarks.merge import CONTRIBUTION_COUNT, SMALL_SIZE, Case, Run, room_for
from benchmarks.report import Settings, Table, verdict
from tpuswarm.catalog import machines
from tpuswarm.swarm.core.arithmetic.outer import OuterRule

MEMBER_COUNT, CYCLE_S, HEAD = 200, 100.0, "n2-highmem-8"
SIMULATED_S = 650
MAX_CONTRIBUTIONS, ROUND_COUNT = 16, 3


def run(settings: Settings) -> Table:
    size, members, seconds = (2**20, 20, 350) if settings.quick else (SMALL_SIZE, MEMBER_COUNT, SIMULATED_S)
    few, many = (merge_cpu_s(size, count) for count in (CONTRIBUTION_COUNT, MAX_CONTRIBUTIONS))
    one_more = (many - few) / (MAX_CONTRIBUTIONS - CONTRIBUTION_COUNT)
    merges = (few + (members - CONTRIBUTION_COUNT) * one_more) / CYCLE_S
    load = scale.simulate(members, seconds)
    cores = merges + load.cpu
    gbps = max(load.up, load.down) * members / 1e3
    (machine,) = [machine for machine in machines() if machine.name == HEAD]
    rows = [
        ("merging, cores", f"{merges:.2f}", ""),
        ("the coordinator, without message transport, cores", f"{load.cpu:.2f}", ""),
        ("together, cores", f"{cores:.2f}", f"{machine.vcpus} vCPUs: {verdict(cores <= machine.vcpus / 2)}"),
        ("network, Gbit/s, the busier way", f"{gbps:.2f}",
         f"{machine.network_gbps:g}: {verdict(gbps <= machine.network_gbps / 2)}"),
    ]  # fmt: skip
    notes = [
        f"CPU-s of {CONTRIBUTION_COUNT}: {few:.2f}, of {MAX_CONTRIBUTIONS}: {many:.2f}; one more: {one_more:.2f}",
        "int8 up and down, Nesterov; each member pushes every 100 s",
        f"limit: half of an {HEAD}, because pushes come in bursts",
    ]
    return Table(f"One head for {members} members of GPT-2 124M", ("", "needs", "has"), rows, notes)


def merge_cpu_s(parameters: int, members: int) -> float:
    """Return the median CPU seconds of a merge of so many contributions."""
    outer = OuterRule("nesterov", downlink="int8")
    case = Case(f"{members} contributions", parameters, "int8", outer, cold=False, members=members)
    with room_for(case) as folder:
        prepared, took = Run(folder, case), []
        for _ in range(ROUND_COUNT):
            start = time.process_time()
            prepared.merge()
            took.append(time.process_time() - start)
    return sorted(took)[ROUND_COUNT // 2]

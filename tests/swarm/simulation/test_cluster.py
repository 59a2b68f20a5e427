"""The simulation of whole clusters, and `tpuswarm simulate`, against figures computed by hand."""

import json
from math import sqrt
from pathlib import Path

import pytest

from tpuswarm.config.toml_file import read_toml
from tpuswarm.swarm.member.loop import HEARTBEAT_INTERVAL_S
from tpuswarm.swarm.simulation.cluster import COPY_BYTES_PER_S, SimulatedSwarm
from tpuswarm.swarm.simulation.result import Result, result
from tpuswarm.swarm.simulation.scenario import Scenario

PARAMETERS = 1_000_000
MODEL = {"parameters": PARAMETERS, "batch": 2, "tokens_per_row": 10}


def group(count: int = 3, step_s: float = 1.0, mbit: float = 100, **more) -> dict:
    return {"count": count, "step_s": step_s, "mbit_up": mbit, "mbit_down": mbit, **more}


def scenario(*groups: dict, cycle: int = 20, **more) -> Scenario:
    exchange = {"cycle": cycle, "quantize": "int8", **more.pop("exchange", {})}
    return Scenario.model_validate({"model": more.pop("model", MODEL), "exchange": exchange, "members": groups, **more})


def simulated(wanted: Scenario) -> tuple[SimulatedSwarm, Result]:
    cluster = SimulatedSwarm(wanted)
    cluster.simulate()
    return cluster, result(cluster)


@pytest.mark.parametrize(
    ("seed", "members", "step_s", "mbit", "cycle", "overlap"), [(0, 5, 1.8, 20, 12, 0), (1, 3, 1.2, 1000, 24, "auto")]
)
def test_preemption_costs_half_a_cycle_and_a_push_on_average(seed, members, step_s, mbit, cycle, overlap):
    """Invariant 15. Each kill loses anything from nothing to a cycle and a push."""
    machines = group(members, step_s, mbit, preempted_every_hours=0.04, back_after_minutes=0.5)
    tokens = int(members * 1200 / step_s) * 20
    cluster, found = simulated(scenario(machines, cycle=cycle, tokens=tokens, seed=seed, exchange={"overlap": overlap}))
    assert found.finished and found.tokens.outstanding == 0 and found.tokens.dropped == 0
    copies = 4 * PARAMETERS / COPY_BYTES_PER_S + PARAMETERS * (8 + 1 / 8) / 1e6 / mbit
    push = HEARTBEAT_INTERVAL_S + copies + 0.1  # until it is noticed, encoded and sent; latencies
    alive_s = sum(machine.seconds["alive"] for machine in cluster.machines)
    limit = found.preemptions * (cycle * step_s + push) / (2 * alive_s)
    chance = 3 / sqrt(3 * found.preemptions)  # three standard errors of a mean of uniform losses
    assert found.preemptions > 20
    assert 1 - found.tokens.applied / found.tokens.processed <= limit * (1 + chance)


@pytest.mark.parametrize("quantize, bits", [("int8", 8 + 1 / 8), ("int4", 4 + 1 / 8), (None, 32)])
def test_traffic_is_pushes_and_versions(quantize, bits):
    """A scale of 32 bits is added to every 256 codes, the last padded. Each member may have one push under way."""
    exchange = {"quantize": quantize, "fragments": 5}
    sent = PARAMETERS if quantize is None else 256 * -(-PARAMETERS // 256)
    cluster, found = simulated(scenario(group(3, mbit=1000), hours=0.1, exchange=exchange))
    counted = sum(len(record.decisions) for record in cluster.records.values())
    pushes = sum(machine.up.bytes for machine in cluster.machines) / (sent * bits / 8)
    assert pushes == pytest.approx(round(pushes)) and counted <= round(pushes) <= counted + 3
    assert found.shard.down_bytes == pytest.approx(found.members.link.up_bytes * 3)
    assert found.shard.up_bytes == pytest.approx(found.members.link.down_bytes * 3)


def test_more_members_add_no_traffic_for_each_member_and_shard():
    few, many = (
        simulated(scenario(group(count), hours=0.02, cycle=5, exchange={"fragments": 3}))[1] for count in (16, 48)
    )
    assert (few.shards, many.shards) == (1, 3)
    for name in ("up_bytes", "down_bytes"):
        assert getattr(many.members.link, name) == pytest.approx(getattr(few.members.link, name), rel=0.2)
        assert getattr(many.shard, name) == pytest.approx(getattr(few.shard, name), rel=0.2)
    assert many.tokens_per_s == pytest.approx(3 * few.tokens_per_s, rel=0.2)


def test_slow_members_do_their_share():
    _, found = simulated(scenario(group(2, 1.0), group(2, 3.0, name="slow"), cycle=15, hours=0.3))
    fast, slow = found.groups
    assert slow.name == "slow" and slow.applied == pytest.approx(0.25, abs=0.02)
    assert found.contributors.mean > 3 and fast.stall < 0.05 and slow.stall < 0.05


class CutSwarm(SimulatedSwarm):
    """Connections of members that dial in stand still for half a minute in every hour."""

    def travel_seconds(self, node, call, back):
        seconds, into = super().travel_seconds(node, call, back), (self.now - 1200) % 3600
        return seconds + 30 - into if node.startswith("p") and into < 30 else seconds


@pytest.mark.parametrize(
    ("mbit", "step_s", "own"),
    [(20, 1.0, 3), (11.4, 2.0, 3), (20, 0.33, 0)],
    ids=["20 Mbit/s", "1% loss: 8 connections of 1.4 Mbit/s", "without members beside it"],
)
def test_members_at_home_lose_less_than_a_twentieth_to_their_network(mbit, step_s, own):
    """GPT-2 with 124 M parameters in int8, a push every 100 steps; 100 ms, and a cut of 30 s in every hour."""
    home = group(1 if own else 3, step_s, mbit, latency_ms=100, dials_in=True)
    near = [group(own, step_s, 1000)] if own else []
    model = {"parameters": 124_000_000, "batch": 16, "tokens_per_row": 1024}
    swarm = CutSwarm(scenario(home, *near, cycle=100, hours=2, model=model))
    swarm.simulate()
    found = result(swarm)
    assert found.groups[0].stall < 0.05 and not found.refusals
    assert found.tokens.dropped == found.tokens.lost == 0


@pytest.mark.parametrize(("guests", "step_s"), [(1, 1.0), (3, 0.5)])
def test_slow_links_of_guests_do_not_slow_the_swarms_own_members(guests, step_s):
    """A push of a guest takes twice as long as a cycle of the others, or four times; a round waits for some of them."""
    home = group(guests, step_s, 5, latency_ms=100, dials_in=True)
    model = {"parameters": 124_000_000, "batch": 16, "tokens_per_row": 1024}
    _, found = simulated(scenario(home, group(1, step_s, 1000), cycle=100, hours=2, model=model))
    assert found.groups[1].stall < 0.15


def test_seed_decides_the_simulation():
    wanted = scenario(group(3, preempted_every_hours=0.05), hours=0.1, seed=1)
    assert simulated(wanted)[1] == simulated(wanted)[1] != simulated(wanted.model_copy(update={"seed": 2}))[1]


def test_member_sends_one_stream_of_heartbeats():
    """One every two seconds while it trains, and a few more a cycle until its verdict; two streams would be twice."""
    cluster, found = simulated(scenario(group(1, mbit=10_000), cycle=100, hours=0.5))
    expected, cycles = found.seconds / HEARTBEAT_INTERVAL_S, found.seconds / 100
    assert expected * 0.9 <= cluster.coordinator.count["beat"] <= expected * 1.1 + 20 * cycles


FILE = """
tokens = 12_000
[model]
parameters = "1M"
batch = 2
tokens_per_row = 10
[exchange]
cycle = 10
[[members]]
count = 2
step_s = 1.0
mbit_up = 100
mbit_down = 100
[[members]]
name = "slow"
count = 1
tokens_per_s = 10
mbit_up = 100
mbit_down = 100
"""


@pytest.fixture
def simulate(typed, tmp_path):
    """Run `tpuswarm simulate` on a file with this text; return (code, out, err)."""

    def run(text: str, *options: str):
        path = tmp_path / "fleet.toml"
        path.write_text(text)
        return typed("simulate", str(path), *options)

    return run


def test_command_prints_tables_or_json(simulate):
    code, out, err = simulate(FILE)
    assert code == 0 and "goodput" in out and "slow" in out and "% simulated" in err
    assert "members  tokens/s  trains  stall  gone" in out and "…" not in out
    code, out, _ = simulate(FILE, "--json")
    found = json.loads(out)
    assert code == 0 and found["finished"] and found["tokens"]["applied"] >= 12_000
    assert [members["count"] for members in found["groups"]] == [2, 1]


def test_swarm_that_never_finishes_is_a_failed_run(simulate):
    gone = "preempted_every_hours = 0.002\nback_after_minutes = 1\n"
    text = FILE.replace("tokens = 12_000", "tokens = 2_000").replace("cycle = 10", "cycle = 400") + gone
    code, out, err = simulate(text.replace("step_s = 1.0", f"step_s = 1.0\n{gone}"))
    assert code == 1 and "goodput" in out
    assert err.splitlines()[-1].startswith("error: only 0 of 2,000 tokens were applied in ")


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("step_s", "step_sec", "line 11: members 1 has no key step_sec; did you mean step_s?"),
        ("step_s = 1.0", "", "line 9: members 1: give either tokens_per_s or step_s"),
        ("count = 2", "count = 20_000", "20,001 members are too many: at most 10,000 can be simulated"),
        ('"1M"', '"many"', "line 4: model.parameters: a count is a number such as 500, 20K or 10M, not 'many'"),
        ("tokens = 12_000", "tokens = 12_000\nhours = 1", "give either hours or tokens"),
        ("cycle = 10", "cycle = 10\nfragments = 2_000_000", "cannot be split into 2000000 fragments"),
        ("cycle = 10", 'overlap = "1"', "line 8: exchange.overlap: must be 'auto' or '0', not '1'"),
        (FILE[FILE.index("[[members]]") :], "", "the file needs members"),
    ],
)
def test_wrong_file_is_reported_in_one_line(simulate, old, new, words):
    code, out, err = simulate(FILE.replace(old, new, 1))
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert words in err and "fleet.toml" in err


def test_example_is_a_scenario():
    found = read_toml(Path(__file__).parents[3] / "examples" / "simulate.toml", Scenario)
    assert found.count == sum(members.count for members in found.members) and found.hours

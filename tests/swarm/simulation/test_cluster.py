"""The simulation of whole clusters, and the command: what it says of a fleet against what can be counted by hand."""

import json
import random
import sys
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.world import World
from tpuswarm.cli import main
from tpuswarm.config.toml_file import read_toml
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.engines.inproc import Faults
from tpuswarm.swarm.member.cycle import BEAT
from tpuswarm.swarm.simulation.cluster import COPY, SimulatedSwarm
from tpuswarm.swarm.simulation.result import Result, result
from tpuswarm.swarm.simulation.scenario import Scenario

PARAMETERS = 1_000_000
MODEL = {"parameters": PARAMETERS, "batch": 2, "tokens_per_row": 10}


def group(count: int = 3, step_s: float = 1.0, mbit: float = 100, **more) -> dict:
    return {"count": count, "step_s": step_s, "mbit_up": mbit, "mbit_down": mbit, **more}


def scenario(*groups: dict, cycle: int = 20, **more) -> Scenario:
    exchange = {"cycle": cycle, "quantize": "int8", **more.pop("exchange", {})}
    return Scenario.model_validate({"model": MODEL, "exchange": exchange, "members": groups, **more})


def simulated(asked: Scenario) -> tuple[SimulatedSwarm, Result]:
    cluster = SimulatedSwarm(asked)
    cluster.simulate()
    return cluster, result(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_what_preemptions_cost_is_half_a_cycle_and_a_push_each(seed):
    """Invariant 15. It bounds a mean: the loss of each kill lies anywhere from nothing to a cycle and a push."""
    rnd = random.Random(seed)
    members, step, mbit, cycle = rnd.randint(2, 5), rnd.uniform(0.8, 2), rnd.choice([20, 1000]), rnd.randint(5, 30)
    asked = scenario(
        group(members, step, mbit, preempted_every_hours=rnd.uniform(0.03, 0.06), back_after_minutes=0.5),
        cycle=cycle,
        tokens=int(members * 1500 / step) * 20,
        seed=seed,
        exchange={"overlap": rnd.choice(["auto", 0])},
    )
    cluster, found = simulated(asked)
    assert found.finished and found.tokens.outstanding == 0 and found.tokens.dropped == 0
    copies = 4 * PARAMETERS / COPY + PARAMETERS * (8 + 1 / 8) / 1e6 / mbit
    push = BEAT + copies + 0.1  # until it is noticed, encoded and sent; latencies
    there = sum(machine.seconds["alive"] for machine in cluster.machines)
    most = found.preemptions * (cycle * step + push) / (2 * there)
    chance = 3 / sqrt(3 * found.preemptions)  # three standard errors of a mean of uniform losses
    assert found.preemptions > 20
    assert 1 - found.tokens.applied / found.tokens.processed <= most * (1 + chance)


def test_preemptions_cost_and_longer_cycles_cost_more():
    calm, short, long = (
        simulated(scenario(group(4, **failing), cycle=cycle, tokens=4 * 600 * 20))[1]
        for cycle, failing in ((10, {}), (10, {"preempted_every_hours": 0.05}), (60, {"preempted_every_hours": 0.05}))
    )
    assert calm.tokens.lost == 0 and calm.goodput == 1.0 and calm.preemptions == 0
    assert calm.goodput > short.goodput > long.goodput
    assert calm.share > short.share and short.members.gone > 0.1


@pytest.mark.parametrize("quantize, bits", [("int8", 8 + 1 / 8), ("int4", 4 + 1 / 8), (None, 32)])
def test_traffic_is_pushes_and_versions(quantize, bits):
    """A scale of 32 bits stands for 256 codes; a member sends what was counted of it and what is under way."""
    cluster, found = simulated(
        scenario(group(3, mbit=1000), hours=0.2, exchange={"quantize": quantize, "fragments": 5})
    )
    counted = sum(len(record.decisions) for record in cluster.records.values())
    pushes = sum(machine.up.bytes for machine in cluster.machines) / (PARAMETERS * bits / 8)
    assert pushes == pytest.approx(round(pushes)) and counted <= round(pushes) <= counted + 3
    assert found.shard.down_bytes == pytest.approx(found.members.link.up_bytes * 3)
    assert found.shard.up_bytes == pytest.approx(found.members.link.down_bytes * 3)


def test_more_members_are_no_more_traffic_for_each_and_for_each_shard():
    few, many = (
        simulated(scenario(group(count), hours=0.04, cycle=10, exchange={"fragments": 3}))[1] for count in (16, 48)
    )
    assert (few.shards, many.shards) == (1, 3)
    for name in ("up_bytes", "down_bytes"):
        assert getattr(many.members.link, name) == pytest.approx(getattr(few.members.link, name), rel=0.2)
        assert getattr(many.shard, name) == pytest.approx(getattr(few.shard, name), rel=0.2)
    assert many.tokens_per_s == pytest.approx(3 * few.tokens_per_s, rel=0.2)


def test_slow_members_do_their_part():
    """Cycles in proportion to speed: a member at a third of the speed gives a quarter of the tokens of both."""
    _, found = simulated(scenario(group(2, 1.0), group(2, 3.0, name="slow"), cycle=15, hours=0.5))
    fast, slow = found.groups
    assert slow.name == "slow" and slow.applied == pytest.approx(0.25, abs=0.02)
    assert found.contributors.mean > 3 and fast.stall < 0.05 and slow.stall < 0.05


class Counting(World):
    """Looks at every effect whether the rows that a coordinator keeps as taken are those that somebody has."""

    def check(self):
        super().check()
        for coordinator in self.coordinators.values():
            state = coordinator.state
            headers = [*(header for header, _ in state.pending.values()), *state.storing.values()]
            held = Rows.union([*(lease.rows for lease in state.leases.values()), *(each.rows for each in headers)])
            assert state.taken == held | state.view.spent
            assert state.room == self.horizon - len(state.view.counted) - len(held - state.view.spent)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**9), cycle=st.integers(1, 4), race_at=st.none() | st.floats(1, 30))
def test_the_rows_that_a_coordinator_keeps_as_taken_are_those_that_somebody_has(seed, cycle, race_at):
    faults = Faults(lost=0.1, twice=0.2)
    Counting(seed, cycle=cycle, faults=faults, random_kills=6, lost_payloads=2, race_at=race_at, poison={3}).run()


def test_a_seed_is_a_simulation():
    asked = scenario(group(3, preempted_every_hours=0.05), hours=0.2, seed=1)
    assert simulated(asked)[1] == simulated(asked)[1] != simulated(asked.model_copy(update={"seed": 2}))[1]


# The command.

FILE = """
tokens = 30_000
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
    """`tpuswarm simulate` of a file with this text; (code, out, err)."""

    def run(text: str, *options: str):
        path = tmp_path / "fleet.toml"
        path.write_text(text)
        return typed("simulate", str(path), *options)

    return run


def test_the_command_says_how_it_went(simulate):
    code, out, err = simulate(FILE)
    assert code == 0 and "goodput" in out and "slow" in out and "90% simulated" in err
    assert "members  tokens/s  trains  stall  gone" in out and "…" not in out
    code, out, _ = simulate(FILE, "--json")
    found = json.loads(out)
    assert code == 0 and found["finished"] and found["tokens"]["applied"] >= 30_000
    assert [each["count"] for each in found["groups"]] == [2, 1]


def test_members_that_get_nothing_through_are_a_failed_run(simulate):
    gone = "preempted_every_hours = 0.002\nback_after_minutes = 1\n"
    text = FILE.replace("tokens = 30_000", "tokens = 2_000").replace("cycle = 10", "cycle = 400") + gone
    code, out, err = simulate(text.replace("step_s = 1.0", f"step_s = 1.0\n{gone}"))
    assert code == 1 and "goodput" in out
    assert err.splitlines()[-1].startswith("error: 0 of 2,000 tokens were applied in ")


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("step_s", "step_sec", "line 11: members 1 has no key step_sec; did you mean step_s?"),
        ("tokens = 30_000", "token = 30_000", "line 2: the file has no key token; did you mean tokens?"),
        ("[exchange]", "[exchanges]", "line 7: the file has no key exchanges; did you mean exchange?"),
        ("count = 2", "count = 0", "line 10: members 1.count: must be greater than 0, not 0"),
        ("mbit_up = 100", "mbit_up = -1", "line 12: members 1.mbit_up: must be greater than 0, not -1"),
        ("step_s = 1.0", "step_s = nan", "line 11: members 1.step_s: must be a finite number, not nan"),
        ("step_s = 1.0", "", "line 9: members 1: give either tokens_per_s or step_s"),
        ("count = 2", "count = 20_000", "20,001 members are too many: at most 10,000 can be simulated"),
        ('"1M"', '"many"', "line 4: model.parameters: a count is a number such as 500, 20K or 10M, not 'many'"),
        ("batch = 2\n", "", "line 3: model needs batch"),
        ("tokens = 30_000", "tokens = 30_000\nhours = 1", "give either hours or tokens"),
        ("cycle = 10", "cycle = 10\nfragments = 2_000_000", "cannot be split into 2000000 fragments"),
        ("cycle = 10", 'overlap = "1"', "line 8: exchange.overlap: must be 'auto' or '0', not '1'"),
        ("tokens = 30_000", "tokens =", "is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_one_sentence(simulate, old, new, said):
    code, out, err = simulate(FILE.replace(old, new, 1))
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert said in err and "fleet.toml" in err


def test_without_members_or_a_file_there_is_nothing_to_simulate(simulate, monkeypatch, capsys):
    code, _, err = simulate(FILE.split("[[members]]")[0])
    assert code == 2 and "the file needs members" in err
    monkeypatch.setattr(sys, "argv", ["tpuswarm", "simulate", "nowhere.toml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and capsys.readouterr().err == "error: there is no file nowhere.toml\n"


def test_the_example_is_a_scenario():
    found = read_toml(Path(__file__).parents[3] / "examples" / "simulate.toml", Scenario)
    assert found.count == sum(group.count for group in found.members) and found.hours


def test_a_member_has_one_stream_of_heartbeats():
    """One every two seconds while it trains, and a few more a cycle until its verdict; two streams would be twice."""
    cluster, found = simulated(scenario(group(1, mbit=10_000), cycle=100, hours=0.5))
    cycles = found.seconds / 100
    assert found.seconds / BEAT * 0.9 <= cluster.coordinator.count["beat"] <= found.seconds / BEAT * 1.1 + 20 * cycles

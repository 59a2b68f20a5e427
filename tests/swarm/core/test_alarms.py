"""Alarms: each with the fault planted, and silent without it."""

from random import Random

import pytest

from tests.swarm.world import World
from tpuswarm.swarm.core.alarms import ALONE, ENOUGH, JUMP, QUIET, REMEMBERED, Step, Watched, alarms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Identity, Incarnation, Record

NOW = 1e9


def steady(member, loss=2.0, norm=1.0, steps=ENOUGH, version=0):
    """A member whose steps are all alike."""
    return Watched(member, [Step(version, loss, norm)] * steps)


ALIVE = [steady(name) for name in ("a", "b", "c")]


def records(contributors, trained):
    """Versions 1, 2, … by who is counted in them, and whose work was reported before them."""
    made = []
    for number, (names, reports) in enumerate(zip(contributors, trained, strict=True), 1):
        decisions = tuple(
            Decision(Identity(Incarnation(name, "1"), number), "applied", "", Rows(((number, number + 1),)), 0, 1)
            for name in names
        )
        processed = tuple((Incarnation(*each.split("-")), number) for each in reports)
        made.append(
            Record(
                run="run", version=number, epoch=1, parent="", state=(), outer=(), decisions=decisions, rule="average",
                rate=1.0, momentum=0.0, share=1.0, gathered=0.0, tokens=number, changes=number, processed=processed,
                digests=Digests("", "", "", ""), time=NOW - 100 + number,
            )
        )  # fmt: skip
    return made


def found(recent=(), members=(), cycle=None, quiet=0.0, now=NOW):
    return alarms(recent, members, cycle, quiet, now)


BOTH = [["a-1", "b-1"]] * ALONE


def test_one_contributor_while_another_trains():
    [sentence] = found(records(["a"] * ALONE, BOTH), ALIVE[:2])
    assert f"at least {ALONE} commits in a row had one contributor (a) while a, b were training" in sentence
    assert "no push of b counted" in sentence


def test_members_that_take_turns():
    [sentence] = found(records("ababa", BOTH), ALIVE[:2])
    assert "(a, b) while a, b were training: they never push in time to be merged together" in sentence


@pytest.mark.parametrize(
    ("what", "contributors", "trained", "alive"),
    [
        ("too few commits", ["a"] * (ALONE - 1), BOTH[1:], ALIVE[:2]),
        ("two in the last", [*["a"] * ALONE, "ab"], [*BOTH, ["a-1", "b-1"]], ALIVE[:2]),
        ("the other is dead", ["a"] * ALONE, BOTH, ALIVE[:1]),
        ("the other died and came back", ["a"] * 6, [["a-1", "b-1"], *[["a-1"]] * 4, ["a-1", "b-2"]], ALIVE[:2]),
        ("the other has just joined", ["a"] * 6, [*[["a-1"]] * 4, ["a-1", "b-1"], ["a-1", "b-1"]], ALIVE[:2]),
        ("only verdicts between", ["ab", "", "", "", "", ""], [["a-1", "b-1"]] * 6, ALIVE[:2]),
    ],
)
def test_one_contributor_for_a_reason(what, contributors, trained, alive):
    assert found(records(contributors, trained), alive) == []


def test_a_swarm_without_faults_gives_none():
    world = World(seed=1)
    world.run()
    records = world.ledger.records
    members = [steady(f"m{number}") for number in range(3)]
    for end in range(len(records)):
        assert alarms(records[max(0, end - 20) : end + 1], members, 3.0, 0.0, world.engine.now) == []


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_a_member_far_from_the_others(name):
    values = {"a": 2.0, "b": 2.1, "c": 1.9, "d": 3.5}
    members = [steady(m, v) if name == "loss" else steady(m, norm=v) for m, v in values.items()]
    assert found(members=members) == [f"d has a {name} of 3.5, the others about 2.05: check its machine and its data"]
    assert found(members=members[:3]) == []
    assert found(members=[members[0], members[3]]) == []  # of two nobody knows which


def test_members_close_together_are_not_far():
    """Three gradient norms of which two are nearly equal: the deviations are tiny, the third is no fault."""
    assert found(members=[steady("a", norm=0.54), steady("b", norm=0.5421), steady("c", norm=0.4748)]) == []


def test_a_member_without_finite_losses_is_told_once():
    [sentence] = found(members=[*ALIVE, steady("d", None, None)])
    assert sentence.startswith("d has a loss of inf, the others about 2:")


def test_a_member_is_compared_by_its_last_steps_and_not_by_one():
    young = Watched("d", [Step(0, 9.0, 9.0)] * (ENOUGH - 1))
    once_far = Watched("d", [Step(0, 9.0, 9.0)] * 50 + [Step(0, 2.0, 1.0)] * (ENOUGH - 1) + [Step(0, 2.0, 40.0)])
    assert found(members=[*ALIVE, young]) == [] and found(members=[*ALIVE, once_far]) == []


def warming_up(steps, version_after, random):
    """The newest steps of a healthy member: the model changes fast at first, the gradient norm by a factor of four."""
    made = [
        Step(
            number // version_after,
            (2.4 + 2.6 * 0.97**number) * random.lognormvariate(0, 0.05),
            (0.7 + 3.3 * 0.95**number) * random.lognormvariate(0, 0.2),
        )
        for number in range(steps)
    ]
    return made[-REMEMBERED:]


@pytest.mark.parametrize("late", [10, 40, 100])
def test_a_swarm_of_six_warms_up_and_one_of_them_started_late(late):
    """All start from the same parameters; who comes late is where the others were."""
    for seed in range(3):
        random = Random(seed)
        for step in range(ENOUGH, 300, 7):
            members = [Watched(f"m{number}", warming_up(step + late, 10**6, random)) for number in range(5)]
            assert found(members=[*members, Watched("m5", warming_up(step, 10**6, random))]) == [], (seed, step)


def test_who_is_where_the_others_were_before_its_own_version_is_far():
    random = Random(1)
    members = [Watched(f"m{number}", warming_up(300, 50, random)) for number in range(5)]
    stuck = Watched("m5", [step._replace(version=5) for step in warming_up(30, 50, random)])
    [sentence] = found(members=[*members, stuck])
    assert sentence.startswith("m5 has a")


def noisy(seed, steps=200, planted=False):
    """All alarms of a run whose members differ by chance only: steps that vary by a fifth, rounds that one may miss.

    planted: the last member learns nothing, from the first step on.
    """
    random = Random(seed)
    names = [f"m{number}" for number in range(random.randint(2, 6))]
    taken = {name: [] for name in names}
    contributors = [[name for name in names if random.random() < 0.9] for _ in range(steps // 10)]
    recent = records(contributors, [[f"{name}-1" for name in names]] * len(contributors))
    said = set()
    for step in range(1, steps + 1):
        for name, own in taken.items():
            loss = 4.0 if planted and name == names[-1] else 1.5 + 2.5 * 0.98**step
            own.append(Step((step - 1) // 10, loss * random.lognormvariate(0, 0.05), random.lognormvariate(0, 0.2)))
        if step % 10 == 0:
            members = [Watched(name, own[-REMEMBERED:]) for name, own in taken.items()]
            now = recent[step // 10 - 1].time
            said.update(
                found(recent[max(0, step // 10 - 20) : step // 10], members, 10.0, random.expovariate(0.1), now)
            )
    return {sentence.split(":")[0].rpartition(" of ")[0] for sentence in said}


def test_ordinary_noise_gives_none_and_a_member_that_learns_nothing_is_found():
    """A real run of three had standard deviations of 2% in the loss and 7 to 13% in the norm."""
    for seed in range(200):
        assert noisy(seed) == set(), seed
    for seed in range(20):
        count = Random(seed).randint(2, 6)
        expected = {f"m{count - 1} has a loss"} if count > 2 else set()  # of two nobody knows which
        assert noisy(seed, planted=True) == expected, seed


def test_no_commit_for_a_long_time():
    assert found(quiet=QUIET) == [] and found(quiet=4.9 * 600, cycle=600.0) == []
    assert "no commit for 121 s (limit 120 s)" in found(quiet=QUIET + 1)[0]
    assert "no commit for 3100 s (limit 3000 s)" in found(quiet=3100.0, cycle=600.0)[0]


def test_a_clock_that_jumped():
    made = records("ab", BOTH[:2])
    assert found(made) == [] and found(made, now=made[-1].time - JUMP + 1) == []
    assert found(made, now=made[-1].time - JUMP - 1)[0].startswith("the clock jumped back by 3601 s")
    assert found(made[::-1]) == []  # a second is nothing
    assert found([made[1], records("a", BOTH[:1])[0], made[0]], now=NOW) == []

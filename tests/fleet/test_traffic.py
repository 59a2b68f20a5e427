"""A fleet's daily traffic, its cost, and the budget that stops creation."""

import shlex
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.loop import EUROPE, A, ManagedFleet, desired, pool, started, vm
from tpuswarm.config.train_table import Train
from tpuswarm.fleet.decide.desired import Budget
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.decide.traffic import Traffic, add_traffic, price_per_gib
from tpuswarm.fleet.training import HEAD, find_run_url, head_command
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.views.status import FILE, MemberStatus, SwarmStatus, write_status

GIB, HOUR = 2**30, 3600.0
URL = "gs://state/runs/gpt2"


@given(
    st.lists(
        st.tuples(
            st.floats(1, 40 * HOUR),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 50)),
            st.sampled_from(["continue", "continue", "continue", "restart", "new run", "first run"]),
        ),
        max_size=30,
    )
)
def test_each_byte_is_charged_once_and_for_one_day(steps):
    """Members come and go; runs restart in place, or are left for another run and resumed.

    Bytes from before a run was first seen, or while another run was watched, are not charged. Bytes of a long gap
    are spread over its hours.
    """
    traffic, now, run, last_url = Traffic(), 1e9, 0, ""
    carried: dict[int, Counter[str]] = {0: Counter()}
    charges: list[tuple[float, float, float]] = []
    for seconds, growth, event in steps:
        since, now = now, now + seconds
        if event == "restart":
            carried[run] = Counter(dict.fromkeys(carried[run], 0))
        elif event == "new run":
            run = len(carried)
            carried[run] = Counter()
        elif event == "first run":
            run = 0
        url = f"gs://state/{run}"
        old = traffic.carried if url == last_url else {}
        carried[run].update(growth)
        counters = {member: gib * GIB for member, gib in carried[run].items()}
        traffic = add_traffic(traffic, url, counters, {}, A, now)
        if url == last_url:
            new = sum(total - old.get(member, 0) if total >= old.get(member, 0) else total
                      for member, total in counters.items())  # fmt: skip
            assert event == "restart" or new == sum(growth.values()) * GIB
            charges.append((since, now, 0.06 * new / GIB))
        last_url = url

        def charged_within(hours: float, now: float = now) -> float:
            start = now - hours * HOUR
            return sum(cost * max(0.0, end - max(since, start)) / (end - since) for since, end, cost in charges)

        assert charged_within(24) - 1e-6 <= traffic.last_day(now) <= charged_within(25) + 1e-6
        if traffic.last_day(now) > 1:
            then = traffic.drops_below_at(1.0, now)
            assert traffic.last_day(then) < 1 <= traffic.last_day(then - 1)
    assert traffic.drops_below_at(1.0, now + 100 * HOUR) == now + 100 * HOUR, "after a day nothing counts"


def test_lost_member_is_charged_at_its_last_zone():
    first = add_traffic(Traffic(), URL, {"a": 0, "b": 0}, {"a": A, "b": EUROPE}, A, 0.0)
    second = add_traffic(first, URL, {"a": 100 * GIB, "b": 100 * GIB}, {}, A, 60.0)
    assert second.last_day(60.0) == pytest.approx(8.0)
    third = add_traffic(second, URL, {"c": 100 * GIB}, {}, A, 120.0)
    assert third.last_day(120.0) == pytest.approx(14.0), "a member that was never on a machine of the fleet is outside"


@pytest.mark.parametrize(
    ("member", "dollars"),
    [
        (A, 0.0),
        ("us-central1-b", 0.01),
        ("us-east1-c", 0.02),
        (EUROPE, 0.08),
        (None, 0.06),  # outgoing costs 0.12, incoming nothing
    ],
)
def test_price_of_a_gib_depends_on_the_distance(member, dollars):
    assert price_per_gib(member, A) == pytest.approx(dollars)


def test_daily_traffic_budget_stops_creation_until_the_day_is_over(cloud):
    loop = started(cloud, pool(count=2), vm("head"), budget=Budget(traffic_per_day=5.0), seconds=300)
    assert len(cloud.names("ready")) == 3
    loop.traffic = Traffic(hours={int(cloud.now // HOUR): 5.5})
    cloud.preempt((A, "v2-usc1f-0"))
    cloud.preempt((A, "gpt2-head"))
    loop.run(1200)
    assert cloud.names("ready") == ["gpt2-head", "v2-usc1f-1"], "a head alone has no traffic"
    (wait,) = loop.waits
    assert wait.why == f"{A}: traffic has cost $5.50 in the last 24 hours, and the budget has $5.00 a day"
    assert wait.until == (int(cloud.now // HOUR) + 25) * HOUR
    cloud.advance(wait.until - cloud.now)
    loop.run(300)
    assert len(cloud.names("ready")) == 3


def test_keepers_charge_the_runs_traffic_once(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool("far", 1, (EUROPE,)), vm("head"), budget=Budget(traffic_per_day=5.0)))
    cloud, keeper = fleet.cloud, fleet.keeper("first")
    fleet.run(keeper, 300)
    (member,) = (name for name in fleet.ready if name != "gpt2-head")
    line = head_command(Train(recipe="gpt2-tiny"), URL, 1)
    job = Job(HEAD, HEAD, line, "always", (Assignment(HEAD, "gpt2-head", phase="running"),))
    assert find_run_url([replace(job, name="other"), job]) == URL and shlex.split(line)
    fleet.change_document(jobs=(job,))

    def report(gib: int) -> None:
        members = (MemberStatus(f"j-{member}", "alive", 1, None, 1, 1, 1.0, 1.0, 1.0, 0, gib * GIB),)
        write_status(tmp_path, SwarmStatus(
            0.0, 0.0, 1, 1, "", 1, Tokens(0, 0, 0, 0, 0), 1.0, 1.0, 0, None, None, None, None, members, (), "", {}
        ))  # fmt: skip
        bucket, path = cloud.bucket("state"), f"runs/gpt2/files/{FILE}"
        stored = bucket.read(path)
        bucket.write(path, (tmp_path / FILE).read_bytes(), stored.generation if stored else 0)

    for gib in (0, 50):
        report(gib)
        fleet.run(keeper, 120)
    keeper = fleet.keeper("second")
    report(75)
    fleet.run(keeper, 120)
    assert fleet.document.traffic.last_day(cloud.now) == pytest.approx(75 * 0.08)
    cloud.preempt((EUROPE, member))
    assert fleet.run(keeper, 300).plan.waits[0].why.startswith(f"{EUROPE}: traffic has cost $6.00")
    fleet.change(budget=Budget(traffic_per_day=7.0))
    fleet.run(keeper, 600)
    assert member in fleet.ready

"""What a fleet's training has carried in a day, what that costs, and that a budget ends creation."""

import shlex
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.cloud_model import Cloud
from tests.fleet.keepers import ask, begin, keeper, ready, run, store
from tests.fleet.loop import Loop, desired, names, pool, vm
from tpuswarm.config.train import Train
from tpuswarm.fleet.core.desired import Budget
from tpuswarm.fleet.core.jobs import Job, Seat
from tpuswarm.fleet.core.traffic import Traffic, count, gib_price
from tpuswarm.fleet.training import HEAD, head_line, run_in
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.views.status import FILE, MemberStatus, SwarmStatus, write_status

A, EUROPE = "us-central1-f", "europe-west4-a"
GIB, HOUR = 2**30, 3600.0
URL = "gs://state/runs/gpt2"


@given(
    st.lists(
        st.tuples(
            st.floats(1, 40 * HOUR),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 50)),
            st.sampled_from(["go on", "go on", "go on", "anew", "another", "back"]),
        ),
        max_size=30,
    )
)
def test_every_byte_is_paid_once_and_for_a_day(looks):
    """Whatever grows, members come and go, runs are begun anew in their place or left for another and gone back to.

    What was carried before a run's first look, or while another one was looked at, is nobody's; what was carried in a
    long time without a look is of all its hours.
    """
    traffic, now, run_, seen = Traffic(), 1e9, 0, ""
    carried: dict[int, Counter[str]] = {0: Counter()}
    paid: list[tuple[float, float, float]] = []
    for seconds, grown, what in looks:
        since, now = now, now + seconds
        if what == "anew":  # with the same members, as the file says
            carried[run_] = Counter(dict.fromkeys(carried[run_], 0))
        elif what == "another":
            run_ = len(carried)
            carried[run_] = Counter()
        elif what == "back":
            run_ = 0
        old = traffic.carried if f"gs://state/{run_}" == seen else {}
        for member, count_ in grown.items():
            carried[run_][member] += count_
        url, shown = f"gs://state/{run_}", {member: found * GIB for member, found in carried[run_].items()}
        traffic = count(traffic, url, shown, {}, A, now)
        if url == seen:
            new = sum(found - old.get(member, 0) if found >= old.get(member, 0) else found
                      for member, found in shown.items())  # fmt: skip
            assert what == "anew" or new == sum(grown.values()) * GIB
            paid.append((since, now, 0.06 * new / GIB))
        seen = url

        def within(hours: float, now: float = now) -> float:
            begin = now - hours * HOUR
            return sum(each * max(0.0, until - max(since, begin)) / (until - since) for since, until, each in paid)

        assert within(24) - 1e-6 <= traffic.day(now) <= within(25) + 1e-6
        if traffic.day(now) > 1:
            then = traffic.falls(1.0, now)
            assert traffic.day(then) < 1 <= traffic.day(then - 1)
    assert traffic.falls(1.0, now + 100 * HOUR) == now + 100 * HOUR, "what is older than a day counts no more"


def test_what_was_carried_before_anybody_looked_is_not_todays():
    """A limit that is set in the middle of a run, and a run that is gone back to."""
    first = count(Traffic(), URL, {"a": 1000 * GIB}, {}, A, 1e9)
    assert first.day(1e9) == 0
    second = count(first, URL, {"a": 1010 * GIB}, {}, A, 1e9 + 60)
    assert second.day(1e9 + 60) == pytest.approx(0.6)
    other = count(second, f"{URL}-other", {"a": 5 * GIB}, {}, A, 1e9 + 120)
    again = count(other, URL, {"a": 1010 * GIB}, {}, A, 1e9 + 180)
    assert again.day(1e9 + 180) == pytest.approx(0.6)


def test_a_member_whose_machine_is_gone_or_unseen_is_priced_where_it_was():
    first = count(Traffic(), URL, {"a": 0, "b": 0}, {"a": A, "b": EUROPE}, A, 0.0)
    second = count(first, URL, {"a": 100 * GIB, "b": 100 * GIB}, {}, A, 60.0)
    assert second.day(60.0) == pytest.approx(8.0)
    third = count(second, URL, {"c": 100 * GIB}, {}, A, 120.0)
    assert third.day(120.0) == pytest.approx(14.0), "who was never on a machine of the fleet is on the internet"


def test_a_run_begun_anew_in_its_place_counts_from_nothing():
    zones = {"a": EUROPE}
    traffic = count(Traffic(), URL, {"a": 0}, zones, A, 0.0)
    traffic = count(traffic, URL, {"a": 300 * GIB}, zones, A, 60.0)
    traffic = count(traffic, URL, {"a": 100 * GIB}, zones, A, 120.0)
    assert traffic.day(120.0) == pytest.approx(400 * 0.08)


@pytest.mark.parametrize(
    ("member", "dollars"),
    [
        (A, 0.0),
        ("us-central1-b", 0.01),
        ("us-east1-c", 0.02),
        (EUROPE, 0.08),
        (None, 0.06),  # what the head sends costs 0.12, what arrives nothing
    ],
)
def test_a_gib_costs_its_way(member, dollars):
    """Figures of Google's list for internal traffic; docs/choosing-a-tpu.md has them."""
    assert gib_price(member, A) == pytest.approx(dollars)


def test_the_budget_of_a_day_ends_creation_until_the_day_is_over(cloud):
    loop = Loop(cloud, replace(desired(pool(count=2), vm("head")), budget=Budget(traffic_per_day=5.0)))
    loop.run(300)
    assert len(names(cloud, "ready")) == 3
    loop.traffic = Traffic(hours={int(cloud.now // HOUR): 5.5})
    cloud.preempt((A, "v2-usc1f-0"))
    cloud.preempt((A, "gpt2-head"))
    loop.run(1200)
    assert names(cloud, "ready") == ["gpt2-head", "v2-usc1f-1"], "a head carries nothing by itself"
    (wait,) = loop.waits
    assert wait.why == f"{A}: traffic has cost $5.50 in the last 24 hours, and the budget has $5.00 a day"
    assert wait.until == (int(cloud.now // HOUR) + 25) * HOUR
    cloud.advance(wait.until - cloud.now)
    loop.run(300)
    assert len(names(cloud, "ready")) == 3


def test_a_keeper_reads_what_the_run_has_carried(tmp_path):
    """Killed, another one goes on from the document: no byte twice."""
    cloud = Cloud()
    begin(cloud, replace(desired(pool("far", 1, (EUROPE,)), vm("head")), budget=Budget(traffic_per_day=5.0)))
    keeping = keeper(cloud, tmp_path / "one")
    run(keeping, cloud, 300)
    (member,) = (name for name in ready(cloud) if name != "gpt2-head")
    line = head_line(Train(recipe="gpt2-tiny"), URL, 1)
    job = Job(HEAD, HEAD, line, "always", (Seat(HEAD, "gpt2-head", phase="running"),))
    assert run_in([replace(job, name="other"), job]) == URL and shlex.split(line)
    store(cloud).change(lambda found: replace(found, jobs=(job,)))

    def said(gib: int) -> None:
        members = (MemberStatus(f"j-{member}", "alive", 1, None, 1, 1, 1.0, 1.0, 1.0, 0, gib * GIB),)
        status = SwarmStatus(
            0.0, 0.0, 1, 1, "", 1, Tokens(0, 0, 0, 0, 0), 1.0, 1.0, 0, None, None, None, None, members, (), "", {}
        )
        write_status(tmp_path, status)
        bucket = cloud.bucket("state")
        there = bucket.read(f"runs/gpt2/files/{FILE}")
        bucket.write(f"runs/gpt2/files/{FILE}", (tmp_path / FILE).read_bytes(), there.generation if there else 0)

    said(0)
    run(keeping, cloud, 120)
    said(50)
    run(keeping, cloud, 120)
    keeping = keeper(cloud, tmp_path / "two")
    said(75)
    run(keeping, cloud, 120)
    found = store(cloud).load()
    assert found is not None and found.traffic.day(cloud.now) == pytest.approx(75 * 0.08)
    cloud.preempt((EUROPE, member))
    assert run(keeping, cloud, 300).plan.waits[0].why.startswith(f"{EUROPE}: traffic has cost $6.00")
    ask(cloud, budget=Budget(traffic_per_day=7.0))
    run(keeping, cloud, 600)
    assert member in ready(cloud)

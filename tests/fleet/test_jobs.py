"""What is done next about a job, as values: seats, runs, budgets, and who is to blame for an end."""

from dataclasses import replace

import pytest

from tests.fleet.loop import FLEET, ZONE, pool
from tpuswarm.cloud.protocol import Machine, Worker
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.jobs import (
    GONE_S,
    End,
    Job,
    Report,
    Seat,
    Start,
    Stray,
    next_of,
    scaled,
    seats_for,
    strays,
)  # fmt: skip

NOW = 1_000.0


def machine(name: str, state="ready", workers: int = 2, created: float = 1.0) -> Machine:
    labels = {"tpuswarm-fleet": FLEET, "tpuswarm-pool": "small"}
    hosts = tuple(Worker(f"10.0.0.{n}", None) for n in range(workers))
    return Machine(
        name, ZONE, "tpu", "v2-8", state, state.upper(), how="spot", created=created, workers=hosts, labels=labels
    )


def job(*seats: Seat, **about) -> Job:
    return Job(
        "train", "small", "python train.py", about.pop("restart", "preempted"), seats or (Seat("small"),), **about
    )


def step(before: Job, machines, reports, now: float = NOW, away=()) -> tuple[Job, tuple]:
    found = next_of(before, machines, away, reports, now)
    return found.job, found.acts


RUNNING, OK, BAD = Report(1, "running"), Report(1, "ended", 0), Report(1, "ended", 1)
LOST, STALLED = (
    Report(1, "lost", why="the machine started anew"),
    Report(1, "stalled", why="nothing was printed for 60 s"),
)


def begun(**about) -> Job:
    """A job whose first run is on both workers of a."""
    return job(Seat("small", "a", 1.0, "running", 1), **about)


def both(first: Report | None, second: Report | None) -> dict:
    return {("a", 0): first, ("a", 1): second}


def test_a_seat_is_taken_then_all_workers_start_and_it_is_done_when_all_have_ended_well():
    found, acts = step(job(), [machine("a")], {})
    assert (found.seats[0].machine, found.seats[0].phase, acts) == ("a", "waiting", ())  # stored before it is started
    found, acts = step(found, [machine("a")], both(None, None))
    assert acts == (Start("a", 1, (0, 1)),) and found.seats[0].phase == "running"
    assert step(found, [machine("a")], both(RUNNING, RUNNING)) == (found, ())
    assert step(found, [machine("a")], both(RUNNING, OK)) == (found, ())
    found, acts = step(found, [machine("a")], both(OK, OK))
    assert (found.seats[0].phase, found.seats[0].code, acts, found.over) == ("done", 0, (), True)


def test_nothing_starts_where_a_worker_is_silent():
    found, acts = step(job(Seat("small", "a", 1.0)), [machine("a")], {("a", 0): None})
    assert acts == () and found.seats[0].why == "a/1 does not answer yet"


def test_a_run_that_was_begun_by_a_keeper_that_died_is_begun_on_the_rest():
    found, acts = step(begun(), [machine("a")], both(RUNNING, None))
    assert acts == (Start("a", 1, (1,)),) and found == begun()


def test_a_host_that_has_seen_higher_numbers_gets_a_higher_one():
    _, acts = step(job(Seat("small", "a", 1.0)), [machine("a")], both(Report(7, "ended", 0), None))
    assert acts == (Start("a", 8, (0, 1)),)


def test_a_failure_of_its_own_ends_it_everywhere_and_has_a_budget():
    found, acts = step(begun(), [machine("a")], both(BAD, RUNNING))
    assert acts == (End("a", 1, (1,)),) and found.seats[0].phase == "running"
    asked = Report(1, "asked", 130)
    for reports, worker in ((both(BAD, asked), 0), (both(asked, BAD), 1)):
        found, acts = step(begun(), [machine("a")], reports)
        assert (found.seats[0].phase, found.seats[0].why, acts) == ("failed", f"a/{worker}: exit 1", ())
    found, _ = step(begun(failures=1), [machine("a")], both(BAD, OK))
    assert (found.seats[0].phase, found.seats[0].failed) == ("waiting", 1)
    assert found.seats[0].not_before > NOW
    assert step(found, [machine("a")], both(BAD, OK))[1] == ()  # not at once
    again, acts = step(found, [machine("a")], both(BAD, OK), found.seats[0].not_before)
    assert acts == (Start("a", 2, (0, 1)),)
    bad = Report(2, "ended", 1)
    assert step(again, [machine("a")], both(bad, bad))[0].seats[0].phase == "failed"
    always = begun(restart="always")
    for run in range(1, 6):
        bad = Report(run, "ended", 1)
        always, _ = step(always, [machine("a")], both(bad, bad), NOW * run)
        always, acts = step(always, [machine("a")], both(bad, bad), NOW * run + 999)
        assert acts == (Start("a", run + 1, (0, 1)),)
    assert always.seats[0].failed == 5


@pytest.mark.parametrize("what", [LOST, STALLED])
def test_what_is_lost_or_stands_still_costs_no_budget_and_sets_its_siblings_free_of_blame(what):
    found, acts = step(begun(), [machine("a")], both(BAD, what))
    assert (found.seats[0].phase, found.seats[0].lost, found.seats[0].failed, acts) == ("waiting", 1, 0, ())
    found, acts = step(found, [machine("a")], both(BAD, what))
    assert acts == (Start("a", 2, (0, 1)),)
    assert step(begun(restart="never"), [machine("a")], both(BAD, what))[0].seats[0].phase == "failed"
    assert step(begun(), [machine("a")], both(RUNNING, what))[1] == (End("a", 1, (0,)),)


def test_nobody_is_blamed_while_a_worker_is_silent():
    found, acts = step(begun(), [machine("a")], {("a", 0): BAD})
    assert acts == () and found.seats[0].phase == "running" and "a/1 does not answer" in found.seats[0].why


@pytest.mark.parametrize("there", [[], [machine("a", "dead")], [machine("a", created=2.0)]])
def test_a_machine_that_was_taken_away_leaves_its_seat_to_another(there):
    before = begun() if there else step(begun(), [machine("b", created=3.0)], {}, NOW - GONE_S)[0]
    found, acts = step(before, [*there, machine("b", created=3.0)], {})
    seat = found.seats[0]
    assert seat.machine in ("a", "b") and (seat.phase, seat.lost, seat.failed, acts) == ("waiting", 1, 0, ())
    assert seat.created in (2.0, 3.0)
    workers = {(seat.machine, 0): None, (seat.machine, 1): None}
    assert step(found, [*there, machine("b", created=3.0)], workers)[1] == (Start(seat.machine, 2, (0, 1)),)
    gone = step(replace(before, restart="never"), there, {})[0]
    assert gone.seats[0].phase == "failed"


def test_a_machine_whose_processes_may_live_keeps_its_seat():
    """One that is being deleted, and one that a single list leaves out: two instances would write one checkpoint."""
    found, acts = step(begun(), [machine("a", "deleting"), machine("b")], {("b", 0): None, ("b", 1): None})
    assert (found.seats[0].machine, found.seats[0].why, acts) == ("a", "a is deleting", ())
    found, acts = step(begun(), [machine("b")], {("b", 0): None, ("b", 1): None})
    assert (found.seats[0].machine, found.seats[0].why, acts) == ("a", "a is not listed", ())
    found, acts = step(found, [machine("a"), machine("b")], both(RUNNING, RUNNING), NOW + 1)
    assert found.seats[0].missed_at == 0.0 and acts == ()
    found, _ = step(step(found, [machine("b")], {}, NOW + 2)[0], [machine("b")], {}, NOW + 2 + GONE_S)
    assert found.seats[0].machine == "b" and found.seats[0].lost == 1
    stopping = begun(stop=True)
    assert step(stopping, [machine("a", "repairing")], {})[0].seats[0].phase == "running"  # it may live on there


def test_what_runs_where_no_seat_is_has_strayed():
    here = {("a", 0): RUNNING, ("b", 1): RUNNING, ("b", 0): Report(1, "ended", 0), ("c", 0): None}
    assert strays([begun()], {"train": here}) == {Stray("train", "b", 1, 1)}
    over = job(Seat("small", "a", 1.0, "stopped", 1))
    assert strays([over], {"train": here, "unknown": {("a", 1): RUNNING}}) == {
        Stray("train", "a", 0, 1), Stray("train", "b", 1, 1), Stray("unknown", "a", 1, 1),
    }  # fmt: skip
    assert not strays([], {".notebook": here}), "what a person runs there is no job of the fleet"


def test_a_job_that_is_over_gets_no_seat_on_a_new_machine():
    over = job(Seat("small", "a", 1.0, "done", 1))
    assert scaled(over, Desired(FLEET, (pool(count=3),))) is over


def test_what_cannot_end_is_said():
    stuck = Report(1, "running", why="exit 1, but 2 of its processes do not end")
    found, acts = step(begun(), [machine("a")], both(RUNNING, stuck))
    assert (found.seats[0].phase, found.seats[0].why, acts) == (
        "running", "a/1: exit 1, but 2 of its processes do not end", (),
    )  # fmt: skip


def test_a_machine_in_a_zone_that_does_not_answer_is_not_taken_for_lost():
    found, acts = step(begun(), [machine("b")], {}, away=[ZONE])
    assert found.seats[0].machine == "a" and found.seats[0].lost == 0 and acts == ()


def test_a_machine_under_maintenance_is_waited_for():
    found, acts = step(begun(), [machine("a", "repairing"), machine("b")], {})
    assert found.seats[0].machine == "a" and found.seats[0].why == "a is repairing" and acts == ()


def test_two_seats_never_share_a_machine():
    found, _ = step(job(Seat("small"), Seat("small")), [machine("a"), machine("b")], {})
    assert {each.machine for each in found.seats} == {"a", "b"}
    found, _ = step(job(Seat("small"), Seat("small")), [machine("a")], {})
    assert [each.machine for each in found.seats] == ["a", None]


def test_a_job_that_is_stopped_ends_everywhere_and_starts_nowhere():
    found, acts = step(begun(stop=True), [machine("a")], both(RUNNING, OK))
    assert acts == (End("a", 1, (0,)),) and not found.over
    found, acts = step(found, [machine("a")], both(Report(1, "asked", 130), OK))
    assert acts == () and found.seats[0].phase == "stopped"
    assert step(job(stop=True), [machine("a")], both(None, None))[0].seats[0].phase == "stopped"
    assert step(begun(stop=True), [], {})[0].over


def test_a_run_whose_start_may_be_on_its_way_is_ended_too():
    found, acts = step(begun(stop=True), [machine("a")], both(None, Report(1, "asked", 130)))
    assert acts == (End("a", 1, (0,)),) and found.seats[0].phase == "running"
    assert step(begun(), [machine("a")], both(BAD, None))[1] == (End("a", 1, (1,)),)


def test_seats_follow_their_pool():
    desired = Desired(FLEET, (pool(count=3), pool("other", count=1)))
    assert len(seats_for("small", None, desired)) == 3 and len(seats_for("all", None, desired)) == 4
    assert seats_for("a", machine("a"), desired) == (Seat("small", "a", 1.0),)
    three = job(*seats_for("small", None, desired))
    assert scaled(three, desired) is three
    assert len(scaled(three, Desired(FLEET, (pool(count=5),))).seats) == 5
    busy = replace(three, seats=(Seat("small", "a", 1.0, "running", 1), *three.seats[1:]))
    assert scaled(busy, Desired(FLEET, (pool(count=1),))).seats == busy.seats[:1]
    one = begun(machine="a")
    assert scaled(one, desired) is one


def test_nothing_begins_on_another_machine_before_it_is_prepared():
    """It may have the name of the one that was taken away between two looks."""
    runs = job(Seat("small", "a", created=1.0, phase="running", run=3))
    again, reports = machine("a", created=2.0), {("a", 0): None, ("a", 1): None}
    found = next_of(runs, [again], (), reports, NOW, {})
    (seat,) = found.job.seats
    assert (seat.phase, seat.lost, seat.created, found.acts) == ("waiting", 1, 2.0, ())
    assert next_of(found.job, [again], (), reports, NOW, {"a": "a is being set up"}).acts == ()
    assert next_of(found.job, [again], (), reports, NOW, {}).acts == (Start("a", 4, (0, 1)),)

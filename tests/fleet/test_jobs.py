"""Decide what to do next about a job: seats, runs, retries, and who is to blame for an end."""

from dataclasses import replace

import pytest

from tests.fleet.loop import FLEET, ZONE, desired, machine, pool
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.jobs import (
    MISSING_GRACE_S,
    Assignment,
    EndRun,
    Job,
    RunReport,
    StartRun,
    StrayRun,
    create_assignments,
    find_strays,
    scale_job,
    update_job,
)

NOW = 1_000.0
RUNNING, OK, FAILED = RunReport(1, "running"), RunReport(1, "ended", 0), RunReport(1, "ended", 1)
LOST = RunReport(1, "lost", why="the machine started anew")
STALLED = RunReport(1, "stalled", why="nothing was printed for 60 s")
STOPPED = RunReport(1, "asked", 130)
A, B = machine("a"), machine("b")


def job(*seats: Assignment, restart="preempted", **fields) -> Job:
    return Job("train", "small", "python train.py", restart, seats or (Assignment("small"),), **fields)


def running(**fields) -> Job:
    """A job whose first run is on both workers of machine a."""
    return job(Assignment("small", "a", 1.0, "running", 1), **fields)


def reports(first: RunReport | None, second: RunReport | None, name: str = "a") -> dict:
    return {(name, 0): first, (name, 1): second}


def step(before: Job, machines, reports, now: float = NOW, unreachable=()) -> tuple[Job, tuple]:
    found = update_job(before, machines, unreachable, reports, now)
    return found.job, found.actions


def test_job_takes_a_seat_starts_on_all_workers_and_is_done_when_all_succeed():
    found, acts = step(job(), [A], {})
    assert (found.assignments[0].machine, found.assignments[0].phase, acts) == ("a", "waiting", ()), (
        "stored before it starts"
    )
    found, acts = step(found, [A], reports(None, None))
    assert acts == (StartRun("a", 1, (0, 1)),) and found.assignments[0].phase == "running"
    assert step(found, [A], reports(RUNNING, RUNNING)) == step(found, [A], reports(RUNNING, OK)) == (found, ())
    found, acts = step(found, [A], reports(OK, OK))
    assert (found.assignments[0].phase, found.assignments[0].code, acts, found.is_over) == ("done", 0, (), True)


def test_start_interrupted_by_a_killed_keeper_is_completed():
    found, acts = step(running(), [A], reports(RUNNING, None))
    assert acts == (StartRun("a", 1, (1,)),) and found == running()


def test_run_number_is_higher_than_any_the_host_has_seen():
    assert step(job(Assignment("small", "a", 1.0)), [A], reports(RunReport(7, "ended", 0), None))[1] == (
        StartRun("a", 8, (0, 1)),
    )


def test_failed_worker_ends_the_others_and_is_blamed():
    found, acts = step(running(), [A], reports(FAILED, RUNNING))
    assert acts == (EndRun("a", 1, (1,)),) and found.assignments[0].phase == "running"
    for both, worker in ((reports(FAILED, STOPPED), 0), (reports(STOPPED, FAILED), 1)):
        found, acts = step(running(), [A], both)
        assert (found.assignments[0].phase, found.assignments[0].why, acts) == ("failed", f"a/{worker}: exit 1", ())


def test_failed_job_is_retried_after_a_pause_within_its_budget():
    found, _ = step(running(failures=1), [A], reports(FAILED, OK))
    seat = found.assignments[0]
    assert (seat.phase, seat.failed) == ("waiting", 1) and seat.not_before > NOW
    assert step(found, [A], reports(FAILED, OK))[1] == ()
    again, acts = step(found, [A], reports(FAILED, OK), seat.not_before)
    assert acts == (StartRun("a", 2, (0, 1)),)
    failed = RunReport(2, "ended", 1)
    assert step(again, [A], reports(failed, failed))[0].assignments[0].phase == "failed"
    always = running(restart="always")
    for run in range(1, 6):
        failed = RunReport(run, "ended", 1)
        always, _ = step(always, [A], reports(failed, failed), NOW * run)
        always, acts = step(always, [A], reports(failed, failed), NOW * run + 999)
        assert acts == (StartRun("a", run + 1, (0, 1)),)
    assert always.assignments[0].failed == 5


@pytest.mark.parametrize("report", [LOST, STALLED])
def test_lost_or_stalled_worker_uses_no_retry_and_blames_no_other(report):
    found, acts = step(running(), [A], reports(FAILED, report))
    assert (found.assignments[0].phase, found.assignments[0].lost, found.assignments[0].failed, acts) == (
        "waiting",
        1,
        0,
        (),
    )
    assert step(found, [A], reports(FAILED, report))[1] == (StartRun("a", 2, (0, 1)),)
    assert step(running(restart="never"), [A], reports(FAILED, report))[0].assignments[0].phase == "failed"
    assert step(running(), [A], reports(RUNNING, report))[1] == (EndRun("a", 1, (0,)),)


def test_nothing_starts_and_nobody_is_blamed_while_a_worker_does_not_answer():
    for before, report in ((job(Assignment("small", "a", 1.0)), None), (running(), FAILED)):
        found, acts = step(before, [A], {("a", 0): report})
        assert acts == () and found.assignments[0].phase == before.assignments[0].phase
        assert "a/1 does not answer" in found.assignments[0].why


@pytest.mark.parametrize("listed", [[], [machine("a", "dead")], [machine("a", created=2.0)]])
def test_job_of_a_preempted_machine_moves_to_another(listed):
    machines = [*listed, machine("b", created=3.0)]
    before = running() if listed else step(running(), machines, {}, NOW - MISSING_GRACE_S)[0]
    found, acts = step(before, machines, {})
    (seat,) = found.assignments
    assert (seat.machine, seat.created) in (("a", 2.0), ("b", 3.0))
    assert (seat.phase, seat.lost, seat.failed, acts) == ("waiting", 1, 0, ())
    assert step(found, machines, reports(None, None, seat.machine))[1] == (StartRun(seat.machine, 2, (0, 1)),)
    assert step(replace(before, restart="never"), listed, {})[0].assignments[0].phase == "failed"


@pytest.mark.parametrize(
    ("listed", "unreachable", "why"),
    [
        ([machine("a", "deleting")], (), "a is deleting"),
        ([machine("a", "repairing")], (), "a is repairing"),
        ([], (), "a is not listed"),
        ([], (ZONE,), None),
    ],
)
def test_machine_whose_processes_may_live_keeps_its_seat(listed, unreachable, why):
    """Else two processes could write one checkpoint."""
    found, acts = step(running(), [*listed, B], reports(None, None, "b"), unreachable=unreachable)
    (seat,) = found.assignments
    assert (seat.machine, seat.lost, acts) == ("a", 0, ()) and why in (seat.why, None)
    assert step(running(stop=True), listed, {}, unreachable=unreachable)[0].is_over == (why == "a is not listed")


def test_machine_that_is_not_listed_for_long_is_lost():
    found, _ = step(running(), [B], {})
    found, acts = step(found, [A, B], reports(RUNNING, RUNNING), NOW + 1)
    assert found.assignments[0].missed_at == 0.0 and acts == ()
    found, _ = step(step(found, [B], {}, NOW + 2)[0], [B], {}, NOW + 2 + MISSING_GRACE_S)
    assert found.assignments[0].machine == "b" and found.assignments[0].lost == 1


def test_run_without_a_seat_is_a_stray():
    states = {("a", 0): RUNNING, ("b", 1): RUNNING, ("b", 0): OK, ("c", 0): None}
    assert find_strays([running()], {"train": states}) == {StrayRun("train", "b", 1, 1)}
    stopped = job(Assignment("small", "a", 1.0, "stopped", 1))
    assert find_strays([stopped], {"train": states, "unknown": {("a", 1): RUNNING}}) == {
        StrayRun("train", "a", 0, 1), StrayRun("train", "b", 1, 1), StrayRun("unknown", "a", 1, 1),
    }  # fmt: skip
    assert not find_strays([], {".notebook": states}), "a person's notebook is no job"


def test_worker_that_cannot_end_is_reported():
    stuck = RunReport(1, "running", why="exit 1, but 2 of its processes do not end")
    found, acts = step(running(), [A], reports(RUNNING, stuck))
    assert (found.assignments[0].phase, found.assignments[0].why, acts) == ("running", f"a/1: {stuck.why}", ())


def test_two_seats_never_share_a_machine():
    for machines, expected in (([A, B], ["a", "b"]), ([A], ["a", None])):
        found, _ = step(job(Assignment("small"), Assignment("small")), machines, {})
        assert [seat.machine for seat in found.assignments] == expected


def test_stopped_job_ends_everywhere_and_starts_nowhere():
    found, acts = step(running(stop=True), [A], reports(RUNNING, OK))
    assert acts == (EndRun("a", 1, (0,)),) and not found.is_over
    found, acts = step(found, [A], reports(STOPPED, OK))
    assert acts == () and found.assignments[0].phase == "stopped"
    assert step(job(stop=True), [A], reports(None, None))[0].assignments[0].phase == "stopped"
    assert step(running(stop=True), [], {})[0].is_over
    found, acts = step(running(stop=True), [A], reports(None, STOPPED))
    assert acts == (EndRun("a", 1, (0,)),) and found.assignments[0].phase == "running", "worker 0 may be starting"
    assert step(running(), [A], reports(FAILED, None))[1] == (EndRun("a", 1, (1,)),)


def test_seats_follow_the_size_of_their_pool():
    fleet = desired(pool(count=3), pool("other"))
    assert len(create_assignments("small", None, fleet)) == 3 and len(create_assignments("all", None, fleet)) == 4
    assert create_assignments("a", A, fleet) == (Assignment("small", "a", 1.0),)
    three = job(*create_assignments("small", None, fleet))
    assert scale_job(three, fleet) is three
    assert len(scale_job(three, desired(pool(count=5))).assignments) == 5
    busy = replace(three, assignments=(Assignment("small", "a", 1.0, "running", 1), *three.assignments[1:]))
    assert scale_job(busy, desired(pool())).assignments == busy.assignments[:1]
    for fixed in (running(machine="a"), job(Assignment("small", "a", 1.0, "done", 1))):
        assert scale_job(fixed, Desired(FLEET, (pool(count=3),))) is fixed


def test_job_starts_on_a_new_machine_only_once_it_is_set_up():
    """The new machine may have the name of the preempted one."""
    before, again = job(Assignment("small", "a", created=1.0, phase="running", run=3)), machine("a", created=2.0)
    found = update_job(before, [again], (), reports(None, None), NOW, {})
    (seat,) = found.job.assignments
    assert (seat.phase, seat.lost, seat.created, found.actions) == ("waiting", 1, 2.0, ())
    assert update_job(found.job, [again], (), reports(None, None), NOW, {"a": "a is being set up"}).actions == ()
    assert update_job(found.job, [again], (), reports(None, None), NOW, {}).actions == (StartRun("a", 4, (0, 1)),)

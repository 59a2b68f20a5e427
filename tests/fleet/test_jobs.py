"""Decide what to do next about a job: assignments, runs, retries, and who is to blame for an end."""

from dataclasses import replace

import pytest

from tests.fleet.loop import FLEET, ZONE, desired, machine, pool
from tpuswarm.fleet.decide import jobs
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.job_failures import find_failures
from tpuswarm.fleet.decide.jobs import Assignment, EndRun, Job, RunReport, StartRun, StrayRun, scale_job

NOW = 1_000.0
RUNNING, OK, FAILED = RunReport(1, "running"), RunReport(1, "ended", 0), RunReport(1, "ended", 1)
LOST = RunReport(1, "lost", why="the machine started anew")
STALLED = RunReport(1, "stalled", why="nothing was printed for 60 s")
STOPPED = RunReport(1, "asked", 130)
A, B = machine("a"), machine("b")
NEW = Assignment("small")
FREE = Assignment("small", "a", 1.0)
RUN_1 = replace(FREE, phase="running", run=1)
START_1, START_2 = StartRun("a", 1, (0, 1)), StartRun("a", 2, (0, 1))


def job(*assignments: Assignment, restart="preempted", **fields) -> Job:
    return Job("train", "small", "python train.py", restart, assignments or (NEW,), **fields)


def reports(first: RunReport | None, second: RunReport | None, name: str = "a") -> dict:
    return {(name, 0): first, (name, 1): second}


def step(before: Assignment, machines, reports, now: float = NOW, unreachable=(), **fields) -> tuple[Assignment, tuple]:
    """Update a job with one assignment; return the assignment and the actions."""
    update = jobs.update_job(job(before, **fields), machines, unreachable, reports, now)
    return update.job.assignments[0], update.actions


def test_job_is_assigned_starts_on_all_workers_and_is_done_when_all_succeed():
    found, actions = step(NEW, [A], {})
    assert (found, actions) == (replace(FREE, why="a/0 does not answer yet"), ()), "stored before it starts"
    found, actions = step(found, [A], reports(None, None))
    assert actions == (START_1,) and found.phase == "running"
    assert step(found, [A], reports(RUNNING, RUNNING)) == step(found, [A], reports(RUNNING, OK)) == (found, ())
    found, actions = step(found, [A], reports(OK, OK))
    assert (found.phase, found.code, actions, job(found).is_over) == ("done", 0, (), True)


def test_start_interrupted_by_a_killed_keeper_is_completed():
    assert step(RUN_1, [A], reports(RUNNING, None)) == (RUN_1, (StartRun("a", 1, (1,)),))


def test_run_number_is_higher_than_any_the_host_has_seen():
    assert step(FREE, [A], reports(RunReport(7, "ended", 0), None))[1] == (StartRun("a", 8, (0, 1)),)


def test_failed_worker_ends_the_others_and_is_blamed():
    found, actions = step(RUN_1, [A], reports(FAILED, RUNNING))
    assert actions == (EndRun("a", 1, (1,)),) and found.phase == "running"
    for both, worker in ((reports(FAILED, STOPPED), 0), (reports(STOPPED, FAILED), 1)):
        found, actions = step(RUN_1, [A], both)
        assert (found.phase, found.why, actions) == ("failed", f"a/{worker}: exit 1", ())


def test_failed_job_is_retried_after_a_pause_within_its_budget():
    found, _ = step(RUN_1, [A], reports(FAILED, OK), failures=1)
    assert (found.phase, found.failed) == ("waiting", 1) and found.not_before > NOW
    assert step(found, [A], reports(FAILED, OK), failures=1)[1] == ()
    again, actions = step(found, [A], reports(FAILED, OK), found.not_before, failures=1)
    failed = RunReport(2, "ended", 1)
    assert actions == (START_2,) and step(again, [A], reports(failed, failed), failures=1)[0].phase == "failed"
    always = RUN_1
    for run in range(1, 6):
        failed = RunReport(run, "ended", 1)
        always, _ = step(always, [A], reports(failed, failed), NOW * run, restart="always")
        always, actions = step(always, [A], reports(failed, failed), NOW * run + 999, restart="always")
        assert actions == (StartRun("a", run + 1, (0, 1)),)
    assert always.failed == 5


def test_first_run_that_fails_too_soon_is_the_last():
    soon, late = (RunReport(1, "ended", 127, ran_s=ran_s) for ran_s in (2.0, 61.0))
    fields = {"restart": "always", "min_run_s": 60.0}
    found, _ = step(RUN_1, [A], reports(soon, soon), **fields)
    assert (found.phase, found.why) == ("failed", "a/0: exit 127 after 2 s, so it is not run again")
    assert step(RUN_1, [A], reports(late, late), **fields)[0].phase == "waiting"
    for before in (replace(RUN_1, lost=1), replace(RUN_1, failed=1)):
        assert step(before, [A], reports(soon, soon), **fields)[0].phase == "waiting", "it has run for longer once"


def fail(before: Assignment, error: str, ran_s: float = 20.0, later_s: float = 60.0, **fields) -> Assignment:
    """Let the run of an assignment fail with a last line, and start it again unless that was the last."""
    failed = RunReport(before.run, "ended", 1, error=error, ran_s=ran_s)
    now = NOW + before.failed * later_s
    after, _ = step(before, [A], reports(failed, failed), now, restart="always", **fields)
    return step(after, [A], reports(failed, failed), after.not_before, restart="always")[0]


def test_job_that_fails_three_times_with_the_same_last_line_stops_and_says_so():
    again = fail(RUN_1, "error: no step 7")
    assert (again.phase, again.why) == ("running", "run 2 on a; the one before failed: error: no step 7")
    (failure,) = find_failures([job(again)])
    assert failure.says == "job train keeps failing on a: error: no step 7"
    last = fail(fail(again, "error: no step 8"), "error: no step 9")
    assert last.phase == "failed"
    assert last.why.endswith("3 times the same error, so it is not run again: error: no step 9")
    (failure,) = find_failures([job(last)])
    assert failure.says == "job train has failed on a: error: no step 9"


def test_job_survives_an_outage_of_a_minute():
    found = RUN_1
    for _ in range(5):
        found = fail(found, "error: the bucket does not answer", later_s=14.0)
    assert found.phase == "running"


@pytest.mark.parametrize(("errors", "ran_s"), [(("a", "b", "a", "b"), 20.0), (("a",) * 5, jobs.SHORT_RUN_S)])
def test_job_with_other_errors_or_progress_in_between_runs_on(errors, ran_s):
    found = RUN_1
    for error in errors:
        found = fail(found, error, ran_s)
    assert found.phase == "running" and found.error == errors[-1]
    healthy = RunReport(found.run, "running", ran_s=jobs.SHORT_RUN_S)
    later, _ = step(found, [A], reports(healthy, healthy))
    assert (later.error, later.why) == ("", f"run {found.run} on a") and not find_failures([job(later)])


def test_job_that_failed_for_good_runs_again_on_a_new_machine_or_when_asked():
    failed = fail(fail(fail(RUN_1, "x"), "x"), "x")
    assert failed.phase == "failed" and step(failed, [A], reports(None, None), restart="always")[0] == failed
    assert step(failed, [], {}, unreachable=(ZONE,), restart="always")[0] == failed
    for machines in ([], [machine("a", created=2.0)], [machine("a", "dead")]):
        assert step(failed, machines, {}, restart="always")[0].phase == "waiting"
    (reopened,) = jobs.reopen_failed(job(failed)).assignments
    assert step(reopened, [A], reports(None, None))[0].phase == "running"


def test_job_that_is_done_or_used_its_retries_does_not_run_again_on_a_new_machine():
    failed = fail(fail(fail(RUN_1, "x"), "x"), "x")
    assert step(failed, [], {}, restart="preempted", failures=2) == (failed, ())
    succeeded = replace(failed, phase="done", code=0)
    assert step(succeeded, [], {}, restart="preempted", failures=3) == (succeeded, ())
    assert not find_failures([job(succeeded)])


@pytest.mark.parametrize("report", [LOST, STALLED])
def test_lost_or_stalled_worker_uses_no_retry_and_blames_no_other(report):
    found, actions = step(RUN_1, [A], reports(FAILED, report))
    assert (found.phase, found.lost, found.failed, actions) == ("waiting", 1, 0, ())
    assert step(found, [A], reports(FAILED, report))[1] == (START_2,)
    assert step(RUN_1, [A], reports(FAILED, report), restart="never")[0].phase == "failed"
    assert step(RUN_1, [A], reports(RUNNING, report))[1] == (EndRun("a", 1, (0,)),)


def test_nothing_starts_and_nobody_is_blamed_while_a_worker_does_not_answer():
    for before, report in ((FREE, None), (RUN_1, FAILED)):
        found, actions = step(before, [A], {("a", 0): report})
        assert actions == () and found.phase == before.phase and "a/1 does not answer" in found.why


@pytest.mark.parametrize("listed", [[], [machine("a", "dead")], [machine("a", created=2.0)]])
def test_job_of_a_preempted_machine_moves_to_another(listed):
    machines = [*listed, machine("b", created=3.0)]
    before = RUN_1 if listed else step(RUN_1, machines, {}, NOW - jobs.MISSING_GRACE_S)[0]
    found, actions = step(before, machines, {})
    assert (found.machine, found.created) in (("a", 2.0), ("b", 3.0))
    assert (found.phase, found.lost, found.failed, actions) == ("waiting", 1, 0, ())
    assert step(found, machines, reports(None, None, found.machine))[1] == (StartRun(found.machine, 2, (0, 1)),)
    assert step(before, listed, {}, restart="never")[0].phase == "failed"


@pytest.mark.parametrize(
    ("listed", "unreachable", "why"),
    [
        ([machine("a", "deleting")], (), "a is deleting"),
        ([machine("a", "repairing")], (), "a is repairing"),
        ([], (), "a is not listed"),
        ([], (ZONE,), "a may be in a zone that does not answer"),
    ],
)
def test_machine_whose_processes_may_live_keeps_its_assignment(listed, unreachable, why):
    """Else two processes could write one checkpoint."""
    found, actions = step(RUN_1, [*listed, B], reports(None, None, "b"), unreachable=unreachable)
    assert (found.machine, found.lost, found.why, actions) == ("a", 0, why, ())
    stopped, _ = step(RUN_1, listed, {}, unreachable=unreachable, stop=True)
    assert (stopped.phase == "stopped") == (why == "a is not listed")


def test_machine_that_is_not_listed_for_long_is_lost():
    found, _ = step(RUN_1, [B], {})
    found, actions = step(found, [A, B], reports(RUNNING, RUNNING), NOW + 1)
    assert found.missed_at == 0.0 and actions == ()
    found, _ = step(step(found, [B], {}, NOW + 2)[0], [B], {}, NOW + 2 + jobs.MISSING_GRACE_S)
    assert found.machine == "b" and found.lost == 1


def test_run_without_an_assignment_is_a_stray():
    states = {("a", 0): RUNNING, ("b", 1): RUNNING, ("b", 0): OK, ("c", 0): None}
    assert jobs.find_strays([job(RUN_1)], {"train": states}) == {StrayRun("train", "b", 1, 1)}
    stopped = job(replace(RUN_1, phase="stopped"))
    assert jobs.find_strays([stopped], {"train": states, "unknown": {("a", 1): RUNNING}}) == {
        StrayRun("train", "a", 0, 1), StrayRun("train", "b", 1, 1), StrayRun("unknown", "a", 1, 1),
    }  # fmt: skip
    assert not jobs.find_strays([], {".notebook": states}), "a person's notebook is no job"


def test_worker_that_cannot_end_is_reported():
    stuck = RunReport(1, "running", why="exit 1, but 2 of its processes do not end")
    assert step(RUN_1, [A], reports(RUNNING, stuck)) == (replace(RUN_1, why=f"a/1: {stuck.why}"), ())


def test_two_assignments_never_share_a_machine():
    for machines, expected in (([A, B], ["a", "b"]), ([A], ["a", None])):
        update = jobs.update_job(job(NEW, NEW), machines, (), {}, NOW)
        assert [assignment.machine for assignment in update.job.assignments] == expected


def test_stopped_job_ends_everywhere_and_starts_nowhere():
    found, actions = step(RUN_1, [A], reports(RUNNING, OK), stop=True)
    assert actions == (EndRun("a", 1, (0,)),) and found.phase == "running"
    found, actions = step(found, [A], reports(STOPPED, OK), stop=True)
    assert actions == () and found.phase == "stopped"
    assert step(NEW, [A], reports(None, None), stop=True)[0].phase == "stopped"
    assert step(RUN_1, [], {}, stop=True)[0].phase == "stopped"
    found, actions = step(RUN_1, [A], reports(None, STOPPED), stop=True)
    assert actions == (EndRun("a", 1, (0,)),) and found.phase == "running", "worker 0 may be starting"
    assert step(RUN_1, [A], reports(FAILED, None))[1] == (EndRun("a", 1, (1,)),)


def test_stopped_job_ends_what_a_lost_run_has_left():
    """A killed supervisor leaves its processes, and somebody may have seen its loss before the stop."""
    lost, _ = step(RUN_1, [A], reports(LOST, STOPPED))
    assert lost.phase == "waiting"
    found, actions = step(lost, [A], reports(LOST, STOPPED), stop=True)
    assert actions == (EndRun("a", 1, (0,)),) and found.is_open
    found, actions = step(found, [A], reports(STOPPED, STOPPED), stop=True)
    assert actions == () and found.phase == "stopped"


def test_assignments_follow_the_size_of_their_pool():
    fleet = desired(pool(count=3), pool("other"))
    sizes = [len(jobs.create_assignments(where, None, fleet)) for where in ("small", "all")]
    assert sizes == [3, 4] and jobs.create_assignments("a", A, fleet) == (FREE,)
    three = job(*jobs.create_assignments("small", None, fleet))
    assert scale_job(three, fleet) is three and len(scale_job(three, desired(pool(count=5))).assignments) == 5
    busy = replace(three, assignments=(RUN_1, *three.assignments[1:]))
    assert scale_job(busy, desired(pool())).assignments == (RUN_1,)
    for fixed in (job(RUN_1, machine="a"), job(replace(FREE, phase="done"))):
        assert scale_job(fixed, Desired(FLEET, (pool(count=3),))) is fixed


def test_job_starts_on_a_new_machine_only_once_it_is_set_up():
    """The new machine may have the name of the preempted one."""
    before, again, idle = job(replace(RUN_1, run=3)), machine("a", created=2.0), reports(None, None)
    update = jobs.update_job(before, [again], (), idle, NOW, {})
    (found,) = update.job.assignments
    assert (found.phase, found.lost, found.created, update.actions) == ("waiting", 1, 2.0, ())
    assert jobs.update_job(update.job, [again], (), idle, NOW, {"a": "a is being set up"}).actions == ()
    assert jobs.update_job(update.job, [again], (), idle, NOW, {}).actions == (StartRun("a", 4, (0, 1)),)

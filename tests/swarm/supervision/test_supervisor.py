"""The supervisor: members at work, processes that fail, and the end of a run."""

import signal
import time
from dataclasses import replace

import pytest

from tests.swarm.supervision.fake_cluster import PLAN, SWARM, rounds, states
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.plan import HEAD
from tpuswarm.swarm.supervision import kept as kept_module
from tpuswarm.swarm.supervision import supervisor as module


def test_status_of_a_member_through_its_life(supervise):
    """One that evaluates has no speed; tokens are those of all its incarnations; nobody is alive after the run."""
    supervisors = []

    def script(supervisor, cluster):
        supervisors.append(supervisor)
        yield
        first = cluster.newest("m0")
        first.lease("a")
        first.rows = [{"step": 3, "tokens": 24, "loss": 1.0, "version": 0}]
        yield from rounds(2)
        (seen,) = supervisor.status.members
        assert (seen.state, seen.tokens, seen.tokens_per_s) == ("alive", 24, 12.0)
        first.die()
        yield from rounds(2)
        second = cluster.newest("m0")
        second.lease("b")
        second.evaluating = True
        yield from rounds(2)
        (seen,) = supervisor.status.members
        assert (seen.state, seen.tokens, seen.tokens_per_s) == ("evaluating", 24, None)
        cluster.finish()

    assert supervise(script).how == "finished"
    status = supervisors[0].status
    (seen,) = status.members
    assert (seen.state, seen.pid, seen.tokens_per_s, status.tokens_per_s) == ("left", None, None, 0.0)


def test_stop_waits_only_for_members_that_have_begun(supervise):
    """It does not wait for the member that evaluates, which here never answers."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "trained"}
        yield from rounds(2)
        trained = cluster.newest("j-trained")
        trained.incarnation = "b" * 32
        yield
        signal.raise_signal(signal.SIGINT)
        yield from rounds(2)
        assert not trained.ended
        trained.ended = Outcome("left", "")

    ended = supervise(script)
    assert (ended.how, ended.signal) == ("stopped", signal.SIGINT)


@pytest.mark.parametrize("is_slow", [False, True])
def test_stop_waits_until_the_last_push_is_decided(supervise, is_slow):
    """The coordinator is asked again once the last member has left: an older answer does not know its last push."""
    supervisors = []

    def script(supervisor, cluster):
        supervisors.append(supervisor)
        yield
        first = cluster.newest("m0")
        first.incarnation = "a" * 32
        yield
        signal.raise_signal(signal.SIGINT)
        yield
        cluster.newest(HEAD).is_slow = is_slow
        first.ended, cluster.tokens = Outcome("left", ""), Tokens(32, 0, 0, 32, 0)
        yield
        cluster.tokens = Tokens(32, 32, 0, 0, 0)

    assert supervise(script).how == "stopped"
    assert supervisors[0].status.tokens == Tokens(32, 32, 0, 0, 0)


def test_end_of_the_run_waits_only_for_members_that_trained(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "compiles", "n2": "trained"}
        yield from rounds(2)
        trained = cluster.newest("j-trained")
        trained.incarnation = "b" * 32
        yield from rounds(2)
        cluster.finish()
        yield from rounds(5)  # its last rows are still to come
        trained.ended = Outcome("ended", "")

    assert supervise(script).message == "finished: 8 steps"


def test_process_that_does_not_answer_is_killed_and_restarted(supervise, monkeypatch):
    monkeypatch.setattr(kept_module, "HUNG", 0.05)
    monkeypatch.setattr(kept_module, "HUNG_MEMBER", 0.05)

    def script(supervisor, cluster):
        yield
        for name in ("m0", "aggregator-0", HEAD):
            hung = cluster.newest(name)
            hung.answers = False
            while not hung.gone:
                yield
            hung.die()
            while cluster.newest(name) is hung:
                yield
            yield
        cluster.finish()

    assert supervise(script).how == "finished"
    notes = [event["message"].partition(" has not answered for ") for event in supervise.events("note")]
    assert {name for name, _, _ in notes} == {"m0", "aggregator-0", HEAD}
    assert all("killing it, to start it again" in rest for _, _, rest in notes)
    assert [event["message"] for event in supervise.events("coordinator")] == ["it died; restarting it"]


def test_coordinator_that_hangs_after_the_end_is_restarted(supervise, monkeypatch):
    """A member that has not heard of the end would wait forever, and the run with it."""
    monkeypatch.setattr(kept_module, "HUNG", 0.05)

    def script(supervisor, cluster):
        yield
        head = cluster.newest(HEAD)
        cluster.newest("m0").incarnation = "a" * 32
        head.ended, head.answers = Outcome("ended", ""), False
        end = time.monotonic() + 20
        while cluster.newest(HEAD) is head and time.monotonic() < end:
            yield
        assert cluster.newest(HEAD) is not head and head.gone
        cluster.finish()

    assert supervise(script).how == "finished"


def test_supervisor_that_was_stopped_kills_nobody(supervise):
    """It asked nobody while it was stopped."""

    def script(supervisor, cluster):
        yield from rounds(2)
        supervisor._clock._read -= 3600.0  # an hour passed since its last round
        yield from rounds(2)
        assert not [process.name for process in cluster.started if process.gone]
        cluster.finish()

    assert supervise(script).how == "finished"


TWO_MEMBERS = replace(PLAN, swarm=replace(SWARM, members=2))
WRONG = Outcome("wrong", "m1 cannot join: its code differs from the run's")
FAILED = Outcome("failed", "ValueError: no such device")
DIVERGES = Outcome("over", "m1 gave up after 5 incarnations without a finite push")


@pytest.mark.parametrize("outcome", [WRONG, FAILED, DIVERGES])
def test_run_continues_without_a_member_that_fails(supervise, outcome):
    def script(supervisor, cluster):
        yield
        for _ in range(module.FAILURES if outcome is FAILED else 1):
            cluster.newest("m1").ended = outcome
            yield from rounds(2)
        (alarm,) = supervisor.status.alarms
        assert alarm.startswith("m1 does not train: m1") and outcome.reason in alarm
        assert states(supervisor) == {"m1": "lost"}
        tries = len(cluster.started)
        yield
        assert len(cluster.started) == tries
        supervisor.kept["m1"].wake = 0.0  # ten minutes later
        yield
        cluster.newest("m1").rows = [{"step": 1, "tokens": 8, "loss": 1.0, "version": 1}]
        yield from rounds(2)
        assert len(cluster.started) == tries + 1 and supervisor.status.alarms == ()
        cluster.finish()
        cluster.newest("m1").ended = Outcome("ended", "")

    assert supervise(script, TWO_MEMBERS).how == "finished"
    assert [event["message"].partition(":")[0] for event in supervise.events("alarm")] == ["m1 does not train"]


@pytest.mark.parametrize(("how", "error"), [("wrong", InputError), ("over", RunFailed)])
def test_run_that_no_member_can_train_ends_with_the_reason(supervise, how, error):
    def script(supervisor, cluster):
        yield
        cluster.newest("m1").ended = WRONG
        yield from rounds(2)
        cluster.newest("m0").ended = Outcome(how, "m0 cannot train for this reason")
        yield

    with pytest.raises(error, match="m0 cannot train for this reason"):
        supervise(script, TWO_MEMBERS)

"""The supervisor with a cluster that is played: members at work, processes that fail, and the end of a run."""

import signal
import time
from dataclasses import replace

import pytest

from tests.swarm.supervision.played import PLAN, SWARM, Cluster, finish, states
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.plan import HEAD
from tpuswarm.swarm.supervision import kept as kept_module
from tpuswarm.swarm.supervision import supervisor as module


def test_what_a_member_is_at(play):
    """One that evaluates has no speed; its tokens are those of all its lives; nobody is alive when the run is over."""

    def script(supervisor, cluster):
        yield
        first = cluster.newest("m0")
        first.incarnation = "a" * 32
        Cluster.leased = (first.incarnation,)
        first.rows = [{"step": 3, "tokens": 24, "loss": 1.0, "version": 0}]
        yield
        yield
        (seen,) = supervisor.status.members
        assert (seen.state, seen.tokens, seen.tokens_per_s) == ("alive", 24, 12.0)
        first.ended = Outcome("dead", "killed")
        yield
        yield
        second = cluster.newest("m0")
        second.incarnation, second.evaluating = "b" * 32, True
        Cluster.leased = (second.incarnation,)
        yield
        yield
        (seen,) = supervisor.status.members
        assert (seen.state, seen.tokens, seen.tokens_per_s) == ("evaluating", 24, None)
        play.last = supervisor
        finish(cluster)

    assert play(script).how == "finished"
    (seen,) = play.last.status.members
    assert (seen.state, seen.pid, seen.tokens_per_s, play.last.status.tokens_per_s) == ("left", None, None, 0.0)


def test_who_has_not_begun_does_not_hold_up_a_stop(play):
    """Not even the member that evaluates: here it never answers again."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "trained"}
        yield
        yield
        trained = cluster.newest("j-trained")
        trained.incarnation = "b" * 32
        yield
        signal.raise_signal(signal.SIGINT)
        yield
        yield
        assert not trained.ended  # it is waited for
        trained.ended = Outcome("left", "")

    ended = play(script)
    assert (ended.how, ended.signal) == ("stopped", signal.SIGINT)


@pytest.mark.parametrize("slow", [False, True])
def test_a_stop_waits_until_what_came_last_is_decided(play, slow):
    """The coordinator is asked anew when the last member has gone: an older answer knows nothing of its last push."""

    def script(supervisor, cluster):
        play.last = supervisor
        yield
        first = cluster.newest("m0")
        first.incarnation = "a" * 32
        yield
        signal.raise_signal(signal.SIGINT)
        yield
        cluster.newest(HEAD).slow = slow
        first.ended, Cluster.tokens = Outcome("left", ""), Tokens(32, 0, 0, 32, 0)
        yield
        Cluster.tokens = Tokens(32, 32, 0, 0, 0)

    assert play(script).how == "stopped"
    assert play.last.status.tokens == Tokens(32, 32, 0, 0, 0)


def test_who_never_trained_does_not_hold_up_the_end(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "compiles", "n2": "trained"}
        yield
        yield
        trained = cluster.newest("j-trained")
        trained.incarnation = "b" * 32
        yield
        yield
        finish(cluster)
        for _ in range(5):  # its last rows are still to come
            yield
        trained.ended = Outcome("ended", "")

    assert play(script).message == "finished: 8 steps"


def test_a_process_that_does_not_answer_is_killed_and_started_again(play, monkeypatch):
    monkeypatch.setattr(kept_module, "HUNG", 0.3)
    monkeypatch.setattr(kept_module, "HUNG_MEMBER", 0.3)

    def script(supervisor, cluster):
        yield
        for name in ("m0", "aggregator-0", HEAD):
            stopped = cluster.newest(name)
            stopped.answers = False
            while not stopped.gone:
                yield
            stopped.ended = Outcome("dead", "killed")
            while cluster.newest(name) is stopped:
                yield
            yield
        finish(cluster)

    assert play(script).how == "finished"
    words = "has not answered for 0 s: killing it"
    assert [words in each["message"] for each in play.events("note")] == [True] * 3
    assert [each["message"] for each in play.events("coordinator")] == ["it died; restarting it"]


def test_a_coordinator_that_hangs_once_the_run_has_ended_is_started_again(play, monkeypatch):
    """A member that has not heard of the end would wait for its answer for ever, and the run with it."""
    monkeypatch.setattr(kept_module, "HUNG", 0.3)

    def script(supervisor, cluster):
        yield
        head = cluster.newest(HEAD)
        cluster.newest("m0").incarnation = "a" * 32
        head.ended, head.answers = Outcome("ended", ""), False
        end = time.monotonic() + 20
        while cluster.newest(HEAD) is head and time.monotonic() < end:
            yield
        assert cluster.newest(HEAD) is not head and head.gone
        finish(cluster)

    assert play(script).how == "finished"


def test_a_supervisor_that_stood_still_takes_nobody_for_silent(play):
    """Nobody was asked while it was stopped."""

    def script(supervisor, cluster):
        yield
        yield
        supervisor._clock._read -= 3600.0  # since it looked last
        yield
        yield
        assert not [each.name for each in cluster.started if each.gone]
        finish(cluster)

    assert play(script).how == "finished"


TWO = replace(PLAN, swarm=replace(SWARM, members=2))
WRONG = Outcome("wrong", "m1 cannot join: its code differs from the run's")
FAILED = Outcome("failed", "ValueError: no such device")
DIVERGES = Outcome("over", "m1 gave up after 5 incarnations without a finite push")


@pytest.mark.parametrize("outcome", [WRONG, FAILED, DIVERGES])
def test_one_member_that_fails_ends_no_run_that_another_one_trains(play, outcome, monkeypatch):
    def script(supervisor, cluster):
        yield
        for _ in range(module.FAILURES if outcome is FAILED else 1):
            cluster.newest("m1").ended = outcome
            yield
            yield
        (alarm,) = supervisor.status.alarms
        assert alarm.startswith("m1 does not train: m1") and outcome.reason in alarm
        assert states(supervisor) == {"m1": "lost"}
        tries = len(cluster.started)
        yield
        assert len(cluster.started) == tries
        supervisor.kept["m1"].wake = 0.0  # ten minutes later
        yield
        cluster.newest("m1").rows = [{"step": 1, "tokens": 8, "loss": 1.0, "version": 1}]
        yield
        yield
        assert len(cluster.started) == tries + 1 and supervisor.status.alarms == ()
        finish(cluster)
        cluster.newest("m1").ended = Outcome("ended", "")

    assert play(script, TWO).how == "finished"
    assert [each["message"].partition(":")[0] for each in play.events("alarm")] == ["m1 does not train"]


@pytest.mark.parametrize(("how", "error"), [("wrong", InputError), ("over", RunFailed)])
def test_a_run_that_nobody_can_train_ends_with_the_reason(play, how, error):
    def script(supervisor, cluster):
        yield
        cluster.newest("m1").ended = WRONG
        yield
        yield
        cluster.newest("m0").ended = Outcome(how, "m0 cannot train for this reason")
        yield

    with pytest.raises(error, match="m0 cannot train for this reason"):
        play(script, TWO)

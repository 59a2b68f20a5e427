"""The supervisor with a cluster that is played: machines that come, go and come back, and the end of a run."""

import json
import signal
from dataclasses import replace
from itertools import chain

import pytest

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.summary import Leased, Summary, Tokens
from tpuswarm.swarm.core.values import Incarnation
from tpuswarm.swarm.engines.ray import Outcome
from tpuswarm.swarm.processes.plan import HEAD, Plan, Swarm
from tpuswarm.swarm.storage.objects import checked_member
from tpuswarm.swarm.supervision import kept as kept_module
from tpuswarm.swarm.supervision import supervisor as module
from tpuswarm.swarm.supervision import telling
from tpuswarm.swarm.supervision.kept import guest_name
from tpuswarm.swarm.supervision.supervisor import Supervisor
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.train.run.directory import Run

SWARM = Swarm("run", 1, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1)
PLAN = Plan(
    SWARM, "module:Recipe", {}, {"steps": 8, "batch": 2}, files={}, shared={}, tokens_per_row=4, data="data",
    code="code", evaluate_every=None,
)  # fmt: skip


class Played:
    """A process without any: the test says how it stands and how it ended."""

    def __init__(self, name: str, node: str | None):
        self.name, self.node = name, node
        self.ended: Outcome | None = None
        self.answers, self.gone, self.incarnation, self.evaluating = True, False, None, False
        self.rows: list[dict] = []

    def outcome(self):
        return self.ended

    def look(self, since, seconds=0.0):
        if not self.answers or self.ended:
            return None
        if self.name == HEAD:
            leased = [Leased(Incarnation("x", each), 0, None, 9.0, 0) for each in Cluster.leased]
            return 1, Summary(0, 1, False, "", Tokens(0, 0, 0, 0, 0), tuple(leased), None)
        seen = {"incarnation": self.incarnation, "base": 0, "tokens": 0, "at_risk": 7, "rows_per_s": 3.0}
        seen["evaluating"] = self.evaluating
        seen["rows"], self.rows = self.rows, []
        return 2, seen if self.name[0] in "mj" else None

    def leave(self):
        pass

    def kill(self):
        self.gone = True


class Cluster:
    found, address, state_bytes = False, "here:1", 0
    leased: tuple[str, ...] = ()

    def __init__(self):
        self.nodes: dict[str, str] = {}
        self.started: list[Played] = []
        self.silent = False
        Cluster.leased = ()

    def joined(self):
        return dict(self.nodes)

    def start(self, name, maker, arguments, environment, log, node):
        self.started.append(Played(name, node))
        self.started[-1].evaluates = arguments.get("evaluates")
        self.started[-1].answers = not self.silent
        return self.started[-1]

    def newest(self, name: str) -> Played:
        return [each for each in self.started if each.name == name][-1]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Let a supervisor live until its run ends; the test's generator goes on to its next `yield` at each look."""
    for place, name in ((module, "LOOK"), (module, "BACKOFF"), (telling, "STATUS")):
        monkeypatch.setattr(place, name, 0.0)
    cluster = Cluster()

    def run(script, plan=PLAN):
        steps = None

        def watch(supervisor):
            nonlocal steps
            steps = steps or chain(script(supervisor, cluster), range(5))
            assert next(steps, None) != 4, "the script is over and the run is not"

        held = Run(tmp_path / "run")
        try:
            return Supervisor(held, plan, cluster, Screen(), lambda number: {}, watch).go()
        finally:
            held.close()

    run.events = lambda kind: [
        event
        for event in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if event["event"] == kind
    ]
    return run


def states(supervisor):
    return {each.id: each.state for each in supervisor.status.members if each.id != "m0"}


def finish(cluster):
    """The run has ended: the coordinator says so, the first member has handed in its last rows."""
    for name in (HEAD, "m0"):
        cluster.newest(name).ended = Outcome("ended", "")


def test_a_machine_that_comes_back_is_the_same_member(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu 7", "n2": "tpu-8"}
        yield
        yield
        assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
        first = cluster.newest("j-tpu-7")
        first.incarnation = "a" * 32
        Cluster.leased = (first.incarnation,)
        yield
        yield
        assert states(supervisor)["j-tpu-7"] == "alive"
        for node in ("n3", "n4", "n5"):  # preempted again and again
            cluster.newest("j-tpu-7").ended = Outcome("dead", "its node died")
            del cluster.nodes[next(each for each, host in cluster.nodes.items() if host == "tpu 7")]
            Cluster.leased = ()
            yield
            yield
            yield
            assert states(supervisor) == {"j-tpu-7": "lost", "j-tpu-8": "joining"}
            assert all(each.tokens_per_s is None for each in supervisor.status.members if each.state == "lost")
            cluster.nodes[node] = "tpu 7"
            yield
            yield
            assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
            assert cluster.newest("j-tpu-7").node == node
        finish(cluster)

    assert play(script).how == "finished"
    lost = play.events("lost")
    assert [each["member"] for each in lost] == ["j-tpu-7"] * 3 and all(each["own_machine"] for each in lost)


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


def test_two_members_on_one_machine_have_two_names(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu", "n2": "tpu", "n3": "tpu"}
        for _ in range(5):  # the second is named when the first has answered
            yield
        assert list(states(supervisor)) == ["j-tpu", "j-tpu-2", "j-tpu-3"]
        cluster.newest("j-tpu-2").ended = Outcome("left", "")
        yield
        yield
        assert states(supervisor)["j-tpu-2"] == "left"
        cluster.nodes["n4"] = "tpu"  # it is given `join` again before the node of its first life is gone
        yield
        yield
        assert cluster.newest("j-tpu-2").node == "n4" and not cluster.newest("j-tpu-2").gone
        assert list(states(supervisor).items()) == [(each, "joining") for each in ("j-tpu", "j-tpu-2", "j-tpu-3")]
        assert len([each for each in cluster.started if each.name[0] == "j"]) == 4
        finish(cluster)

    assert play(script).how == "finished"


def test_back_before_its_end_was_noticed(play):
    """Ray has another node of that machine before it says that the process on the first one is dead."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        yield
        first = cluster.newest("j-tpu")
        cluster.nodes = {"n2": "tpu"}
        yield
        yield
        assert cluster.newest("j-tpu") is first  # two processes would be one member
        first.ended = Outcome("dead", "its node died")
        yield
        yield
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        finish(cluster)

    assert play(script).how == "finished" and len(play.events("lost")) == 1


def test_back_before_its_node_is_known_to_be_gone(play):
    """Its process is known to be dead at once, and made again there in vain; Ray lists the node for 10 s."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        yield
        cluster.newest("j-tpu").ended = Outcome("dead", "killed")
        cluster.silent = True
        yield
        cluster.nodes = {"n1": "tpu", "n2": "tpu"}
        for _ in range(3):
            yield
            assert list(states(supervisor)) == ["j-tpu"]
        assert cluster.newest("j-tpu").node == "n1"
        cluster.newest("j-tpu").ended = Outcome("dead", "its node died")
        del cluster.nodes["n1"]
        cluster.silent = False
        yield
        yield
        yield
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        finish(cluster)

    assert play(script).how == "finished" and len(play.events("lost")) == 1


def test_another_one_evaluates_where_the_machine_that_did_has_left(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "first", "n2": "second"}
        yield
        yield
        assert cluster.newest("j-first").evaluates and not cluster.newest("j-second").evaluates
        for name in ("j-first", "j-second"):  # both are killed: who evaluates may come back, so it stays that one
            cluster.newest(name).ended = Outcome("dead", "killed")
            yield
            yield
            yield
            assert cluster.newest(name).evaluates == (name == "j-first")
        cluster.newest("j-first").ended = Outcome("dead", "its node died")
        del cluster.nodes["n1"]
        yield
        yield
        yield
        cluster.newest("j-second").ended = Outcome("dead", "killed")
        yield
        yield
        yield
        assert cluster.newest("j-second").evaluates
        cluster.newest(HEAD).ended = cluster.newest("j-second").ended = Outcome("ended", "")

    nobody = replace(PLAN, swarm=replace(SWARM, members=0))
    assert play(script, nobody).how == "finished"


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


def test_a_machine_that_is_silent_and_has_no_lease_is_lost(play, monkeypatch):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        guest = cluster.newest("j-tpu")
        guest.incarnation = "c" * 32
        Cluster.leased = (guest.incarnation,)
        yield
        yield
        assert states(supervisor) == {"j-tpu": "alive"}
        guest.answers, Cluster.leased = False, ()
        yield
        yield
        assert states(supervisor) == {"j-tpu": "joining"}
        monkeypatch.setattr(kept_module, "SILENT", 0.0)
        yield
        assert states(supervisor) == {"j-tpu": "lost"}
        assert supervisor.status.members[0].state == "joining"  # one on this machine: its end is noticed at once
        finish(cluster)
        guest.ended = Outcome("dead", "its node died")

    assert play(script).how == "finished"


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


@pytest.mark.parametrize("outcome", [WRONG, FAILED])
def test_one_member_that_fails_ends_no_run_that_another_one_trains(play, outcome, monkeypatch):
    def script(supervisor, cluster):
        yield
        for _ in range(1 if outcome is WRONG else module.FAILURES):
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


def test_a_run_that_nobody_can_train_ends_with_the_reason(play):
    def script(supervisor, cluster):
        yield
        cluster.newest("m1").ended = WRONG
        yield
        yield
        cluster.newest("m0").ended = Outcome("wrong", "m0 cannot join: its data differs from the run's")
        yield

    with pytest.raises(InputError, match="m0 cannot join: its data differs"):
        play(script, TWO)


def test_names_of_machines_are_made_safe():
    for host in ("t1v-n-0a1b-w-0", "büro/../ rechner", "x" * 300, "", ".."):
        name = guest_name(host, ())
        assert checked_member(name) == name and name.startswith("j-")
        taken = {name}
        for _ in range(20):
            taken.add(checked_member(guest_name(host, taken)))
        assert len(taken) == 21
    assert guest_name("a", {"j-a", "j-a-2"}) == "j-a-3" and guest_name("a-2", {"j-a-2"}) == "j-a-2-2"

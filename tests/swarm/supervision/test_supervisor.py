"""The supervisor: members at work, machines that join and leave, processes that fail, and the end of a run."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.swarm.supervision.fake_cluster import PLAN, SWARM, rounds, states
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.run_plan import COORDINATOR
from tpuswarm.swarm.storage.objects import check_member_name
from tpuswarm.swarm.supervision import supervised_process as process_module
from tpuswarm.swarm.supervision import supervisor as module
from tpuswarm.swarm.supervision.supervised_process import guest_name
from tpuswarm.swarm.views.status import RunView
from tpuswarm.train.run.directory import METRICS
from tpuswarm.watch.page.metrics import metrics_text
from tpuswarm.watch.state import State


def test_status_of_a_member_through_its_life(supervise):
    """One that evaluates has no speed; tokens cover all its incarnations; no member is alive after the run."""
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

    supervise.finished(script)
    status = supervisors[0].status
    (seen,) = status.members
    assert (seen.state, seen.pid, seen.tokens_per_s, status.tokens_per_s) == ("left", None, None, 0.0)


def test_run_ends_when_ray_itself_has_died(supervise):
    def script(supervisor, cluster):
        yield
        cluster.failure = RunFailed("a process of Ray died")
        yield

    with pytest.raises(RunFailed, match="a process of Ray died"):
        supervise(script)


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


@pytest.mark.parametrize("ends", [True, False])
def test_stop_says_how_many_tokens_a_member_could_not_push(supervise, monkeypatch, ends):
    """It leaves with work that it trained after its last push, or has not pushed when the time is over."""

    def script(supervisor, cluster):
        yield
        first = cluster.newest("m0")
        first.incarnation = "a" * 32
        yield from rounds(2)
        signal.raise_signal(signal.SIGINT)
        if not ends:
            monkeypatch.setattr(module, "NOTICE_S", 0.0)
        yield from rounds(2)
        first.ended = Outcome("left", "")

    assert "7 trained tokens were not pushed in time" in supervise(script).message
    left = supervise.events("left")
    assert [event["tokens"] for event in left] == [7] * ends


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
        cluster.newest(COORDINATOR).is_slow = is_slow
        first.ended, cluster.tokens = Outcome("left", ""), Tokens(32, 0, 0, 32, 0)
        yield
        cluster.tokens = Tokens(32, 32, 0, 0, 0)

    assert supervise(script).how == "stopped"
    assert supervisors[0].status.tokens == Tokens(32, 32, 0, 0, 0)


def test_step_in_which_nothing_counts_is_no_sign_of_divergence(supervise):
    def script(supervisor, cluster):
        yield
        row = {"step": 1, "tokens": 8, "version": 0}
        cluster.newest("m0").lease("a")
        cluster.newest("m0").rows = [row | {"loss": 1.0}, row | {"loss": None, "uncounted": True}, row | {"loss": None}]
        yield from rounds(2)
        assert [step.loss for step in supervisor.processes["m0"].steps] == [1.0, None]

    supervise.finished(script)


def test_member_learns_that_its_rows_are_stored_after_they_are_on_disk(supervise, monkeypatch):
    """A power cut leaves only what is synchronized; a member pushes only work whose rows are stored."""
    fsync, on_disk, requests = os.fsync, [b""], []

    def synchronize(handle):
        fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == METRICS:
            on_disk.append(path.read_bytes())

    def script(supervisor, cluster):
        yield
        first = cluster.newest("m0")
        report = first.report
        first.report = lambda since, *wait: requests.append((since, on_disk[-1].count(b"\n"))) or report(since, *wait)
        for step in range(1, 4):
            first.rows = [{"step": step, "tokens": 8 * step, "loss": 1.0, "version": 0, "member": "m0"}]
            yield from rounds(2)

    monkeypatch.setattr(os, "fsync", synchronize)
    supervise.finished(script)
    assert requests[-1][0] == 3 and all(since <= stored for since, stored in requests)


def test_counters_never_fall(supervise):
    """A new coordinator forgets what a dead incarnation trained after the last commit; a new supervisor, everything."""
    seen = []

    def look(supervisor):
        state = State("r", RunView("r", "toy", "running", 1, "", 8, 8, "tokens", supervisor.status), None, 1.0)
        families = text_string_to_metric_families(metrics_text(state, ()).decode())
        seen.append({sample.name: sample.value for family in families for sample in family.samples})

    def script(supervisor, cluster):
        for processed in (32, 24) if not seen else (24, 24):
            cluster.tokens = Tokens(processed, 16, 8, 0, processed - 24)
            for _ in range(3):
                yield
                look(supervisor)
            if not supervisor.processes["m0"].row:
                cluster.newest("m0").rows = [{"step": 3, "tokens": 24, "loss": 1.0, "version": 0, "member": "m0"}]
            cluster.newest(COORDINATOR).die()
        assert supervisor.status.tokens == Tokens(32, 16, 8, 0, 8)

    supervise.finished(script)
    first_of_the_second = len(seen)
    supervise.finished(script)
    assert seen[first_of_the_second]["tpuswarm_tokens_total"] > 0, "before its coordinator answers"
    for name in ("tokens_processed", "tokens_dropped", "carried_bytes", "member_tokens", "tokens", "steps"):
        values = [found[f"tpuswarm_{name}_total"] for found in seen if f"tpuswarm_{name}_total" in found]
        assert values == sorted(values) and len(values) > 6, name
    assert seen[-1]["tpuswarm_tokens_processed_total"] == 32 and seen[-1]["tpuswarm_member_tokens_total"] == 24


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
    monkeypatch.setattr(process_module, "HUNG_S", 1.0)
    monkeypatch.setattr(process_module, "HUNG_MEMBER_S", 1.0)

    def script(supervisor, cluster):
        yield
        for name in ("m0", "aggregator-0", COORDINATOR):
            hung = cluster.newest(name)
            hung.answers = False
            while not hung.gone:
                yield
            hung.die()
            while cluster.newest(name) is hung:
                yield
            yield

    supervise.finished(script)
    notes = [event["message"].partition(" has not answered for ") for event in supervise.events("note")]
    assert {name for name, _, _ in notes} == {"m0", "aggregator-0", COORDINATOR}
    assert all(rest.endswith(" s: restarting it") for _, _, rest in notes)
    assert [event["message"] for event in supervise.events("coordinator")] == ["it died; restarting it"]


def test_coordinator_that_hangs_after_the_end_is_restarted(supervise, monkeypatch):
    """A member that has not heard of the end would wait forever, and the run with it."""
    monkeypatch.setattr(process_module, "HUNG_S", 1.0)

    def script(supervisor, cluster):
        yield
        head = cluster.newest(COORDINATOR)
        cluster.newest("m0").incarnation = "a" * 32
        head.ended, head.answers = Outcome("ended", ""), False
        end = time.monotonic() + 20
        while cluster.newest(COORDINATOR) is head and time.monotonic() < end:
            yield
        assert cluster.newest(COORDINATOR) is not head and head.gone

    supervise.finished(script)


def test_supervisor_that_was_stopped_kills_nobody(supervise):
    def script(supervisor, cluster):
        yield from rounds(2)
        supervisor._clock._read -= 3600.0  # an hour passed since its last round
        yield from rounds(2)
        assert not [process.name for process in cluster.started if process.gone]

    supervise.finished(script)


TWO_MEMBERS = replace(PLAN, swarm=replace(SWARM, members=2))
WRONG = Outcome("wrong", "m1 cannot join: its code differs from the run's")
FAILED = Outcome("failed", "ValueError: no such device")
DIVERGES = Outcome("over", "m1 gave up after 5 incarnations without a finite push")


@pytest.mark.parametrize("outcome", [WRONG, FAILED, DIVERGES])
def test_run_continues_without_a_member_that_fails(supervise, outcome):
    def script(supervisor, cluster):
        yield
        for _ in range(module.MAX_FAILURES if outcome is FAILED else 1):
            cluster.newest("m1").ended = outcome
            yield from rounds(2)
        (alarm,) = supervisor.status.alarms
        assert alarm.startswith("m1 does not train: m1") and outcome.reason in alarm
        assert states(supervisor) == {"m1": "lost"}
        tries = len(cluster.started)
        yield
        assert len(cluster.started) == tries
        supervisor.processes["m1"].restart_at = 0.0  # ten minutes later
        yield
        cluster.newest("m1").rows = [{"step": 1, "tokens": 8, "loss": 1.0, "version": 1}]
        yield from rounds(2)
        assert len(cluster.started) == tries + 1 and supervisor.status.alarms == ()

    supervise.finished(script, TWO_MEMBERS)
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


XLA = "F1129 22:32:16.7504 {pid} parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_bogus\n"


def test_run_whose_members_cannot_start_ends_with_their_own_error(supervise):
    def script(supervisor, cluster):
        for pid in (17, 99):
            yield from rounds(3)
            for name in ("m0", "m1"):
                cluster.newest(name).die(written=XLA.format(pid=pid))
        yield from rounds(3)

    error = r"m[01] failed 2 times .*: Unknown flag in XLA_FLAGS: --xla_bogus \(logs/m[01]\.log\)"
    with pytest.raises(RunFailed, match=error):
        supervise(script, TWO_MEMBERS)
    assert {event["message"] for event in supervise.events("lost")} == {"Unknown flag in XLA_FLAGS: --xla_bogus"}


@pytest.mark.parametrize("case", ["no error", "another error", "after a step", "no cause", "once after a step"])
def test_member_that_dies_for_no_lasting_reason_is_restarted(supervise, case):
    def script(supervisor, cluster):
        for number in range(module.MAX_DEATHS - 1):
            yield
            member = cluster.newest("m0")
            if case == "after a step" or (case == "once after a step" and number % 2 == 0):
                member.rows = [{"step": 1, "tokens": 8, "loss": 1.0, "version": 0}]
                yield
            error = f"OSError: {number * (case == 'another error')}"
            error = "Fatal Python error: Aborted" if case == "no cause" else error
            member.die(written="" if case == "no error" else f"{error}\n")
            yield from rounds(2)

    supervise.finished(script)
    assert len(supervise.events("lost")) == module.MAX_DEATHS - 1


def test_machine_that_returns_is_the_same_member(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu 7", "n2": "tpu-8"}
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
        cluster.newest("j-tpu-7").lease("a")
        yield from rounds(2)
        assert states(supervisor)["j-tpu-7"] == "alive"
        for node in ("n3", "n4", "n5"):  # preempted again and again
            cluster.remove("tpu 7")
            yield from rounds(3)
            assert states(supervisor) == {"j-tpu-7": "lost", "j-tpu-8": "joining"}
            cluster.nodes[node] = "tpu 7"
            yield from rounds(2)
            assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
            assert cluster.newest("j-tpu-7").node == node

    supervise.finished(script)
    lost = supervise.events("lost")
    assert [(event["member"], event["own_machine"]) for event in lost] == [("j-tpu-7", True)] * 3


def test_members_on_one_machine_have_names_of_their_own(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu", "n2": "tpu", "n3": "tpu"}
        yield from rounds(5)  # the second gets its name when the first has answered
        assert list(states(supervisor)) == ["j-tpu", "j-tpu-2", "j-tpu-3"]
        cluster.newest("j-tpu-2").ended = Outcome("left", "")
        yield from rounds(2)
        assert states(supervisor)["j-tpu-2"] == "left"
        cluster.nodes["n4"] = "tpu"  # it joins again before Ray has dropped its first node
        yield from rounds(2)
        assert cluster.newest("j-tpu-2").node == "n4" and not cluster.newest("j-tpu-2").gone
        assert list(states(supervisor).items()) == [(name, "joining") for name in ("j-tpu", "j-tpu-2", "j-tpu-3")]
        assert len([process for process in cluster.started if process.name[0] == "j"]) == 4

    supervise.finished(script)


def test_machine_that_returns_before_its_process_is_known_to_be_dead(supervise):
    """Ray may list the machine's new node before it reports the death of the process on the old one."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield from rounds(2)
        first = cluster.newest("j-tpu")
        cluster.nodes = {"n2": "tpu"}
        yield from rounds(2)
        assert cluster.newest("j-tpu") is first  # two processes would be one member
        first.die("its node died")
        yield from rounds(2)
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]

    supervise.finished(script)
    assert len(supervise.events("lost")) == 1


def test_machine_that_returns_before_its_node_is_known_to_be_gone(supervise):
    """Its process is started again on the old node, in vain: Ray lists that node for 10 s more."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield from rounds(2)
        cluster.newest("j-tpu").die()
        cluster.is_silent = True
        yield
        cluster.nodes = {"n1": "tpu", "n2": "tpu"}
        for _ in range(3):
            yield
            assert list(states(supervisor)) == ["j-tpu"]
        assert cluster.newest("j-tpu").node == "n1"
        cluster.is_silent = False
        cluster.remove("tpu")
        yield from rounds(3)
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]

    supervise.finished(script)
    assert len(supervise.events("lost")) == 1


def test_another_member_evaluates_once_the_evaluating_machine_has_left(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "first", "n2": "second"}
        yield from rounds(2)
        assert cluster.newest("j-first").evaluates and not cluster.newest("j-second").evaluates
        for name in ("j-first", "j-second"):  # killed, but their machines stay: the same one evaluates
            cluster.newest(name).die()
            yield from rounds(3)
            assert cluster.newest(name).evaluates == (name == "j-first")
        cluster.remove("first")
        yield from rounds(3)
        cluster.newest("j-second").die()
        yield from rounds(3)
        assert cluster.newest("j-second").evaluates
        cluster.newest("j-second").ended = Outcome("ended", "")

    supervise.finished(script, replace(PLAN, swarm=replace(SWARM, members=0)))


def test_silent_machine_without_a_lease_is_lost(supervise, monkeypatch):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        guest = cluster.newest("j-tpu")
        guest.lease("c")
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu": "alive"}
        guest.answers, cluster.leased = False, ()
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu": "joining"}
        monkeypatch.setattr(process_module, "SILENCE_S", 0.0)
        yield
        assert states(supervisor) == {"j-tpu": "lost"}
        assert supervisor.status.members[0].state == "joining"  # one on this machine: its end is noticed at once
        guest.die("its node died")

    supervise.finished(script)


def test_names_of_machines_are_made_safe():
    for host in ("t1v-n-0a1b-w-0", "büro/../ rechner", "x" * 300, "", ".."):
        taken = set()
        for _ in range(21):
            name = guest_name(host, taken)
            assert check_member_name(name) == name and name.startswith("j-") and name not in taken
            taken.add(name)
    assert guest_name("a", {"j-a", "j-a-2"}) == "j-a-3" and guest_name("a-2", {"j-a-2"}) == "j-a-2-2"

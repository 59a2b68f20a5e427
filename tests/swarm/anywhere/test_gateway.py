"""An invited member speaks for itself alone, and makes only the requests of members."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.anywhere.gateway import (
    FRESH_S,
    GATEWAY,
    MAX_MEMBERS_OF_A_PERSON,
    MAX_UNACCEPTED_PUSHES,
    MAX_UNPUSHED_ROWS,
    MAX_WASTED_PAYLOADS,
    MEMBER_REQUESTS,
    Admitted,
    Gateway,
    Reported,
)
from tpuswarm.swarm.anywhere.reports import MAX_ROWS
from tpuswarm.swarm.core.messages import Accepted, Heartbeat, Refused
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation
from tpuswarm.swarm.processes.aggregator import Shard
from tpuswarm.swarm.processes.coordinator import Begin, Coordinator, FoundingCoordinator, Wait
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.train.look.pictures import PICTURES, TEXTS

ADMITTED = Admitted("ada-colab", "{}", ("aggregator-0",), "aggregator-0", 0, False)
ROW = {"step": 1, "tokens": 8, "loss": 2.5, "member": "ada-colab", "version": 0, "wall_s": 0.5}
EVALUATION = {"step": 1, "tokens": 8, "eval_loss": 2.5, "member": "ada-colab", "version": 0}
REPORT = {
    "incarnation": "a" * 32, "base": 0, "tokens": 8, "at_risk": 0, "rows_per_s": 1.5, "awaits_storage": False,
    "push_bytes_per_s": None, "round_trip_s": 0.1,
    "evaluating": False, "first": 0, "rows": (ROW,),
}  # fmt: skip


class Swarm:
    def __init__(self):
        self.now, self.calls = 0.0, []
        self.gateway = Gateway(self.calls.append, lambda: self.now)

    def join(self, member="ada-colab", instance="m.1", person="ada"):
        return self.gateway.serve(person, Call(GATEWAY, "join", (member, instance, 7, {"jax": "1"})))

    def report(self, report=REPORT, how="", instance="m.1", person="ada", member="ada-colab"):
        return self.gateway.serve(person, Call(GATEWAY, "report", (member, instance, report, how, "")))


def requests_of(member: str) -> list[Call]:
    who = Incarnation(member, "a" * 32)
    header = Header(Identity(who, 1), "run", 0, NO_ROWS, 0, 1, "plain", 0.0, True, ())
    beat = Heartbeat(who, Digests("", "", "", ""), True, 0, NO_ROWS, NO_ROWS, None, None, 0)
    calls = [("hello", (member,)), ("beat", (beat,)), ("push", (header,)), ("leave", (who,))]
    return [Call("coordinator", *call) for call in calls] + [Call("aggregator-0", "put", (Identity(who, 1), 0, {}, ""))]


def test_member_is_admitted_when_the_supervisor_has_decided():
    swarm = Swarm()
    assert isinstance(swarm.join(), Wait)
    swarm.gateway.update("ada-colab", "m.1", {"admitted": ADMITTED})
    assert swarm.join() == ADMITTED


@pytest.mark.parametrize("call", requests_of("ada-colab"), ids=lambda call: call.method)
def test_person_speaks_for_their_own_members_only(call):
    swarm = Swarm()
    swarm.gateway.serve("ada", call)
    assert swarm.calls == [call]
    for other in ("bob", "ad", "ada-colab", "m0"):
        assert isinstance(swarm.gateway.serve(other, call), Refused)
    assert swarm.calls == [call]


@pytest.mark.parametrize("member", ["m0", "j-host", "bob-x", "adam-x", "ada", "ada-../x"])
def test_name_of_somebody_else_is_refused(member):
    swarm = Swarm()
    answers = [swarm.gateway.serve("ada", call) for call in requests_of(member)]
    if not member.startswith("ada"):
        assert all(isinstance(answer, Refused) for answer in answers) and not swarm.calls
    if member != "ada":
        assert isinstance(swarm.join(member), Refused) and not swarm.gateway.members


def test_only_requests_of_members_pass():
    known = {name for kind in (Coordinator, FoundingCoordinator, Shard) for name in dir(kind)
             if getattr(getattr(kind, name), "is_request", False)}  # fmt: skip
    assert set(MEMBER_REQUESTS) < known
    swarm = Swarm()
    for method in [*(known - set(MEMBER_REQUESTS)), "run", "__init__", "", 7]:
        for address in ("coordinator", "aggregator-0", GATEWAY):
            assert isinstance(swarm.gateway.serve("ada", Call(address, method, ())), Refused)
    assert not swarm.calls


def test_only_a_person_who_was_asked_creates_the_first_version():
    swarm, answers = Swarm(), {"hello": Wait(), "found": "stored"}
    swarm.gateway.calls = lambda call: answers[call.method]

    def found(person):
        swarm.gateway.serve(person, Call("coordinator", "hello", (f"{person}-x",)))
        return swarm.gateway.serve(person, Call("aggregator-0", "found", ()))

    assert isinstance(found("ada"), Refused)
    answers["hello"] = Begin()
    assert found("ada") == "stored"
    answers["hello"] = Wait()
    assert isinstance(found("bob"), Refused) and found("ada") == "stored"


def test_newer_instance_takes_the_place_of_the_older_one():
    swarm = Swarm()
    swarm.join()
    swarm.gateway.update("ada-colab", "m.1", {"admitted": ADMITTED})
    assert isinstance(swarm.join(instance="m.2"), Wait)
    assert "took the place" in swarm.report().reason
    swarm.gateway.update("ada-colab", "m.1", {"admitted": ADMITTED})
    assert isinstance(swarm.join(instance="m.2"), Wait), "a decision about the older one is not for the newer one"


def test_another_machine_takes_no_name_of_one_that_works():
    swarm = Swarm()
    swarm.join()
    assert "name this one with --name" in swarm.join(instance="n.1").reason
    assert isinstance(swarm.report(), Reported), "the first one goes on"
    swarm.now += FRESH_S
    assert isinstance(swarm.join(instance="n.1"), Wait), "a new machine after the first one has gone"


def test_report_is_answered_with_what_is_stored():
    swarm = Swarm()
    assert isinstance(swarm.report(), Unreachable), "a gateway that has died has forgotten its members"
    swarm.join()
    assert swarm.report().rows == 0
    swarm.gateway.update("ada-colab", "m.1", {"rows_stored": 1, "should_leave": True})
    answer = swarm.report(how="left")
    assert (answer.rows, answer.should_leave) == (1, True)
    assert swarm.gateway.members["ada-colab"].outcome.how == "left"


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": "../x"}, {"base": -1}, {"tokens": "8"}, {"rows_per_s": float("nan")}, {"evaluating": 1},
        {"more": 1}, {"rows": [ROW]}, {"rows": ({**ROW, "member": "m0"},)}, {"rows": ({**ROW, "loss": "low"},)},
        {"rows": ({**ROW, "pictures": {"../../x": b"1"}},)}, {"rows": ({"member": "ada-colab"},)},
        {"rows": ({**ROW, "version": True},)}, {"rows": ({**ROW, "\x1b[2J": 1},)}, {"rows": ({**ROW, "x" * 65: 1},)},
        {"rows": ({**ROW, "step": 1.5},)}, {"rows": ({**ROW} | {f"c{n}": n for n in range(64)},)},
        {"rows": ({**ROW, "loss": float("inf")},)}, {"rows": ({**ROW, "loss": 1e308},)}, {"rows_per_s": -1.0},
        {"rows": ({**ROW, "grad_norm": "high"},)}, {"rows": ({**EVALUATION, PICTURES: 1},)},
        {"rows": ({**EVALUATION, TEXTS: 1},)}, {"rows": ({**EVALUATION, "fid": "x"},)}, {"first": -1},
        {"at_risk": 2**60},
    ],
)  # fmt: skip
def test_malformed_report_is_refused_and_forgotten(change):
    swarm = Swarm()
    swarm.join()
    assert isinstance(swarm.report({**REPORT, **change}), Refused)
    assert swarm.gateway.members["ada-colab"].report is None


@pytest.mark.parametrize(
    "about",
    [("1", 7, {"jax": "\x1b[2J"}), ("1", 7, {"a\nb": "1"}), ("1", 7, {"jax": "1" * 65}), ("1" * 65, 7, {}),
     ("1", 7, {str(number): "" for number in range(17)})],
)  # fmt: skip
def test_description_of_a_member_is_short_and_printable(about):
    swarm = Swarm()
    assert isinstance(swarm.gateway.serve("ada", Call(GATEWAY, "join", ("ada-colab", *about))), Refused)
    assert not swarm.gateway.members


def test_reason_of_an_end_is_shown_as_one_short_line():
    swarm = Swarm()
    swarm.join()
    reason = "no\nfile: \x1b[2J" + "x" * 1000
    swarm.gateway.serve("ada", Call(GATEWAY, "report", ("ada-colab", "m.1", REPORT, "failed", reason)))
    outcome = swarm.gateway.members["ada-colab"].outcome
    assert outcome.reason.startswith("no file:  [2Jx") and len(outcome.reason) == 500
    assert isinstance(swarm.report(how="gone"), Refused) and swarm.gateway.members["ada-colab"].outcome == outcome


@given(st.recursive(st.none() | st.integers() | st.text() | st.floats(), lambda part: st.tuples(part, part)))
def test_no_arguments_end_the_gateway(value):
    swarm = Swarm()
    for method in ("join", "report", *MEMBER_REQUESTS):
        for address in (GATEWAY, "coordinator"):
            for arguments in ((value,), (value,) * 4, (value,) * 5, ()):
                swarm.gateway.serve("ada", Call(address, method, arguments))
    assert all(member.startswith("ada") for member in swarm.gateway.members)


def test_person_cannot_fill_the_gateway_with_members():
    swarm = Swarm()
    for number in range(MAX_MEMBERS_OF_A_PERSON):
        swarm.join(f"ada-{number}")
        swarm.report({**REPORT, "rows": ()}, how="left", member=f"ada-{number}")
    assert "64 members already" in swarm.join("ada-more").reason
    assert isinstance(swarm.join("bob-1", person="bob"), Wait)
    swarm.now = 1e6
    assert isinstance(swarm.join("ada-more"), Wait), "silent members are forgotten"


def test_payloads_of_pushes_that_never_come_do_not_fill_the_heads_disk():
    swarm, who = Swarm(), Incarnation("ada-colab", "a" * 32)
    swarm.gateway.calls = lambda call: Accepted()

    def put(sequence):
        return swarm.gateway.serve("ada", Call("aggregator-0", "put", (Identity(who, sequence), 0, {}, "d" * 64)))

    for sequence in range(1, MAX_UNACCEPTED_PUSHES + 1):
        assert put(sequence) == put(sequence) == Accepted()
    assert "never accepted" in put(1000).reason
    header = Header(Identity(who, 5), "run", 0, NO_ROWS, 0, 1, "plain", 0.0, True, ())
    assert swarm.gateway.serve("ada", Call("coordinator", "push", (header,))) == Accepted()
    assert put(1000) == Accepted() and isinstance(put(1001), Refused)
    other = Identity(Incarnation("bob-x", "b" * 32), 1)
    assert swarm.gateway.serve("bob", Call("aggregator-0", "put", (other, 0, {}, "d" * 64))) == Accepted()
    swarm.now += 25 * 3600.0
    assert put(1001) == Accepted()


def test_payloads_sent_in_vain_are_limited():
    swarm, answers = Swarm(), iter([Accepted()] * (MAX_WASTED_PAYLOADS // 2 + 1) + [Refused("no")] * 10**4)
    swarm.gateway.calls = lambda call: next(answers)

    def put(fragment, person="ada"):
        identity = Identity(Incarnation(f"{person}-x", "a" * 32), 1)
        return swarm.gateway.serve(person, Call("aggregator-0", "put", (identity, fragment, {}, "d" * 64)))

    for number in range(MAX_WASTED_PAYLOADS + 1):
        assert "in vain" not in getattr(put(0), "reason", ""), number
    assert "in vain today" in put(1).reason
    assert put(0, person="bob").reason == "no"
    swarm.now = 25 * 3600.0
    assert put(0).reason == "no"


def test_rows_of_metrics_follow_the_pushes():
    swarm, who = Swarm(), Incarnation("ada-colab", "a" * 32)
    swarm.gateway.calls = lambda call: Accepted()
    swarm.join()
    sent = 0

    def report(count):
        nonlocal sent
        answer = swarm.report({**REPORT, "first": sent, "rows": (ROW,) * count})
        sent += count
        return answer

    for _ in range(MAX_UNPUSHED_ROWS // MAX_ROWS):
        assert isinstance(report(MAX_ROWS), Reported)
    again = {**REPORT, "first": sent - MAX_ROWS, "rows": (ROW,) * MAX_ROWS}
    assert isinstance(swarm.report(again), Reported), "rows that come again count once"
    header = Header(Identity(who, 1), "run", 0, Rows(((0, 5),)), 0, 1, "plain", 0.0, True, ())
    swarm.gateway.serve("ada", Call("coordinator", "push", (header,)))
    assert isinstance(report(5), Reported)
    assert "without a push" in report(1).reason
    swarm.now = 25 * 3600.0
    swarm.join()
    assert isinstance(report(1), Reported)

"""A member's training process, driven by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.member_state import Adopt, MemberState, after_snapshot, after_step
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.member.device_state import Payload
from tpuswarm.swarm.member.loop import EVALUATION, MemberLoop
from tpuswarm.swarm.member.program import HOOK_TIMEOUT_S
from tpuswarm.swarm.processes.effects import Sleep

TERMS = Terms("run", Digests("layout", "config", "data", "code"), 4, 8, 400, 24, ("m0",), OuterRule("nesterov"))


@pytest.mark.parametrize(("rows_after", "share"), [(0, 0.0), (8, 0.25), (24, 0.5), (72, 0.75)])
def test_member_keeps_the_share_of_its_work_that_is_not_in_the_commit(rows_after, share):
    """24 rows are in the contribution, `rows_after` were trained since: share = D / (H + D)."""
    state = MemberState(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.from_ranges((0, 96)))
    state = after_snapshot(after_step(state, Rows.from_ranges((0, 24))))
    state = after_step(state, Rows.from_ranges((24, 24 + rows_after))) if rows_after else state
    adopted = []

    class Recorder:
        def adopt(self, adopt, version, own_share):
            adopted.append((adopt.how, own_share))

    member = MemberLoop(replace(state, base=3), Recorder(), "coordinator", ["shard"], lambda: 0.0)
    adopt = Adopt("snapshot", state.undecided.identity, 4, ("digest",))
    process = member._adopt(adopt, 192, None, None)
    next(process).action()
    assert adopted == [("snapshot", share)]
    with pytest.raises(StopIteration):
        process.send(None)
    assert (member.state.base, len(member.state.outstanding), member.state.undecided) == (4, rows_after, None)


def test_member_pushes_only_work_whose_metrics_are_stored():
    """Otherwise a power cut could keep a commit and lose the rows before it."""
    steps, stored = [3], [0]
    state = MemberState(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.from_ranges((0, 96)))
    holder = SimpleNamespace(snapshot=list, payload=lambda snapshot: Payload((), (), 1.0, True))
    member = MemberLoop(
        after_step(state, Rows.from_ranges((0, 24))), holder, "coordinator", [], lambda: 0.0,
        steps_begun=lambda: steps[0], steps_stored=lambda: stored[0],
    )  # fmt: skip
    for process in (member._take_snapshot(), member._encode()):
        action = next(process).action()
        with pytest.raises(StopIteration):
            process.send(action)
    steps[0] = 5  # it goes on training
    push = member._push()
    for stored[0] in range(3):
        assert isinstance(next(push), Sleep) and member.awaits_storage
    stored[0] = 3
    assert next(push).method == "push" and not member.awaits_storage


def test_hook_may_take_minutes_before_its_device_is_taken_for_one_that_hangs():
    time, stalled = [0.0], []

    class SlowHook:
        def adopt(self, adopt, version, own_share):
            pass

        def evaluate(self, stop, *_):
            for allowed_s in (0.0, HOOK_TIMEOUT_S):
                stop(allowed_s)
                time[0] += 599
                stalled.append(member.stalled)

    state = MemberState(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.from_ranges((0, 96)))
    member = MemberLoop(state, SlowHook(), "coordinator", [], lambda: time[0], evaluate_every=1)
    member._finished_actions.add(EVALUATION)  # an evaluation that is compiled
    for step in member._adopt(Adopt("anchor", None, 4, ("digest",)), 192, None, None):
        step.action()
    assert stalled[0] == 599 and stalled[1] < 0

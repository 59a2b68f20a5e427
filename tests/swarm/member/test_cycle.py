"""A member's training process, driven by hand."""

from dataclasses import replace

import pytest

from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.books import Adopt, Member, snapshot, trained
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.member.cycle import EVALUATES, MemberProcesses
from tpuswarm.swarm.member.program import HOOK_TIMEOUT_S

TERMS = Terms("run", Digests("layout", "config", "data", "code"), 4, 8, 400, 24, ("m0",), Outer("nesterov"))


@pytest.mark.parametrize(("rows_after", "share"), [(0, 0.0), (8, 0.25), (24, 0.5), (72, 0.75)])
def test_member_keeps_the_share_of_its_work_that_is_not_in_the_commit(rows_after, share):
    """24 rows are in the contribution, `rows_after` were trained since: share = D / (H + D)."""
    books = Member(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.of((0, 96)))
    books = snapshot(trained(books, Rows.of((0, 24))))
    books = trained(books, Rows.of((24, 24 + rows_after))) if rows_after else books
    adopted = []

    class Holder:
        def adopt(self, adopt, version, keep):
            adopted.append((adopt.how, keep))

    member = MemberProcesses(replace(books, base=3), Holder(), "coordinator", ["shard"], lambda: 0.0)
    adopt = Adopt("snapshot", books.undecided.identity, 4, ("digest",))
    process = member._take_up(adopt, 192, None, None)
    next(process).action()
    assert adopted == [("snapshot", share)]
    with pytest.raises(StopIteration):
        process.send(None)
    assert (member.books.base, len(member.books.outstanding), member.books.undecided) == (4, rows_after, None)


def test_hook_may_take_minutes_before_its_device_is_taken_for_one_that_hangs():
    time, stalled = [0.0], []

    class Holder:
        def adopt(self, adopt, version, keep):
            pass

        def evaluate(self, leave, *_):
            for allowed_s in (0.0, HOOK_TIMEOUT_S):
                leave(allowed_s)
                time[0] += 599
                stalled.append(member.stalled)

    books = Member(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.of((0, 96)))
    member = MemberProcesses(books, Holder(), "coordinator", [], lambda: time[0], evaluate_every=1)
    member._done.add(EVALUATES)  # an evaluation that is compiled
    process = member._take_up(Adopt("anchor", None, 4, ("digest",)), 192, None, None)
    for step in process:
        step.action()
    assert stalled[0] == 599 and stalled[1] < 0

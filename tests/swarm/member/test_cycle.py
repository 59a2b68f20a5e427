"""A member's training process, driven by hand: what it hands to whoever has the arrays."""

from dataclasses import replace
from typing import Any

import pytest

from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.books import Adopt, Member, snapshot, trained
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.member.cycle import MemberProcesses
from tpuswarm.swarm.processes.effects import Do

TERMS = Terms("run", Digests("layout", "config", "data", "code"), 4, 8, 400, 24, ("m0",), Outer("nesterov"))


class Keeps:
    """A holder that writes down what it is to keep."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, float]] = []

    def adopt(self, adopt: Adopt, version: Any, keep: float) -> None:
        self.kept.append((adopt.how, keep))


@pytest.mark.parametrize(("after", "keep"), [(0, 0.0), (8, 0.25), (24, 0.5), (72, 0.75)])
def test_a_member_keeps_the_share_of_its_work_that_the_commit_does_not_have(after, keep):
    """24 rows are in the contribution, `after` were trained while it was on its way: keep = D / (H + D)."""
    books = Member(TERMS, "plain", True, Incarnation("m0", "0"), 0, 0, joined=True, todo=Rows.of((0, 96)))
    books = snapshot(trained(books, Rows.of((0, 24))))
    if after:
        books = trained(books, Rows.of((24, 24 + after)))
    holder: Any = Keeps()
    member = MemberProcesses(replace(books, base=3), holder, "coordinator", ["shard"], lambda: 0.0)
    adopt = Adopt("snapshot", books.undecided.identity, 4, ("digest",))
    work = member._take_up(adopt, 192, None, None)
    effect = next(work)
    assert isinstance(effect, Do)
    effect.action()
    assert holder.kept == [("snapshot", keep)]
    with pytest.raises(StopIteration):
        work.send(None)
    assert (member.books.base, len(member.books.outstanding), member.books.undecided) == (4, after, None)

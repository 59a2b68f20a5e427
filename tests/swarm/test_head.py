"""The founding of a run: by a member of that run, or not at all."""

from dataclasses import replace

import pytest

from tpuswarm.swarm.core.fragments import Layout
from tpuswarm.swarm.core.messages import Accepted, Refused
from tpuswarm.swarm.ledger import Ledger
from tpuswarm.swarm.runtime.head import Found, Head, Wait, read_founding
from tpuswarm.swarm.runtime.plan import Founding, Plan, Swarm
from tpuswarm.swarm.store import Store

SWARM = Swarm("run", 2, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1)
PLAN = Plan(
    SWARM, "module:Recipe", {}, {"steps": 8, "batch": 2}, files={}, shared={}, tokens_per_row=1, data="data",
    code="code", evaluate_every=None,
)  # fmt: skip
FOUNDING = Founding(Layout.of({"w": ((3,), "float32")}, 1).fragments, {})


def carried_out(process):
    """The result of a process, its effects made at once."""
    value = None
    while True:
        try:
            value = process.send(value).action()
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("other", ["config", "data", "code"])
def test_who_trains_something_else_founds_nothing(tmp_path, other):
    store = Store(tmp_path)
    head = Head(PLAN, store, ["aggregator-0"], lambda: 0.0, lambda: 0.0, alone=True)
    assert (head.hello("j0"), head.hello("m0"), head.hello("m1")) == (Wait(), Found(), Wait())
    ours = PLAN.terms(FOUNDING).digests
    wrong = replace(ours, **{other: "another"})
    assert carried_out(head.found(FOUNDING, ("s",), (), wrong)) == Refused(f"its {other} differs from the run's")
    assert read_founding(store) is None and not Ledger(store).versions()
    assert carried_out(head.found(FOUNDING, ("s",), (), ours)) == Accepted()
    assert read_founding(store) == FOUNDING and Ledger(store).record(0).digests == ours

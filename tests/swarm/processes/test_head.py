"""The founding of a run: by a member of that run, or not at all."""

from dataclasses import replace

import pytest

from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.messages import Accepted, Refused
from tpuswarm.swarm.processes import plan
from tpuswarm.swarm.processes.effects import Over
from tpuswarm.swarm.processes.founder import Begin, FoundingCoordinator, Joining, Wait
from tpuswarm.swarm.processes.plan import Plan, Swarm
from tpuswarm.swarm.storage.founding import Founding, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store

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


class Killed(Exception):
    pass


def head_of(store, plan=PLAN):
    return FoundingCoordinator(plan, store, ["aggregator-0"], lambda: 0.0, lambda: 0.0, alone=True)


def founded(store, kill_at, state=("s",)):
    """The effects of a founding, of which the process dies before or after one; the number of its crash points."""
    points = 0

    def point():
        nonlocal points
        if points == kill_at:
            raise Killed
        points += 1

    process, value = head_of(store).found(FOUNDING, state, (), PLAN.terms(FOUNDING).digests), None
    while True:
        try:
            effect = process.send(value)
        except StopIteration as end:
            assert end.value == Accepted()
            return points
        point()
        value = effect.action()
        point()


def greeting(head):
    """What the head says to a hello once its coordinator runs."""
    process, value = head.run(), None
    while head.look() is None:
        value = getattr(process.send(value), "action", lambda: None)()
    return head.hello("m0")


def listening(head):
    """The head, once it has found no founding."""
    process = head.run()
    process.send(next(process).action())
    return head


def test_who_greets_a_head_that_reads_its_ledger_makes_no_first_state(tmp_path):
    """A whole model was made and sent once more whenever a member was there before the ledger was read."""
    store = Store(tmp_path)
    head = head_of(store)
    assert head.hello("m0") == Wait(), "whether there is a first state is not known yet"
    assert listening(head).hello("m0") == Begin()
    founded(store, None)
    head = head_of(store)
    process = head.run()
    effect = next(process)
    while not head.opened:
        assert head.hello("m0") == Wait()
        effect = process.send(effect.action())
    assert isinstance(head.hello("m0"), Joining)


def test_a_kill_at_every_step_of_the_founding_leaves_a_run_that_goes_on(tmp_path):
    for point in range(founded(Store(tmp_path / "whole"), None)):
        store = Store(tmp_path / str(point))
        with pytest.raises(Killed):
            founded(store, point)
        begun = bool(Ledger(store).versions())
        if read_founding(store) is None:
            assert listening(head_of(store)).hello("m0") == Begin()
            founded(store, None, state=("of another device",))
        answer = greeting(head_of(store))
        assert isinstance(answer, Joining) and answer.state == (("s",) if begun else ("of another device",))
        assert Ledger(store).versions() == [0]


def test_nothing_is_written_into_the_folder_of_another_run(tmp_path):
    store = Store(tmp_path)
    founded(store, None)
    other = replace(PLAN, swarm=replace(SWARM, run="another"))
    digests = other.terms(FOUNDING).digests
    refused = carried_out(head_of(store, other).found(FOUNDING, ("s",), (), digests))
    assert isinstance(refused, Refused) and "belongs to another run" in refused.reason
    with pytest.raises(Over, match="has commits of run run, this is run another"):
        greeting(head_of(store, other))
    assert Ledger(store).versions() == [0]


@pytest.mark.parametrize("other", ["config", "data", "code"])
def test_who_trains_something_else_founds_nothing(tmp_path, other):
    store = Store(tmp_path)
    head = listening(head_of(store))
    assert head.hello("m1", makes=False) == Wait(), "hosts of a slice that still wait for each other hold nobody up"
    assert (head.hello("j0"), head.hello("m0"), head.hello("m1")) == (Wait(), Begin(), Wait())
    ours = PLAN.terms(FOUNDING).digests
    wrong = replace(ours, **{other: "another"})
    assert carried_out(head.found(FOUNDING, ("s",), (), wrong)) == Refused(f"its {other} differs from the run's")
    assert read_founding(store) is None and not Ledger(store).versions()
    assert carried_out(head.found(FOUNDING, ("s",), (), ours)) == Accepted()
    assert read_founding(store) == FOUNDING and Ledger(store).record(0).digests == ours


@pytest.mark.parametrize(("parameters", "momentum"), [(1_999_999, 0.8), (2_000_000, 0.9)])
def test_a_small_model_takes_less_momentum_however_it_is_split(parameters, momentum):
    """By the ladder of docs/benchmarks.md."""
    for fragments in (1, 3):
        leaves = {"w": ((parameters - 5,), "float32"), "b": ((5,), "float32")}
        terms = PLAN.terms(Founding(Layout.of(leaves, fragments).fragments, {}))
        assert terms.outer.momentum == momentum


def test_a_run_keeps_the_momentum_that_it_was_founded_with(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(plan, "usual_momentum", lambda parameters: 0.9)
    founded(store, None)
    monkeypatch.undo()
    assert PLAN.terms(FOUNDING).outer.momentum == 0.8
    assert greeting(head_of(store)).terms.outer.momentum == 0.9

"""The founding of a run: by a member of that run, or not at all."""

from dataclasses import replace

import numpy as np
import pytest

from tests.swarm.supervision.fake_cluster import PLAN, SWARM
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.messages import Accepted, Refused
from tpuswarm.swarm.processes import run_plan
from tpuswarm.swarm.processes.coordinator import Begin, FoundingCoordinator, Joining, Wait
from tpuswarm.swarm.processes.effects import ProcessEnded
from tpuswarm.swarm.storage.founding import Founding, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, array_digest
from tpuswarm.swarm.storage.store import Store

FOUNDING = Founding(Layout.pack({"w": ((3,), "float32")}, 1).fragments, {})
DIGESTS = PLAN.terms(FOUNDING).digests


class Killed(Exception):
    pass


def head_of(store, plan=PLAN):
    return FoundingCoordinator(plan, store, ["aggregator-0"], lambda: 0.0, lambda: 0.0, alone=True)


def digest_of(value):
    return array_digest(np.full(3, value, np.float32))


def listening(head):
    process = head.run()
    process.send(next(process).action())
    return head


def found(head, value=1.0, digests=DIGESTS, kill_at=None):
    """Found a run, killed before or after one effect; returns the answer and the number of such points."""
    state = (Objects(head._store).put_array(np.full(3, value, np.float32)),)
    process, value, points = head.found(FOUNDING, state, (), digests), None, 0

    def point():
        nonlocal points
        if points == kill_at:
            raise Killed
        points += 1

    while True:
        try:
            effect = process.send(value)
        except StopIteration as end:
            return end.value, points
        point()
        value = effect.action()
        point()


def hello_once_opened(head):
    process, value = head.run(), None
    while head.summarize() is None:
        value = getattr(process.send(value), "action", lambda: None)()
    return head.hello("m0")


def test_member_waits_while_the_head_reads_its_ledger(tmp_path):
    """Otherwise it would make and send the whole first state again."""
    store = Store(tmp_path)
    head = head_of(store)
    assert head.hello("m0") == Wait()
    assert listening(head).hello("m0") == Begin()
    found(head_of(store))
    head = head_of(store)
    process = head.run()
    effect = next(process)
    while not head.opened:
        assert head.hello("m0") == Wait()
        effect = process.send(effect.action())
    assert isinstance(head.hello("m0"), Joining)


def test_run_survives_a_kill_at_any_step_of_its_founding(tmp_path):
    answer, points = found(head_of(Store(tmp_path / "whole")))
    assert answer == Accepted()
    for point in range(points):
        store = Store(tmp_path / str(point))
        with pytest.raises(Killed):
            found(head_of(store), kill_at=point)
        begun = bool(Ledger(store).versions())
        if read_founding(store) is None:
            assert listening(head_of(store)).hello("m0") == Begin()
            found(head_of(store), value=2.0)
        answer = hello_once_opened(head_of(store))
        assert isinstance(answer, Joining) and answer.state == (digest_of(1.0 if begun else 2.0),)
        assert Ledger(store).versions() == [0]


def test_folder_of_another_run_is_not_changed(tmp_path):
    store = Store(tmp_path)
    found(head_of(store))
    other = replace(PLAN, swarm=replace(SWARM, run="another"))
    answer, _ = found(head_of(store, other), digests=other.terms(FOUNDING).digests)
    assert isinstance(answer, Refused) and "belongs to another run" in answer.reason
    with pytest.raises(ProcessEnded, match="has commits of run run, this is run another"):
        hello_once_opened(head_of(store, other))
    assert Ledger(store).versions() == [0]


@pytest.mark.parametrize("differs", ["config", "data", "code"])
def test_member_that_trains_something_else_founds_nothing(tmp_path, differs):
    store = Store(tmp_path)
    head = listening(head_of(store))
    assert head.hello("m1", False) == Wait(), "a slice whose hosts still wait for each other delays nobody"
    assert (head.hello("j0"), head.hello("m0"), head.hello("m1")) == (Wait(), Begin(), Wait())
    answer, _ = found(head, digests=replace(DIGESTS, **{differs: "another"}))
    assert answer == Refused(f"its {differs} differs from the run's")
    assert read_founding(store) is None and not Ledger(store).versions()
    assert found(head)[0] == Accepted()
    assert read_founding(store) == FOUNDING and Ledger(store).record(0).digests == DIGESTS


@pytest.mark.parametrize(("parameters", "momentum"), [(1_999_999, 0.8), (2_000_000, 0.9)])
def test_small_model_gets_less_momentum_for_any_number_of_fragments(parameters, momentum):
    for fragments in (1, 3):
        leaves = {"w": ((parameters - 5,), "float32"), "b": ((5,), "float32")}
        terms = PLAN.terms(Founding(Layout.pack(leaves, fragments).fragments, {}))
        assert terms.outer.momentum == momentum


def test_run_keeps_the_momentum_of_its_founding(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(run_plan, "default_momentum", lambda parameters: 0.9)
    found(head_of(store))
    monkeypatch.undo()
    assert PLAN.terms(FOUNDING).outer.momentum == 0.8
    assert hello_once_opened(head_of(store)).terms.outer.momentum == 0.9

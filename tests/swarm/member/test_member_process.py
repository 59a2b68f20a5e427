"""A member's process, one incarnation after the other, with a real coordinator and aggregator in threads."""

from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from tests.train import toy
from tpuswarm.swarm.member import data_files, loop, member_process
from tpuswarm.swarm.member.member_process import MAX_FRUITLESS_INCARNATIONS, MemberProcess, MemberSpec
from tpuswarm.swarm.processes import coordinator
from tpuswarm.swarm.processes.coordinator import Joining, Wait
from tpuswarm.swarm.processes.effects import ProcessEnded, Sleep
from tpuswarm.swarm.processes.run_plan import COORDINATOR, RunPlan, Swarm, code_digest
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision import entry
from tpuswarm.train.data.source import training_source
from tpuswarm.train.recipe import Options
from tpuswarm.train.user_code import build_recipe

pytestmark = pytest.mark.slow

TARGET = f"{Path(toy.__file__).resolve()}:toy"
SHARD = "aggregator-0"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    patched = ((member_process, "RETRY_INTERVAL_S"), (loop, "HEARTBEAT_INTERVAL_S"), (loop, "POLL_INTERVAL_S"))
    for module, name in (*patched, (coordinator, "MAX_SLEEP_S")):
        monkeypatch.setattr(module, name, 0.02)


def plan_of(target, options, members=1, base=None, average=None, **settings) -> RunPlan:
    settings = {
        "steps": 8, "batch": 8, "seed": 0, "deterministic": False, "init_from": None, "eval_batch": None
    } | settings  # fmt: skip
    recipe = build_recipe(target, options)
    return RunPlan(
        Swarm(
            "run", members, cycle=2, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1,
            base=base,
        ),
        target, options, settings, files={}, shared={}, tokens_per_row=recipe.program(Options()).tokens_per_row,
        data=getattr(training_source(recipe, 0), "digest", ""), code=code_digest(target), evaluate_every=None,
        average=average,
    )  # fmt: skip


def toy_plan(rate: float) -> RunPlan:
    return plan_of(TARGET, {"rate": rate})


class Run:
    def __init__(self, folder: Path, plan: RunPlan):
        self.ledger = Ledger(Store(folder))
        self.sent = Counter[str]()
        """Bytes of data files, by request."""
        self.answers: list[object] = []
        """The coordinator's answers to the first greetings after the end of the run."""
        self.head = entry.coordinator(plan, str(folder), (SHARD,), True, self.call)
        self.served = {COORDINATOR: self.head, SHARD: entry.shard(str(folder), str(folder / "data"), 0, 1, self.call)}
        self.members = [
            MemberProcess(MemberSpec(name, plan, (SHARD,), folder, None, 0, not number, self.call, lambda text: None))
            for number, name in enumerate(plan.members)
        ]
        self.member = self.members[0]

    def call(self, call):
        answer = self.served[call.address].serve(call.method, call.arguments)
        self.sent[call.method] += (
            getattr(answer, "nbytes", 0) or len(answer) if call.method in ("file", "ranges") else 0
        )
        if isinstance(answer, Joining) and answer.tokens == 64 and self.answers:
            return self.answers.pop()
        return answer

    def finish(self) -> str:
        """Return how the first member ended, once all have."""
        Thread(target=self.head.run, daemon=True).start()  # the head may outlive its test
        ends = [self._start(member) for member in self.members]
        stored = [0] * len(ends)
        while not all(end.done() for end in ends):  # as a supervisor does
            for number, member in enumerate(self.members):
                stored[number] += sum("loss" in row for row in member.report(stored[number])["rows"])
            wait(ends, 0.02)
        first, *_ = [end.result(120) for end in ends]
        return first

    def _start(self, member) -> Future:
        ended = Future()

        def run():
            try:
                ended.set_result(member.run())
            except Exception as error:  # noqa: BLE001  # raised by the test
                ended.set_exception(error)

        Thread(target=run, daemon=True).start()
        return ended


def test_member_that_is_never_finite_gives_up(tmp_path):
    run = Run(tmp_path, toy_plan(rate=1e30))
    with pytest.raises(ProcessEnded, match=r"m0 gave up after 5 .* not finite; lower the learning rate, use --clip"):
        run.finish()
    records = run.ledger.records(run.ledger.versions()[1:])
    assert [decision.fate for record in records for decision in record.decisions] == [
        "dropped"
    ] * MAX_FRUITLESS_INCARNATIONS


def test_member_that_leaves_reports_what_it_trained_after_its_undecided_push(tmp_path, monkeypatch):
    def commit_never(head, merge):
        yield Sleep(0.02)

    monkeypatch.setattr(coordinator.Coordinator, "_commit", commit_never)
    run = Run(tmp_path, toy_plan(rate=0.05))
    report = run.member.report

    def report_and_leave(since):
        found, current = report(since), run.member._loop
        if found["at_risk"] and current and current.state.undecided and not current.state.todo:
            run.member.leave()
        return found

    monkeypatch.setattr(run.member, "report", report_and_leave)
    assert run.finish() == "left" and report(0)["at_risk"] > 0


def test_last_version_is_evaluated_although_the_coordinator_restarts_at_the_end(tmp_path):
    """While it reads its ledger, it answers Wait to a member that asks for the last version."""
    run = Run(tmp_path, toy_plan(rate=0.05))
    run.answers = [Wait()]
    assert run.finish() == "ended"
    (row,) = [row for row in run.member.report(0)["rows"] if "eval_loss" in row]
    assert row["version"] == run.ledger.versions()[-1]


def test_member_that_fetches_only_its_rows_trains_the_same(tmp_path, monkeypatch):
    """Like one with the whole text, whose file it never has."""
    text = tmp_path / "text.txt"
    text.write_bytes(Random(0).randbytes(100_000).hex().encode())
    target, options = "tpuswarm.recipes.gpt2.recipe:GPT2", {
        "data": str(text), "layers": 1, "width": 16, "heads": 1, "context": 16,
    }  # fmt: skip
    states = {}
    for name, largest in (("whole", None), ("rows", 1000)):
        folder = tmp_path / name
        assert build_recipe(target, options).share(folder / "data") == {"data": str(folder / "data")}
        known = data_files.describe(folder / "data")
        plan = replace(plan_of(target, options), files=known, shared={"data": "{data}"})
        run = Run(folder, plan)
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / f"cache-{name}"))
        run.member.spec = replace(run.member.spec, data=None, files_from=SHARD, largest_file=largest)
        assert run.finish() == "ended"
        states[name] = run.ledger.record(run.ledger.versions()[-1]).state
        here = list((tmp_path / f"cache-{name}" / "swarm").rglob("tokens.bin"))
        assert len(here) == (name == "whole")
        sent = sum(run.sent.get(method, 0) for method in ("file", "ranges"))
        assert (sent > 200_000) == (name == "whole"), f"{sent} bytes for 64 rows of 17 tokens"
    assert states["rows"] == states["whole"]

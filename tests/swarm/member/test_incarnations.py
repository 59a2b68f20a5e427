"""A member's process, one incarnation after the other, with a coordinator and an aggregator as theirs serve them."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.train import toy
from tpuswarm.swarm.member.incarnations import LIVES, Assigned, MemberHost
from tpuswarm.swarm.processes.effects import Over
from tpuswarm.swarm.processes.founder import Joining, Wait
from tpuswarm.swarm.processes.plan import HEAD, Plan, Swarm, code_digest
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision import entry
from tpuswarm.train.data.source import training_rows
from tpuswarm.train.user_code import build_recipe

TARGET = f"{Path(toy.__file__).resolve()}:toy"
SHARD = "aggregator-0"


class Run:
    """A run of one member; calls can be answered in the place of who serves them."""

    def __init__(self, folder: Path, rate: float):
        settings = {"steps": 8, "batch": 8, "seed": 0, "deterministic": False, "init_from": None, "eval_batch": None}
        options = {"rate": rate}
        plan = Plan(
            Swarm("run", 1, cycle=2, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1),
            TARGET, options, settings, files={}, shared={}, tokens_per_row=1,
            data=training_rows(build_recipe(TARGET, options), 0).digest, code=code_digest(TARGET), evaluate_every=None,
        )  # fmt: skip
        self.ledger = Ledger(Store(folder))
        self.head = entry.coordinator(plan, str(folder), (SHARD,), True, self.calls)
        self.served = {HEAD: self.head, SHARD: entry.shard(str(folder), str(folder / "data"), 0, 1, self.calls)}
        threading.Thread(target=self.head.run, daemon=True).start()
        self.said: list[str] = []
        self.answers: list[object] = []
        """In the place of the coordinator's to the first greetings once the run has ended."""
        self.member = MemberHost(Assigned("m0", plan, (SHARD,), folder, None, 0, True, self.calls, self.said.append))

    def calls(self, call):
        answer = self.served[call.address].serve(call.method, call.arguments)
        if isinstance(answer, Joining) and answer.tokens == 64 and self.answers:
            return self.answers.pop()
        return answer

    def ends(self) -> str:
        ended: Future[str] = Future()

        def live():
            try:
                ended.set_result(self.member.run())
            except Exception as error:  # noqa: BLE001  # raised where it is waited for
                ended.set_exception(error)

        threading.Thread(target=live, daemon=True).start()
        return ended.result(60)


def test_a_member_that_is_never_finite_gives_up(tmp_path):
    """It went on for ever, and skipped all data on its way: the plain trainer stops."""
    run = Run(tmp_path, rate=1e30)
    with pytest.raises(Over, match=r"m0 gave up after 5 .* not finite; lower the learning rate, use --clip"):
        run.ends()
    records = run.ledger.records(run.ledger.versions()[1:])
    assert [each.fate for record in records for each in record.decisions] == ["dropped"] * LIVES


def test_a_coordinator_that_was_restarted_at_the_end_costs_no_evaluation(tmp_path):
    """It reads its ledger when it is asked which version is the last."""
    run = Run(tmp_path, rate=0.05)
    run.answers = [Wait()]
    assert run.ends() == "ended"
    (row,) = [each for each in run.member.look(0)["rows"] if "eval_loss" in each]
    assert row["version"] == run.ledger.versions()[-1]

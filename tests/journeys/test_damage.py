"""Any damage to any file of a run: every command reports it in a sentence, and shows the other runs."""

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage import KINDS, damage
from tests.swarm.chains import Run as Chain
from tests.swarm.storage.test_load import store_first_version
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.status import MemberStatus, Progress, compose, write_status
from tpuswarm.train.run.directory import append_event, append_rows
from tpuswarm.train.trainer import Trainer

pytestmark = pytest.mark.slow
SHAPE = {"layers": 1, "heads": 1, "width": 8, "context": 8}
LIGHT = ("status", "status --json", "status {run}", "logs {run}")
VOID = {"member": "m0", "fate": "void", "reason": ""}
EVENT = {
    "joined": {"member": "m0", "incarnation": "ab" * 16, "pid": 7},
    "commit": {
        "version": 3,
        "tokens": 96,
        "contributors": [],
        "others": [VOID],
    },
    "lost": {"member": "m0", "incarnation": "ab" * 16, "pid": 7, "message": "killed", "tokens": 1234},
    "coordinator": {"name": "coordinator", "message": "gone"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """Folders: a trained GPT-2, a swarm's run with one version of the same model, and a swarm with nine commits."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = GPT2(**SHAPE, data=str(text_file))
    Trainer(devices=1).fit(recipe, steps=4, batch=8, run=folder / "plain")
    config = (folder / "plain" / "config.toml").read_text()
    for name in ("model", "chain"):
        (folder / name).mkdir()
        swarm = {"members": 2, "run": "run", "cycle": 5, "outer": "nesterov", "quantize": "plain", "code": "code"}
        (folder / name / "config.toml").write_text(f"{config}\n{tomli_w.dumps({'swarm': swarm})}")
        append_event(folder / name, "started", message="2 members")
        for kind, facts in EVENT.items():
            append_event(folder / name, kind, **facts)
        rows = [{"step": 1, "tokens": 64, "loss": 2.5, "member": "m0", "version": 1}, {"step": 1, "eval_loss": 2.25}]
        append_rows(folder / name / "metrics.jsonl", rows)
        member = MemberStatus("m0", "alive", 11, "ab" * 16, 9, 700, 50.0, 2.0, 1.0, 0)
        summary = Summary(9, 3, False, "grace", Tokens(900, 640, 8, 16, 0), (), 1.0, False)
        progress = Progress(1.6e9, 50.0, 2.25, 1)
        write_status(folder / name, compose(summary, [member], 16_000, ["far"], "host:1", {}, 1.7e9, progress))
        (folder / name / "logs").mkdir()
        (folder / name / "logs" / "m0.log").write_text("12:00:00.123 compiling\n12:00:01.000 compiled\n")
        (folder / name / "lock").touch()
    store_first_version(recipe, Store(folder / "model"))
    Chain(Store(folder / "chain"), Random(4), rule="nesterov").grow(9)
    return folder


@pytest.fixture
def damaged(runs, typed, tmp_path, monkeypatch):
    """Damage a copy of a run and run commands: each ends with an exit code, and a sentence unless it is 0."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "plain", "runs/whole")

    def check(name: str, seed: int, commands: tuple[str, ...]) -> None:
        random = Random(seed)
        folder = Path("runs/victim")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(runs / name, folder)
        for _ in range(random.choice([1, 1, 1, 2])):
            victim = random.choice(sorted(random.choice([folder.iterdir, lambda: folder.rglob("*")])()))
            kind = random.choice(KINDS)
            damage(victim, kind, random)
            print(kind, victim)  # shown with a failure
        for command in commands:
            code, out, err = typed(*command.format(run=folder).split())
            print(command, code, err)
            assert code in (0, 1, 2) and "Traceback" not in err and "internal error" not in err
            assert code == 0 or command.startswith("ledger verify") or err.splitlines()[-1].startswith("error: ")
            if command.startswith("status"):
                assert code == 0 or "{run}" in command
            if command == "status":
                assert "runs/whole" in out and ("runs/victim" in out + err)
            shutil.rmtree("out", ignore_errors=True)

    return check


SHARED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=60, suppress_health_check=SHARED)
@given(st.sampled_from(["plain", "model"]), st.integers(0, 10**9))
def test_listing_damaged_runs(damaged, name, seed):
    damaged(name, seed, LIGHT)


@settings(max_examples=40, suppress_health_check=SHARED)
@given(st.integers(0, 10**9))
def test_reading_damaged_ledgers(damaged, seed):
    damaged("chain", seed, ("status", "ledger show {run}", "ledger verify {run}"))


@settings(max_examples=12, suppress_health_check=SHARED)
@given(st.sampled_from(["plain", "model"]), st.integers(0, 10**9))
def test_using_damaged_models(damaged, name, seed):
    damaged(name, seed, ("sample {run} --tokens 3", "evaluate {run}", "export {run} out"))


def test_runs_that_are_damaged_between_and_during_commands():
    """Resumed, they give the undisturbed run's parameters and rows, or a sentence says what is damaged."""
    command = [sys.executable, "-m", "tests.damaged_runs", "0", "--cases", "8"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

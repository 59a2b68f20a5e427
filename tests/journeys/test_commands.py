"""Commands as a user types them: their output, files and exit codes."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import asyncssh
import httpx
import pytest
import wandb
from google.api_core.exceptions import ServiceUnavailable
from jax.errors import JaxRuntimeError
from ray.exceptions import RaySystemError

from tests.cli import my_recipe
from tests.processes import PROGRAM
from tpuswarm.cli import main
from tpuswarm.cli.train.train import print_result, print_swarm_result
from tpuswarm.errors import InputError
from tpuswarm.swarm.supervision.start import SwarmResult
from tpuswarm.swarm.supervision.supervisor import RunEnd
from tpuswarm.train.loop.result import Result

LINE = "train my_recipe.py:line --steps 4 --batch 8"


@pytest.fixture
def call(call):
    shutil.copyfile(my_recipe.__file__, "my_recipe.py")
    return call


def test_debug_shows_the_traceback(call, monkeypatch):
    monkeypatch.delenv("TPUSWARM_DEBUG", raising=False)
    monkeypatch.setenv("TPUSWARM_DEBUG", "")
    with pytest.raises(InputError):
        monkeypatch.setattr(sys, "argv", ["tpuswarm", "--debug", "train", "gpt2-tny"])
        main()


def test_commands_over_the_life_of_a_run(call, capsys):
    code, out, err = call(f"{LINE} --width 5 --run runs/a --eval-every 2")
    assert code == 0 and out.startswith("runs/a finished at step 4 of 4: loss ")
    assert "parameter" in err and "step 4 of 4: held-out loss" in err
    assert "rows/s" in err and "tokens/s" not in err  # a row of this recipe counts for one
    print_swarm_result(SwarmResult(Path("runs/a"), RunEnd("finished", "", None), {}, 4, 7_680), as_json=False)
    assert capsys.readouterr().out == "runs/a finished at commit 4: 7,680 rows; runs/a/report.html\n"
    result = Result(Path("runs/worker-1"), None, 4, 4, {}, "finished", "", None)
    Path("runs/worker-1").mkdir()  # host 0 alone writes the report
    print_result(result, as_json=False)
    assert "finished at step 4 of 4" in (out := capsys.readouterr().out) and "report.html" not in out
    Path("runs/worker-1").rmdir()
    assert "width = 5\nlr = 0.1" in Path("runs/a/config.toml").read_text()
    code, out, err = call(f"{LINE} --run runs/a --json")
    assert code == 0 and "nothing left to do" in err  # the width is remembered
    assert json.loads(out)["ended"] == "finished" and json.loads(out)["metrics"]["step"] == 4
    code, out, _ = call("status --json")
    assert [(run["run"], run["state"], run["step"]) for run in json.loads(out)["runs"]] == [("runs/a", "finished", 4)]
    code, out, err = call("status last --json")
    assert json.loads(out)["recipe"] == "my_recipe" and err == ""
    assert call("status")[1].splitlines()[1].split()[:3] == ["runs/a", "my_recipe", "finished"]
    code, out, _ = call("evaluate last --json")
    assert code == 0 and (json.loads(out)["run"], json.loads(out)["rows"]) == ("runs/a", 24)
    code, out, err = call("sample runs/a")
    assert code == 2 and "my_recipe cannot generate text" in err
    code, _, err = call(f"{LINE} --run runs/a --lr 0.2")
    assert code == 2 and "lr was 0.1, now 0.2" in err
    code, _, err = call("train gpt2-tiny --run runs/a")
    assert code == 2 and "runs/a has a different configuration: recipe was" in err
    Path("runs/a/checkpoints/00000004/manifest.json").unlink()
    code, _, err = call("evaluate runs/a")
    assert code == 0 and "checkpoint 00000004 is damaged" in err
    assert "parameters from" in call(f"{LINE} --width 5 --run runs/b --init-from a")[2]


def test_runs_without_a_name_get_one_and_a_fast_dev_run_leaves_nothing(call):
    for _ in range(2):
        assert call(LINE)[0] == 0
    code, out, _ = call(f"{LINE} --fast-dev-run")
    assert code == 0 and "nothing was kept" in out
    assert sorted(path.name for path in Path("runs").iterdir()) == ["my_recipe-1", "my_recipe-2"]


def test_demo_replaces_an_earlier_demo_once_it_is_loaded_and_leaves_a_users_run_alone(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    def train(recipe, swarm, settings, tokens, epochs, folder, *watched):
        assert swarm.demo and settings["steps"] > 0 and not folder.exists()
        return SwarmResult(folder, RunEnd("stopped", "stopped before the first commit", 2), {}, 0, 0)

    assert call(f"{LINE} --run runs/demo")[0] == 0
    before = sorted(path for path in Path("runs").rglob("*"))
    code, out, err = call("demo")
    assert (code, out) == (2, "") and "runs/demo is a run of yours" in err and "mv runs/demo runs/mine" in err
    assert before == sorted(path for path in Path("runs").rglob("*"))

    Path("runs/demo/metrics.jsonl").unlink()
    with Path("runs/demo/config.toml").open("a") as file:
        file.write("\n[swarm]\nmembers = 3\ndemo = true\n")
    with monkeypatch.context() as patch:
        patch.setattr("tpuswarm.train.process.platform.load_jax", interrupted)
        code, _, err = call("demo")
    assert code == 130, err
    assert Path("runs/demo/report.html").exists()
    monkeypatch.setattr("tpuswarm.swarm.supervision.start.train", train)
    code, out, err = call("demo")
    assert code == 130 and "stopped before the first commit" in out + err


def test_damaged_option_of_a_run_is_named_with_its_file(call):
    call(f"{LINE} --width 5 --run runs/a")
    path = Path("runs/a/config.toml")
    whole = path.read_text()
    path.write_text(whole.replace("width = 5", "wjdth = 5"))
    for line in (f"{LINE} --run runs/a", "evaluate runs/a"):
        code, _, err = call(line)
        assert code == 2 and "runs/a/config.toml: " in err and "has no option wjdth; did you mean width?" in err
    path.write_text(whole.replace("width = 5", "width = []"))
    code, _, err = call("evaluate runs/a")
    assert code == 2 and "error: runs/a/config.toml: " in err


def test_internal_error_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("tpuswarm.cli.train.logs_and_stop.find_run", {}.__getitem__)  # no code of a user
    monkeypatch.setattr(sys, "argv", ["tpuswarm", "logs", "last"])
    with pytest.raises(SystemExit, match="1"):
        main()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: internal error: KeyError: 'last'. Traceback: `tpuswarm --debug logs last`\n"


@pytest.mark.parametrize(
    ("package", "line", "installed"),
    [
        ("grpc", "rehearsal start", "tpuswarm[gcloud]"),
        ("wandb", "train my_recipe.py:line --steps 2 --wandb project", "tpuswarm[wandb]"),
        ("tensorboard", "tensorboard", "tpuswarm[tensorboard]"),
        ("ray.dashboard.optional_deps", f"{LINE} --members 2 --dashboard", "ray[default]"),
    ],
)
def test_command_without_its_extra_says_what_to_install(call, monkeypatch, tmp_path, package, line, installed):
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(tmp_path / "cloud"))
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    code, _, err = call(line)
    assert code in (1, 2) and f"pip install '{installed}'" in err, err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no memory left; use a smaller --batch"),
        (
            ModuleNotFoundError("No module named 'rich'"),
            "not whole (No module named 'rich'); run `pip install --force-",
        ),
        (ModuleNotFoundError("No module named 'google.api_core'", name="google.api_core"), "'tpuswarm[gcloud]'`"),
        (RuntimeError("can't start new thread"), "starts no more threads; end other programs, or raise `ulimit -u`"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\n…"), "devices failed (RESOURCE_EXHAUSTED: 9 GiB); use a smaller"),
        (JaxRuntimeError("INTERNAL: a core halted"), "the devices failed (INTERNAL: a core halted); run it again"),
        (ServiceUnavailable("busy"), "Google Cloud failed (ServiceUnavailable: 503 busy); run it again"),
        (RaySystemError("lost"), "Ray failed (RaySystemError: System error: lost); run it again"),
        (wandb.errors.CommError("no answer"), "W&B failed (CommError: no answer); run it again"),
        (httpx.ReadError("cut off"), "a web server failed (ReadError: cut off); run it again"),
        (asyncssh.ConnectionLost("cut off"), "SSH failed (ConnectionLost: cut off); run it again"),
        (ExceptionGroup("two", [ValueError("one"), InputError("the sentence")]), "error: the sentence\n"),
        (ExceptionGroup("two", [ExceptionGroup("one", [PermissionError(13, "no", "x")])]), "error: no: x\n"),
    ],
)
def test_error_from_outside_is_no_internal_one(call, monkeypatch, error, words):
    failed = Future()
    failed.set_exception(error)
    monkeypatch.setattr("tpuswarm.cli.train.logs_and_stop.find_run", failed.result)  # no code of a user
    code, out, err = call("logs last")
    assert (code, out) == (1 + ("sentence" in words), "") and words in err and "internal" not in err


def test_terminal_that_is_not_utf8_gets_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([PROGRAM, "catalog"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "Prices from public lists" in done.stdout


def test_file_called_runs_is_reported(call):
    Path("runs").touch()
    code, out, err = call(LINE)
    assert (code, out) == (2, "") and err == "error: no run can be made in ./runs: it is a file; say where with --run\n"


def test_failed_run_exits_1(call):
    code, _, err = call("train my_recipe.py:line --lr 1e30 --steps 50 --batch 8 --run runs/nan")
    assert code == 1 and "NaN or infinity at step" in err and "checkpoint of step 0 is safe" in err
    assert json.loads(call("status runs/nan --json")[1])["state"] == "failed"

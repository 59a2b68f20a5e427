"""Whole commands, as a user types them: what they print, what they leave, how they end."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests import processes
from tests.terminal import terminal
from tests.train.findings import complaints
from tpuswarm.cli import main
from tpuswarm.cli.swarm import print_result
from tpuswarm.errors import InputError
from tpuswarm.swarm.supervision.start import SwarmResult
from tpuswarm.swarm.supervision.supervisor import Ended
from tpuswarm.train.run.directory import Run, read_config

RECIPE = """
import jax.numpy as jnp
import numpy as np
import optax
from tpuswarm import supervised

def line(width: int = 3, lr: float = 0.1):
    return supervised(
        lambda key: {"w": jnp.zeros(width)},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2),
        optax.sgd(lr),
        lambda split: {"x": np.eye(width, dtype=np.float32)[np.arange(24) % width]},
    )

def bad_trace():
    def loss(params, batch, key):
        return jnp.mean(batch["x"] @ params["w"].T @ jnp.ones((7, 7)))
    return supervised(lambda key: {"w": jnp.zeros(3)}, loss, optax.sgd(0.1), {"x": np.ones((8, 3), np.float32)})

def needs(width: int): return line(width)

def exits(): raise SystemExit(3)

def data_fails():
    def rows(split): raise ConnectionError("no bucket") if split == "x" else KeyError("no such table")
    return supervised(lambda key: {"w": jnp.zeros(3)}, lambda p, b, k: p["w"].sum(), optax.sgd(0.1), rows)
"""


@pytest.fixture
def call(monkeypatch, typed, tmp_path, text_file):
    """Run a command in this process, in an empty directory with my_recipe.py and text.txt; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    Path("my_recipe.py").write_text(RECIPE)
    Path("text.txt").write_text(text_file.read_text())

    return lambda line: typed(*line.split())


TRAIN = "train my_recipe.py:line --steps 4 --batch 8"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trian gpt2-tiny", "did you mean 'train'|Did you mean 'train'"),
        ("train", "recipe"),
        ("train gpt2-tny", "unknown recipe 'gpt2-tny'; did you mean gpt2-tiny"),
        ("train my_recipe.py", "name the one you mean: my_recipe.py:NAME"),
        ("train my_recipe.py:lien", "has no lien; did you mean line"),
        ("train other.py:line", "no recipe file other.py"),
        ("train --lr 1 gpt2-tiny", "the recipe comes first"),
        (f"{TRAIN} --stepz 5", "option --stepz; did you mean --steps"),
        (f"{TRAIN} --widht 5", "option --widht; did you mean --width"),
        ("train gpt2-tiny --learning-rate 1", "option --learning-rate; did you mean --lr?"),
        ("train gpt2-smal", "did you mean gpt2-small?"),
        (
            "train my_recipe.py:exits",
            "my_recipe.py:exits fails to make a recipe: it ends the program with sys.exit (",
        ),
        (f"{TRAIN} --jsn 5", "did you mean --json"),
        (f"{TRAIN} --width", "--width needs a value"),
        (f"{TRAIN} --width wide", "width must be a whole number, not 'wide'"),
        (f"{TRAIN} --data text.txt", "takes no --data"),
        (f"{TRAIN} 5", "unexpected argument '5'"),
        (f"{TRAIN} --steps -5", "steps must be a whole number above 0"),
        (f"{TRAIN} --steps many", "steps is a number such as"),
        (f"{TRAIN} --tokens 5", "one of steps, tokens and epochs"),
        (f"{TRAIN} --batch 12", "a batch of 12 rows does not divide evenly over devices (8)"),
        (f"{TRAIN} --devices 9", "9 devices were asked for, this machine has 8 (cpu)"),
        (f"{TRAIN} --devices [8]", "devices: index 8 is out of range"),
        (f"{TRAIN} --precision fp61", "precision is bf16, f32 or highest, not 'fp61'"),
        (f"{TRAIN} --shard replikate", "shard is auto, replicate or fsdp, not 'replikate'"),
        (f"{TRAIN} --freeze nothing", "freeze 'nothing' matches none of the parameters: w"),
        ("train gpt2-tiny --data fake --decay 0.1", "(its rate is --weight-decay)"),
        (f"{TRAIN} --save-every often", "save_every"),
        (f"{TRAIN} --run text.txt", "text.txt is a file, not a run directory"),
        (f"{TRAIN} --run text.txt/run", "text.txt/run cannot be a run directory: Not a directory"),
        (f"{TRAIN} --run /proc/run", "/proc/run cannot be a run directory: No such file or directory"),
        (f"{TRAIN} --run a/b --precision fp61", "precision is bf16, f32 or highest, not 'fp61'"),
        (f"{TRAIN} --run .", ". is not empty and is not a run"),
        (f"{TRAIN} --run s3://bucket/run", "takes a local directory or gs://BUCKET/FOLDER, not s3://bucket/run"),
        (f"{TRAIN} --init-from nowhere", "nowhere is not a tpuswarm run"),
        ("train gpt2-tiny --init-from nowhere", "nowhere is neither a run nor a published model"),
        ("train my_recipe.py:needs --steps 4", "missing a required argument: 'width'"),
        ("train my_recipe.py:bad_trace --steps 4 --batch 8", "the loss of my_recipe fails: TypeError"),
        ("train my_recipe.py:data_fails --steps 4", "KeyError: 'no such table' ("),
        ("train gpt2-tiny --data nowhere.txt", "there is no file or folder /"),
        ("train gpt2-tiny --data http://127.0.0.1:1/text.txt", "cannot be read"),
        ("train gpt2-tiny --data text.txt --context 100000", "fewer than one row of context 100000"),
        ("train gpt2-tiny --data text.txt --heads 3", "does not divide evenly over 3 heads"),
        ("train gpt2-tiny --tokenizer words", "unknown tokenizer 'words'"),
        (
            "train gpt2-tiny --data text.txt --tokenizer bpe --vocab 100",
            "a BPE needs a vocabulary of at least 257, not 100",
        ),
        ("export nowhere a/out", "nowhere does not exist"),
        ("export nowhere .", ". already exists; use a new or empty folder"),
        ("export nowhere gs://bucket/out --format hf", "gs:/bucket/out is not a local folder; use one"),
        ("export nowhere", "missing argument 'out'; see `tpuswarm export --help`"),
        (
            "status --jsn",
            "there is no option --jsn; did you mean --json?",
        ),
        ("ledger shwo", "Did you mean 'show'? See `tpuswarm ledger --help`"),
        ("export nowhere out --format onnx", "'onnx' is not one of 'hf'"),
        ("status nowhere", "nowhere does not exist"),
        ("status .", ". is not a run"),
        ("status --watch --json", "use one of them"),
        ("sample nowhere", "nowhere does not exist"),
        ("evaluate .", ". is not a run"),
        ("sample last", "there are no runs"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(call, line, words):
    code, out, err = call(line)
    assert code == 2 and out == ""
    sentence = err.strip().splitlines()
    assert len(sentence) == 1 and sentence[0].startswith("error: ") and "Traceback" not in err
    assert any(each in sentence[0] for each in words.split("|")), sentence[0]
    assert sorted(path.name for path in Path().iterdir()) == ["my_recipe.py", "text.txt"]


def test_a_recipes_own_error_is_shown_at_its_line(call):
    _, _, err = call("train my_recipe.py:bad_trace --steps 4 --batch 8")
    line = RECIPE.splitlines().index('        return jnp.mean(batch["x"] @ params["w"].T @ jnp.ones((7, 7)))') + 1
    assert f"my_recipe.py:{line})" in err


def test_debug_shows_the_traceback(call, monkeypatch):
    monkeypatch.delenv("TPUSWARM_DEBUG", raising=False)
    monkeypatch.setenv("TPUSWARM_DEBUG", "")

    with pytest.raises(InputError):
        monkeypatch.setattr(sys, "argv", ["tpuswarm", "--debug", "train", "gpt2-tny"])
        main()


def test_a_run_from_its_first_to_its_last_command(call):
    code, out, err = call(f"{TRAIN} --run runs/a --eval-every 2")
    assert code == 0 and out.startswith("runs/a finished at step 4 of 4: loss ")
    assert "parameter" in err and "step 4 of 4: held-out loss" in err
    assert "rows/s" in err and "tokens/s" not in err  # a row of this recipe counts for one
    code, out, err = call(f"{TRAIN} --run runs/a --json")
    assert code == 0 and "nothing left to do" in err
    assert json.loads(out)["ended"] == "finished" and json.loads(out)["metrics"]["step"] == 4
    code, out, _ = call("status --json")
    assert [(each["run"], each["state"], each["step"]) for each in json.loads(out)["runs"]] == [
        ("runs/a", "finished", 4)
    ]
    code, out, err = call("status last --json")
    assert json.loads(out)["recipe"] == "my_recipe" and err == ""
    assert call("status")[1].splitlines()[1].split()[:3] == ["runs/a", "my_recipe", "finished"]
    code, out, _ = call("evaluate last --json")
    assert code == 0 and (json.loads(out)["run"], json.loads(out)["rows"]) == ("runs/a", 24)
    code, out, err = call("sample runs/a")
    assert code == 2 and "my_recipe cannot generate text" in err
    code, _, err = call(f"{TRAIN} --run runs/a --lr 0.2")
    assert code == 2 and "lr was 0.1, now 0.2" in err
    code, _, err = call("train gpt2-tiny --run runs/a")
    assert code == 2 and "runs/a has a different configuration: recipe was" in err
    Path("runs/a/checkpoints/00000004/manifest.json").unlink()
    code, _, err = call("evaluate runs/a")
    assert code == 0 and "checkpoint 00000004 is damaged" in err
    assert "parameters from" in call(f"{TRAIN} --run runs/b --init-from a")[2]


def test_options_of_a_recipe_file_are_remembered(call):
    assert call("train my_recipe.py:line --width 5 --steps 2 --batch 8 --run runs/w")[0] == 0
    assert "width = 5\nlr = 0.1" in Path("runs/w/config.toml").read_text()
    assert call("evaluate runs/w")[0] == 0
    assert call("train my_recipe.py:line --steps 2 --batch 8 --run runs/w")[0] == 0  # what is not asked is as it was


def test_runs_without_a_name_get_one(call):
    for _ in range(2):
        assert call(TRAIN)[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["my_recipe-1", "my_recipe-2"]


def test_a_failed_run_exits_1(call):
    code, _, err = call("train my_recipe.py:line --lr 1e30 --steps 50 --batch 8 --run runs/nan")
    assert code == 1 and "NaN or infinity at step" in err and "checkpoint of step 0 is safe" in err
    assert json.loads(call("status runs/nan --json")[1])["state"] == "failed"


def test_training_on_text_learns_it(finished_run):
    run, result, err = finished_run
    assert result["ended"] == "finished" and result["metrics"]["eval_loss"] < 2.5 < 3.5
    assert "gpt2-tiny on 1 x cpu" in err and "blocks/attn/qkv/w" in err and "head" in err
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] > 3 * 0.9 and first["tokens"] == 12 * 64
    assert complaints(run) == set() and "where the time went" in err


def test_the_best_checkpoint_is_evaluated_on_demand(call, text_file, finished_run):
    """A learning rate that makes it worse at the end."""
    run = "--layers 1 --width 8 --heads 1 --context 8 --devices 1 --keep 1 --eval-every 2 --run runs/best"
    code, _, err = call(f"train gpt2-tiny --data {text_file} --steps 6 --lr 3 --warmup 0.9 --keep-best eval_loss {run}")
    assert code == 0, err
    rows = [json.loads(line) for line in Path("runs/best/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert losses[best] + 0.1 < losses[6]
    found = {each: json.loads(call(f"evaluate runs/best --json {each}")[1]) for each in ("--best", "")}
    assert found["--best"]["step"] == best and found[""]["step"] == 6
    assert found["--best"]["loss"] == pytest.approx(losses[best], rel=1e-4)
    assert call("export runs/best out --best --json")[0] == 0 and call("sample runs/best --best --tokens 3")[0] == 0
    code, _, err = call(f"evaluate {finished_run[0]} --best")
    assert code == 2 and "has no checkpoint of its best evaluation: train with keep_best, --keep-best eval_loss" in err


def test_samples_and_evaluations_of_a_trained_run(finished_run, call, text_file):
    run, result, _ = finished_run
    code, out, _ = call(f"sample {run} --prompt line --tokens 80 --seed 1")
    assert code == 0 and out.startswith("line") and len(out.rstrip("\n")) >= 70
    assert call(f"sample {run} --prompt line --tokens 80 --seed 1")[1] == out
    greedy = call(f"sample {run} --prompt line --tokens 20 --temperature 0")[1]
    assert call(f"sample {run} --prompt line --tokens 20 --temperature 0 --seed 9")[1] == greedy
    code, _, err = call(f"sample {run} --prompt é")
    assert code == 2 and "alphabet" in err
    own = json.loads(call(f"evaluate {run} --json")[1])
    assert abs(own["loss"] - result["metrics"]["eval_loss"]) < 0.05
    everything = json.loads(call(f"evaluate {run} --data {text_file} --json")[1])
    assert everything["rows"] > 5 * own["rows"]
    assert call(f"sample {run} --tokens 0")[0] == 2


def test_fine_tuning_keeps_the_alphabet_of_its_parent(finished_run, call):
    run = finished_run.run
    Path("more.txt").write_text("the lazy dogs jumps over 7 foxs.\n" * 60)
    shape = "--layers 1 --freeze wte|wpe --steps 2"
    line = f"train gpt2-tiny --data more.txt --init-from {run} {shape} --run runs/tuned"
    code, _, err = call(line)
    assert code == 0 and "parameters from" in err
    config = Run(Path("runs/tuned")).config()
    parent = json.loads(call(f"status {run} --json")[1])
    assert config["recipe"]["options"]["layers"] == 1 and parent["steps"] == 60
    Path("foreign.txt").write_text("ключ " * 100)
    code, _, err = call(f"train gpt2-tiny --data foreign.txt --init-from {run} --steps 2")
    assert code == 2 and "alphabet" in err


def test_a_model_is_checked_before_a_long_run(call, tmp_path):
    shape = "train gpt2-tiny --data fake --layers 1 --width 8 --heads 1 --context 8 --devices 1"
    code, out, err = call(f"{shape} --steps 100000 --fast-dev-run --run runs/long")
    assert (
        code == 0 and "the fast dev run went through: two steps, an evaluation, a checkpoint; nothing was kept" in out
    )
    assert "step 2 of 2: held-out loss" in err and not list(Path().glob("runs/*"))
    code, _, err = call(f"{shape} --steps 2 --overfit-batches 3 --run runs/few")
    assert code == 0 and "trains and evaluates on the first 36 rows alone" in err and " over 36 rows" in err
    code, _, err = call(f"{shape} --members 2 --fast-dev-run")
    assert code == 2 and "--overfit-batches and --fast-dev-run check a model in one process: leave --members out" in err
    code, _, err = call(f"{shape} --members 2 --keep-best eval_loss")
    assert code == 2 and "--keep-best does not work with --members" in err


def test_a_learning_rate_is_looked_for_once(call):
    shape = "train gpt2-tiny --data fake --layers 1 --width 16 --heads 1 --context 8 --devices 1 --batch 8 --lr auto"
    code, _, err = call(f"{shape} --steps 3 --run runs/found")
    assert code == 0, err
    found = re.search(r"learning rate (\S+): there the loss falls fastest, of 1e-06 to 1 in 100 steps", err)
    assert found and read_config(Path("runs/found"))["recipe"]["options"]["lr"] == float(found[1])
    code, _, err = call(f"{shape} --steps 3 --run runs/found")  # it has one
    assert code == 0 and "looking for the learning rate" not in err and "falls fastest" not in err
    code, _, err = call(f"{shape} --members 2")
    assert code == 2 and "--lr auto looks in one process" in err
    code, _, err = call(f"{shape.replace('--batch 8', '--batch auto')}")
    assert code == 2 and "--lr auto looks at the batch of the run" in err


def test_fake_data_needs_nothing(call):
    code, out, _ = call("train gpt2-tiny --data fake --layers 1 --steps 2 --devices 1 --tokenizer characters")
    assert code == 0 and "finished at step 2" in out
    code, _, err = call("sample last")
    assert code == 2 and "fake data" in err


def test_help_is_there_for_every_command(call):
    code, out, _ = call("")
    assert code == 0
    for command in (
        "demo", "simulate", "train", "join", "status", "logs", "stop", "sample", "evaluate", "export", "ledger",
        "ledger show", "ledger verify",
    ):  # fmt: skip
        assert command.split()[0] in out
        code, text, _ = call(f"{command} --help")
        assert code == 0 and "Usage: tpuswarm" in text


def test_the_demo_leaves_a_run_of_the_user_alone(call):
    assert call(f"{TRAIN} --run runs/demo")[0] == 0
    before = sorted(path for path in Path("runs").rglob("*"))
    code, out, err = call("demo")
    assert (code, out) == (2, "") and "runs/demo is a run of yours" in err and "mv runs/demo runs/mine" in err
    assert before == sorted(path for path in Path("runs").rglob("*"))


def test_a_demo_that_is_interrupted_while_it_loads_keeps_the_earlier_one(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    assert call(f"{TRAIN} --run runs/demo")[0] == 0
    Path("runs/demo/metrics.jsonl").unlink()
    with Path("runs/demo/config.toml").open("a") as file:
        file.write("\n[swarm]\nmembers = 3\ndemo = true\n")
    monkeypatch.setattr("tpuswarm.train.process.platform.load_jax", interrupted)
    code, _, err = call("demo")
    assert code == 130, err
    assert Path("runs/demo/report.html").exists()


@pytest.mark.slow
def test_the_demo(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")  # it trains for minutes without them, as nobody's demo does
    with terminal(["demo"], tmp_path) as opened:
        opened.wait("(m1)")
        opened.wait(lambda each: re.search(r"m1 +lost", each.screen))
        opened.wait(lambda each: re.search(r"m1 +alive", each.screen))
        opened.finish()
    assert "runs/demo finished at commit" in opened.sentences and "none twice" in opened.sentences
    assert (
        "finished" in opened.screen and "what the model writes now" in opened.screen
    )  # the end fits on a small screen
    folder = tmp_path / "runs" / "demo"
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page and "kill" in page
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert rows[-1]["eval_loss"] < 2.2 < 4.0 < losses[0]
    again = processes.start(["demo"], tmp_path)

    def begun() -> bool:
        with suppress(InputError):  # for a moment there are no metrics: the old run was removed
            return processes.updates(folder) in range(1, 600)
        return False

    processes.wait_for(begun, again)
    _, err = processes.run(["demo"], tmp_path, code=2)
    assert f"in use by process {again.pid}" in err
    again.kill()
    again.communicate()


def test_rows_are_not_called_tokens(call, capsys):
    assert call(f"{TRAIN} --run runs/a")[0] == 0
    print_result(SwarmResult(Path("runs/a"), Ended("finished", "", None), {}, 4, 7_680), as_json=False)
    assert capsys.readouterr().out == "runs/a finished at commit 4: 7,680 rows; runs/a/report.html\n"


def test_a_fault_of_the_programs_own_is_one_sentence_too(call, monkeypatch):
    def broken(*_):
        raise KeyError("this is not there")

    monkeypatch.setattr("tpuswarm.train.run.listing.find_run", broken)
    code, out, err = call("logs last")
    assert (code, out) == (1, "") and err == (
        "error: internal error: KeyError: 'this is not there'; `tpuswarm --debug logs last` shows where\n"
    )


def test_runs_that_is_a_file_is_no_place_for_runs(call):
    Path("runs").touch()
    code, out, err = call(TRAIN)
    assert (code, out) == (2, "") and err == "error: no run can be made in ./runs: it is a file; say where with --run\n"

"""Commands that train, check, evaluate, sample and fine-tune a small GPT-2."""

import json
import re
from pathlib import Path

import pytest

from tests.train.findings import complaints
from tpuswarm.train.run.directory import Run, read_config

pytestmark = pytest.mark.slow
TINY = "train gpt2-tiny --layers 1 --width 8 --heads 1 --context 8 --devices 1 --batch 8"


def test_training_on_text_lowers_the_loss(finished_run):
    run, result, err = finished_run
    assert result["ended"] == "finished" and result["metrics"]["eval_loss"] < 2.5 < 3.5
    assert "gpt2-tiny on 1 x cpu" in err and "\nmodel: 1 layer" in err and "\nsettings: " in err
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] > 3 * 0.9 and first["tokens"] == 12 * 64
    assert complaints(run) == set() and "where the time went" in err


def test_best_checkpoint_is_used_on_demand(call, text_file, finished_run):
    """The learning rate makes the run worse at its end."""
    options = "--steps 6 --lr 3 --warmup 0.9 --keep 1 --eval-every 2 --keep-best eval_loss --run runs/best"
    code, _, err = call(f"{TINY} --data {text_file} {options}")
    assert code == 0, err
    rows = [json.loads(line) for line in Path("runs/best/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert losses[best] + 0.1 < losses[6]
    evaluated = json.loads(call("evaluate runs/best --json --best")[1])
    assert evaluated["step"] == best and evaluated["loss"] == pytest.approx(losses[best], rel=1e-4)
    assert json.loads(call("evaluate runs/best --json")[1])["step"] == 6
    assert json.loads(call("export runs/best out --best --json")[1])["step"] == best
    code, _, err = call("export runs/best merged --merge")
    assert code == 2 and "gpt2-tiny has no adapters: leave --merge out" in err and not Path("merged").exists()
    assert call("sample runs/best --best --tokens 3")[0] == 0
    code, _, err = call(f"evaluate {finished_run.run} --best")
    assert code == 2 and "train with keep_best, --keep-best eval_loss" in err


def test_sampling_and_evaluating_a_trained_run(finished_run, call, text_file):
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


def test_fine_tuning_keeps_the_parents_alphabet(finished_run, call):
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


def test_learning_rate_is_searched_for_once(call):
    line = f"{TINY} --data fake --steps 3 --lr auto --run runs/found"
    code, _, err = call(line)
    assert code == 0, err
    found = re.search(r"learning rate (\S+): the loss falls fastest there, of 100 steps from 1e-06 to 1", err)
    assert found and read_config(Path("runs/found"))["recipe"]["options"]["lr"] == float(found[1])
    code, _, err = call(line)
    assert code == 0 and "looking for the learning rate" not in err and "falls fastest" not in err
    code, _, err = call("sample last")
    assert code == 2 and "fake data" in err

"""Hooks and loggers that a recipe brings, in a swarm of a real process."""

import numpy as np
import pytest
from matplotlib.image import imread

from tests.processes import finish, start
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows

pytestmark = pytest.mark.slow

RECIPE = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from tests.train import toy
from tpuswarm import Every, Stop, supervised


def weights(step):
    return {"size": jnp.abs(step.state.params["layer"]["w"]).sum(), "at": step.row["version"]}

def text(step):
    return f"step {step.row['step']} has eval_loss {step.row['eval_loss']:.3f}"

def picture(step):
    return np.full((4, 6, 3), 7, np.uint8)

def fails(step):
    raise KeyError("colour")


class Printed:
    def __init__(self):
        self.file = open("rows.jsonl", "a")

    def write(self, row):
        self.file.write(json.dumps(row) + "\\n")

    def close(self):
        self.file.write("closed")
        self.file.close()


def recipe():
    made = supervised(toy.init, toy.loss, optax.sgd(0.01), toy.splits)
    made.hooks = lambda: [Every("evaluation", each) for each in (weights, text, picture, lambda step: Stop("enough"))]
    made.loggers = lambda: [Printed()]
    return made


def failing():
    made = recipe()
    made.hooks = lambda: [Every("evaluation", each) for each in (fails, weights)]
    return made
"""


def train(folder, name):
    (folder / "mine.py").write_text(RECIPE)
    words = f"train mine.py:{name} --steps 8 --batch 8 --members 1 --cycle 2 --eval-every 4 --run {name}"
    _, err = finish(start(words.split(), folder))
    run = folder / name
    rows = list(read_rows(run / METRICS))
    texts = {row["text"] for row in read_rows(run / EVENTS) if row["event"] == "sample"}
    return run, rows, [row for row in rows if "eval_loss" in row], texts, err


def test_swarm_calls_hooks_at_evaluations_and_writes_to_loggers(tmp_path):
    run, rows, evaluations, texts, err = train(tmp_path, "recipe")
    assert evaluations and all(row["eval_size"] > 0 and row["eval_at"] == row["version"] for row in evaluations)
    last = evaluations[-1]
    assert last["tokens"] == 64 and f"step 8 has eval_loss {last['eval_loss']:.3f}" in texts
    assert "a hook returned Stop(reason='enough'), which a swarm does not follow" in texts
    np.testing.assert_array_equal(imread(run / "pictures" / f"{last['version']:08d}-2.png")[..., :3] * 255, 7)
    assert f"step 8 has eval_loss {last['eval_loss']:.3f}" in err
    report = (run / "report.html").read_text()
    assert "step 8 has eval_loss" in report
    *logged, end = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert end == "closed" and len(logged) == len(rows)


def test_failing_hook_is_told_and_the_swarm_goes_on(tmp_path):
    _, _, evaluations, texts, err = train(tmp_path, "failing")
    assert evaluations[-1]["tokens"] == 64 and evaluations[-1]["eval_size"] > 0
    assert any("a hook failed at step 8: KeyError: 'colour' (" in text and "mine.py:" in text for text in texts)
    assert "a hook failed at step" in err

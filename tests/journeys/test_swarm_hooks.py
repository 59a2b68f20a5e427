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
    hooks = (fails, weights, text, picture, lambda step: Stop("enough"))
    made.hooks = lambda: [Every("evaluation", hook) for hook in hooks]
    made.loggers = lambda: [Printed()]
    return made
"""


def test_hooks_are_called_at_evaluations_though_one_fails_and_loggers_get_every_row(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    words = "train mine.py:recipe --steps 8 --batch 8 --members 1 --cycle 2 --eval-every 4 --run run"
    _, err = finish(start(words.split(), tmp_path))
    run = tmp_path / "run"
    rows = list(read_rows(run / METRICS))
    texts = {row["text"] for row in read_rows(run / EVENTS) if row["event"] == "sample"}
    evaluations = [row for row in rows if "eval_loss" in row]
    assert evaluations and all(row["eval_size"] > 0 and row["eval_at"] == row["version"] for row in evaluations)
    last = evaluations[-1]
    assert last["tokens"] == 64 and f"step 8 has eval_loss {last['eval_loss']:.3f}" in texts
    assert "a hook returned Stop(reason='enough'), which a swarm ignores" in texts
    np.testing.assert_array_equal(imread(run / "pictures" / f"{last['version']:08d}-3.png")[..., :3] * 255, 7)
    assert f"step 8 has eval_loss {last['eval_loss']:.3f}" in err
    assert any("a hook failed at step 8: KeyError: 'colour' (" in text and "mine.py:" in text for text in texts)
    assert "a hook failed at step" in err
    assert "step 8 has eval_loss" in (run / "report.html").read_text()
    *logged, end = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert end == "closed" and len(logged) == len(rows)

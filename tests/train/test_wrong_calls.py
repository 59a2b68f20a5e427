"""Functions and settings that cannot work are refused in one sentence, before anything is trained or written."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import EarlyStopping, Every, IndexedSource, InputError, Trainer, supervised
from tpuswarm.train.run.directory import Run

X = np.ones((64, 3), np.float32)
DATA = {"train": {"x": X}, "validation": {"x": X[:8]}}
ITEMS = [{"x": row, "text": "a text"} for row in X]


class LightningModule:
    """Recognised by its name."""


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, batch, key):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - 1))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": lambda params, batch: 0}, r"called as loss\(params, batch, key\).*\(params, batch\).*calls.py:"),
        ({"loss": None}, r"loss is a NoneType; give a function loss\(params, batch, key\)"),
        ({"extra": init}, r"loss is called as loss\(params, extra, batch, key\)"),
        ({"init": lambda: {}}, r"init is called as init\(key\)"),
        ({"init": lambda key: {"a": {"w": "x"}}}, r"parameter a/w is a str: parameters are .* \(.*calls.py:\d+\)"),
        ({"extra": lambda key: "x", "loss": lambda *_: 0}, "extra of the state .* is a str"),
        ({"defaults": 3}, "defaults is a int, not a dict"),
        ({"defaults": {"step": 7}}, r"defaults takes no step; did you mean steps\?"),
        ({"schedule": lambda: 0.1, "optimizer": optax.adam}, r"schedule is called as schedule\(progress\)"),
        ({"schedule": lambda p: p, "optimizer": lambda lr: optax.adam(lr)}, r"optimizer\(learning_rate, decay_mask\)"),
        ({"data": lambda: DATA}, r"data is called as data\(split\)"),
        ({"data": {"train": {"x": X}, "valid": {"x": X}}}, "data has a dict under train.*train, validation, test, all"),
        ({"data": IndexedSource(ITEMS, names=["x", "txt"])}, r"row 16 of the data has no txt; did you mean text\?"),
        ({"data": IndexedSource(ITEMS, names=["x", "text"])}, r"text of row 16 of the data is a str"),
    ],
)
def test_wrong_argument_of_supervised_is_refused(tmp_path, changed, sentence):
    with pytest.raises(InputError, match=sentence):
        arguments = {"init": init, "loss": loss, "optimizer": optax.adam(0.1), "data": DATA} | changed
        Trainer(devices=1).fit(supervised(**arguments), steps=2, batch=8, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "fit_options", "sentence"),
    [
        ({"devices": 4, "eval_batch": 6}, {}, r"a batch of 6 rows does not divide evenly over devices \(4\)"),
        ({"keep": 0}, {}, "keep must be at least 1"),
        ({"eval_batch": "x"}, {}, "eval-batch must be a number, not 'x'"),
        ({"hooks": Every(2, print)}, {}, r"hooks are given as a list, \[Every\(100, function\)\]"),
        ({"hooks": [print]}, {}, r"hooks are given as \[Every\(100, function\)\], not as a builtin"),
        ({"hooks": [Every(1, lambda: None)]}, {}, r"hook is called as hook\(step\)"),
        ({"hooks": [Every("often", lambda step: None)]}, {}, "a hook's every is steps such as 500"),
        ({"hooks": [Every("5m", EarlyStopping())]}, {}, r"EarlyStopping counts eval.* not as Every\('5m', …\)"),
        ({"loggers": [3]}, {}, r"a logger needs write\(row\) and close\(\); got a int"),
        ({}, {"batch": 8.0}, "batch must be a whole number, not 8.0"),
        ({}, {"batch": "many"}, "batch must be a number, not 'many'"),
        ({}, {"recipe": (init, loss)}, "recipe is a tuple; give a recipe, such as .*supervised"),
        (
            {},
            {"recipe": LightningModule()},
            r"LightningModule; make a recipe .*tpuswarm.torch.recipe\(module, data=…\)",
        ),
        ({"fast_dev_run": True, "hosts": 2, "host": 0, "hosts_at": "127.0.0.1:1"}, {}, "a fast dev run is of one"),
    ],
)
def test_wrong_argument_of_a_trainer_leaves_no_run_behind(tmp_path, options, fit_options, sentence):
    folder = tmp_path / "run"
    with pytest.raises(InputError, match=sentence):
        toy.trainer(**options).fit(**{"recipe": toy.recipe(), "steps": 2, "batch": 8, "run": folder} | fit_options)
    assert not folder.exists()
    Run(folder).close()  # and it is not held

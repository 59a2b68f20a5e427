"""Functions, settings and names that cannot be: one sentence, before anything is trained."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpuswarm
from tpuswarm import EarlyStopping, Every, IndexedSource, InputError, Trainer, supervised
from tpuswarm.train.run.directory import METRICS, read_rows

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
DATA = {"train": {"x": X}, "validation": {"x": X[:8]}}


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, batch, key):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - 1))


def recipe(**changed):
    return supervised(**{"init": init, "loss": loss, "optimizer": optax.adam(0.1), "data": DATA} | changed)


def with_metric(name):
    return lambda params, batch, key: (loss(params, batch, key), {name: jnp.float32(1)})


def two_arguments(params, batch):
    return loss(params, batch, None)


class Items:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"x": X[i], "text": f"row {i}", "parts": {"y": X[i]}}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": two_arguments}, r"loss is called as loss\(params, batch, key\).*\(params, batch\).*calls.py:\d+"),
        ({"loss": None}, r"loss is a NoneType; give a function loss\(params, batch, key\)"),
        ({"extra": init}, r"loss is called as loss\(params, extra, batch, key\)"),
        ({"extra": lambda: {}}, r"loss is called as loss\(params, extra, batch, key\)"),
        ({"init": lambda: {}}, r"init is called as init\(key\)"),
        ({"init": lambda key: {"a": {"w": "x"}}}, r"parameter a/w is a str: parameters are .* \(.*calls.py:\d+\)"),
        ({"extra": lambda key: "x", "loss": lambda *_: 0}, "extra of the state .* is a str"),
        ({"defaults": 3}, "defaults is a int, not a dict"),
        ({"init": {"w": X}}, r"init is a dict; give a function init\(key\)"),
        ({"schedule": lambda: 0.1, "optimizer": optax.adam}, r"schedule is called as schedule\(progress\)"),
        ({"schedule": lambda p: p, "optimizer": lambda lr: optax.adam(lr)}, r"optimizer\(learning_rate, decay_mask\)"),
        ({"data": lambda: DATA}, r"data is called as data\(split\)"),
        ({"data": {"train": (X, X)}}, r"the train data of test_wrong_calls is a tuple: give a dict of arrays"),
        ({"data": {"train": {"x": X}, "valid": {"x": X}}}, r"data has a dict under train.*train, validation, all"),
        ({"data": IndexedSource(Items(), names=["x", "txt"])}, r"an item of the data has no txt; did you mean text\?"),
        ({"data": IndexedSource(Items(), names=["x", "text"])}, r"text of the data is a str"),
        ({"data": IndexedSource(Items(), names=["x", "parts"])}, r"parts of the data is a dict"),
        ({"loss": with_metric("rows")}, "a metric cannot be called rows"),
        ({"loss": with_metric("eval_loss")}, "a metric cannot be called eval_loss"),
    ],
)  # fmt: skip
def test_what_a_recipe_is_made_of(tmp_path, changed, sentence):
    with pytest.raises(InputError, match=sentence):
        Trainer().fit(recipe(**changed), steps=2, batch=8, run=tmp_path / "a")


@pytest.mark.parametrize(
    ("trainer", "asked", "sentence"),
    [
        ({"hooks": Every(2, print)}, {}, r"hooks are given as a list, \[Every\(100, function\)\]"),
        ({"hooks": [print]}, {}, r"hooks are given as \[Every\(100, function\)\], not as a builtin"),
        ({"hooks": [Every(1, lambda: None)]}, {}, r"hook is called as hook\(step\)"),
        ({"loggers": [3]}, {}, r"a logger needs write\(row\) and close\(\); got a int"),
        ({"eval_batch": "x"}, {}, "eval-batch must be a number, not 'x'"),
        ({}, {"batch": 8.0}, "batch must be a whole number, not 8.0"),
        ({}, {"batch": "many"}, "batch must be a number, not 'many'"),
    ],
)
def test_what_a_trainer_is_given(tmp_path, trainer, asked, sentence):
    with pytest.raises(InputError, match=sentence):
        Trainer(**trainer).fit(recipe(), run=tmp_path / "a", **{"steps": 2, "batch": 8} | asked)
    assert not (tmp_path / "a").exists()


def test_what_is_trained_is_a_recipe(tmp_path):
    with pytest.raises(InputError, match=r"what is trained is a recipe, not a tuple: .*supervised"):
        Trainer().fit((init, loss), steps=2, run=tmp_path / "a")  # type: ignore[arg-type]


def test_early_stopping_counts_anew_in_every_run(tmp_path):
    trainer = Trainer(hooks=[Every("evaluation", EarlyStopping(patience=2, least=1e9))], eval_every=2)
    for name in ("a", "b"):
        assert trainer.fit(recipe(), steps=40, batch=8, run=tmp_path / name).step == 6, "best, then twice no better"


def test_steps_that_a_run_cannot_have_are_refused_with_the_reason(tmp_path):
    Trainer().fit(recipe(), steps=4, batch=8, run=tmp_path / "a")
    with pytest.raises(InputError, match="steps was 4, now 2, and a run can only become longer"):
        Trainer().fit(recipe(), steps=2, batch=8, run=tmp_path / "a")
    Trainer().fit(recipe(), steps=6, batch=8, run=tmp_path / "a")
    assert max(row["step"] for row in read_rows(tmp_path / "a" / METRICS)) == 6


def test_what_is_not_saved(tmp_path):
    file = tmp_path / "tree.safetensors"
    tree = {"a": np.zeros(1), "a/b": np.ones(2)}
    with pytest.raises(InputError, match="a is a leaf, and another's path begins with it"):
        tpuswarm.save(tree, file)
    with pytest.raises(InputError, match="a pytree is saved on a disk"):
        tpuswarm.save(tree, "gs://bucket/tree.safetensors")
    with pytest.raises(InputError, match=r"layer/name \(str32\) is no array of numbers that a .safetensors file holds"):
        tpuswarm.save({"layer": {"name": "x"}}, file)
    from safetensors.numpy import save_file

    save_file(tree, file)  # another library does
    with pytest.raises(InputError, match=r"array a, and others whose path begins with it: .*like="):
        tpuswarm.load(file)
    assert tpuswarm.load(file, like=tree)["a/b"].tolist() == [1, 1]

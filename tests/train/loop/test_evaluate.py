"""Evaluations count every held-out row once; their errors come before the first step."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import (
    ArraySource,
    EarlyStopping,
    Every,
    InputError,
    NoSuchSplit,
    StreamSource,
    Trainer,
    Weighted,
    load,
    supervised,
)
from tpuswarm.train.loop.evaluate import HeldOut, evaluate, parts, trace_evaluation
from tpuswarm.train.program.compiled import place_program
from tpuswarm.train.program.request import Request
from tpuswarm.train.run.directory import METRICS, read_rows

HELD_OUT = {name: array[:11] for name, array in toy.data(1).items()}


def placed(devices, loss=toy.loss, data=None, init=toy.init, batch=8):
    return place_program(supervised(init, loss, optax.sgd(0.1), data or toy.data()), Request(batch=batch), devices)


def held_out_with_weights(rows):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, 5)).astype(np.float32)
    return {"x": x, "y": x.sum(1) ** 2, "counts": (random.random(rows) < 0.3).astype(np.float32)}


def weighted_loss(params, batch, key):
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    counted = Weighted((error * batch["counts"]).sum(), batch["counts"].sum())
    return error.mean(), {"counted": counted}


@cache
def weighted(count):
    """A program and its state on so many devices, shared by all numbers of rows."""
    data, devices = held_out_with_weights(64), jax.devices()[:count]
    found = placed(devices, weighted_loss, data, lambda key: {"w": jnp.arange(5.0)}, batch=64)
    return found, found.init(jax.random.key(0))


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 64, 100, 130])
@pytest.mark.parametrize("count", [1, 8])
def test_every_row_counts_once(rows, count):
    data = held_out_with_weights(rows)
    values, counted = evaluate(*weighted(count), ArraySource(data), 64)
    error = (data["x"].astype(np.float64) @ np.arange(5) - data["y"]) ** 2
    assert counted == rows
    np.testing.assert_allclose(values["loss"], error.mean(), rtol=1e-5)
    total = data["counts"].sum()
    expected = {"counted": pytest.approx(error @ data["counts"] / total, rel=1e-5)} if total else {}
    assert {name: value for name, value in values.items() if name == "counted"} == expected


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 23, 24, 25, 71, 240])
def test_parts_cover_all_rows_in_few_sizes_within_the_batch_of_a_device(rows, devices):
    found = list(parts(rows, 24, devices))
    assert [row for part in found for row in range(part.first, part.first + part.rows)] == list(range(rows))
    assert len({(part.rows, part.is_split) for part in found}) <= 4
    for part in found:
        assert not part.is_split or part.rows % devices == 0
        assert (part.rows // devices if part.is_split else part.rows) <= 24 // devices


@pytest.mark.parametrize("count", [1, 4])
def test_evaluation_does_not_trace_again_after_the_rehearsal(devices, count):
    traced = []

    def loss(params, batch, key):
        traced.append(len(batch["x"])) if key is None else None
        return toy.loss(params, batch, key)

    found, source = placed(devices[:count], loss), ArraySource(HELD_OUT)
    state = found.init(jax.random.key(0))
    traced.clear()
    assert sorted(trace_evaluation(found, "toy", HeldOut(source, 8))) == ["loss", "worst"]
    sizes = {1: [8, 3], 4: [8, 2, 1]}[count]
    assert traced == sizes
    evaluate(found, state, source, 8)
    assert traced == sizes


@pytest.mark.parametrize(
    ("group", "count", "batch", "words"),
    [
        (2, 1, 8, r"over 3 rows, left of 11 held-out ones by batches of 8: hold out a multiple, .*reshape"),
        (2, 4, 8, r"over 1 rows, left of 11 held-out ones by batches of 8"),
        (8, 1, 4, r"over a batch of 4 rows \(--eval-batch\).*reshape.*test_evaluate\.py:"),
    ],
)
def test_loss_that_cannot_take_the_number_of_held_out_rows_is_refused(devices, group, count, batch, words):
    def loss(params, batch, key):
        return jnp.mean((batch["x"].reshape(-1, group, 5) @ params["layer"]["w"]).max(1)), {}

    with pytest.raises(InputError, match=words) as refused:
        trace_evaluation(placed(devices[:count], loss), "toy", HeldOut(ArraySource(HELD_OUT), batch))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("held_out", "options", "words"),
    [
        ((HELD_OUT["x"], HELD_OUT["y"]), {}, "the validation data of toy is a tuple: give a dict of arrays"),
        (HELD_OUT | {"y": HELD_OUT["y"][:9]}, {}, "data of toy: data arrays need the same, .* {'x': 11, 'y': 9}"),
        (StreamSource([HELD_OUT]), {}, "data of toy has no rows_per_epoch, so evaluation would never end; say"),
        ({"x": HELD_OUT["x"]}, {}, "a row of the validation data of toy has no y"),
        (HELD_OUT | {"y": HELD_OUT["y"].astype(np.float64)}, {}, r"has float64\[\] y, and one of its training data f"),
        (HELD_OUT | {"x": HELD_OUT["x"][:, :4]}, {}, r"has float32\[4\] x, and one of its training data float32\[5\]"),
        (HELD_OUT | {"z": HELD_OUT["y"]}, {}, r"has float32\[\] z, and one of its training data none"),
        (HELD_OUT, {"keep_best": "eval_acc:max"}, "the evaluations have no eval_acc; they have .*eval_worst"),
        (HELD_OUT, {"hooks": "eval_acc:max"}, "the evaluations have no eval_acc; they have .*eval_worst"),
        (None, {"hooks": "eval_loss"}, "eval_loss is a figure of evaluations, and there are none: give validation"),
        (None, {"keep_best": "eval_loss"}, "has no held-out rows: keep_best eval_loss has no meaning"),
    ],
)
def test_run_whose_evaluations_cannot_work_does_not_start(tmp_path, held_out, options, words):
    if metric := options.get("hooks"):
        options = {"hooks": [Every("evaluation", EarlyStopping(metric))]}
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(), "validation": held_out})
    with pytest.raises(InputError, match=words):
        toy.trainer(eval_every=None, **options).fit(recipe, steps=2, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluation_of_a_part_of_the_rows_says_of_how_many(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.trainer.EVAL_BATCHES", 3)
    Trainer(devices=1, eval_batch=8).fit(toy.recipe(), steps=1, batch=8, run=tmp_path / "run")
    (row,) = (row for row in read_rows(tmp_path / "run" / METRICS) if "eval_loss" in row)
    assert (row["eval_rows"], row["eval_rows_total"]) == (24, toy.ROWS)
    assert f"over 24 of {toy.ROWS} rows" in capsys.readouterr().err


def test_checkpoint_of_a_run_is_evaluated_on_each_split(tmp_path):
    sizes = {"train": 24, "validation": 10, "test": 7}
    data = {name: {"x": np.random.default_rng(size).normal(size=size).astype("f")} for name, size in sizes.items()}

    def loss(params, batch, key):
        return jnp.square(batch["x"] - params["w"]).mean(), {"largest": jnp.abs(params["w"])}

    recipe = supervised(lambda key: {"w": jnp.zeros(())}, loss, optax.sgd(0.1), data)
    trainer = Trainer(devices=2, eval_every=2, keep_best="eval_loss")
    trained = trainer.fit(recipe, steps=6, batch=8, run=tmp_path / "run")
    w = float(trained.state.params["w"])
    for split in sizes:
        found = trainer.evaluate(recipe, run=tmp_path / "run", split=split, batch=4)
        assert found["loss"] == pytest.approx(np.square(data[split]["x"] - w).mean(), rel=1e-5)
        assert found["largest"] == pytest.approx(abs(w), rel=1e-6)
    best = load(tmp_path / "run", best=True, like={"params": {"w": 0.0}})["params"]["w"]
    found = trainer.evaluate(recipe, run=tmp_path / "run", best=True)
    assert found["loss"] == pytest.approx(np.square(data["validation"]["x"] - best).mean(), rel=1e-5)
    with pytest.raises(NoSuchSplit, match="no all data"):
        trainer.evaluate(recipe, run=tmp_path / "run", split="all")
    with pytest.raises(InputError, match="does not exist"):
        trainer.evaluate(recipe, run=tmp_path / "none")

"""What is wrong with evaluations is said before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import EarlyStopping, Every, InputError, StreamSource, Trainer, supervised
from tpuswarm.train.loop.evaluate import HeldOut, evaluate, rehearse
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

TRAIN = toy.data(0)
HELD = {name: array[:11] for name, array in toy.data(1).items()}


def refused(folder, words, validation=HELD, loss=toy.loss, devices=1, **options):
    """It is refused with these words, and no step is taken."""
    made = supervised(toy.init, loss, optax.sgd(0.1), {"train": TRAIN, "validation": validation})
    with pytest.raises(InputError, match=words) as found:
        next(Trainer(devices=devices, **options).steps(made, steps=2, batch=8, run=folder))
    assert "\n" not in str(found.value)
    assert not (folder / "config.toml").exists()


def in_groups(size):
    """A loss that compares rows in groups."""

    def loss(params, batch, key):
        return jnp.mean((batch["x"].reshape(-1, size, 5) @ params["layer"]["w"]).max(1)), {}

    return loss


@pytest.mark.parametrize(
    ("size", "devices", "options", "words"),
    [
        (2, 1, {}, r"over 3 rows, left of 11 held-out ones by batches of 8: hold out a multiple, .*reshape"),
        (2, 4, {}, r"over 1 rows, left of 11 held-out ones by batches of 8"),
        (8, 1, {"eval_batch": 4}, r"over a batch of 4 rows \(--eval-batch\).*reshape.*test_rehearse\.py:"),
    ],
)
def test_a_loss_that_does_not_take_the_number_of_rows(tmp_path, size, devices, options, words):
    refused(tmp_path / "run", words, loss=in_groups(size), devices=devices, **options)


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        ({"x": HELD["x"]}, r"validation data of toy has no y, and one of its training data float32\[\]: both"),
        (HELD | {"y": HELD["y"].astype(np.float64)}, r"has float64\[\] y, and one of its training data float32\[\]"),
        (HELD | {"x": HELD["x"][:, :4]}, r"has float32\[4\] x, and one of its training data float32\[5\]"),
        (HELD | {"z": HELD["y"]}, r"has float32\[\] z, and one of its training data none"),
        ((HELD["x"], HELD["y"]), "the validation data of toy is a tuple: give a dict of arrays"),
        (HELD | {"y": HELD["y"][:9]}, "the validation data of toy: data arrays need the same, .* {'x': 11, 'y': 9}"),
        (StreamSource([HELD]), "the validation data of toy has no rows_per_epoch, so evaluation would never end; say"),
        (StreamSource([HELD], rows_per_epoch=0), "the validation data of toy has no rows; say"),
    ],
)
def test_held_out_rows_that_a_step_does_not_take(tmp_path, validation, words):
    refused(tmp_path / "run", words, validation)


@pytest.mark.parametrize(
    "options",
    [{"keep_best": "eval_acc:max"}, {"hooks": [Every("evaluation", EarlyStopping("eval_acc:max"))]}],
)
def test_a_figure_that_no_evaluation_has(tmp_path, options):
    refused(tmp_path / "run", "the evaluations have no eval_acc; they have .*eval_worst", **options)


def test_to_stop_early_there_must_be_something_held_out(tmp_path):
    words = "eval_loss is a figure of evaluations, and there are none: give validation data"
    refused(tmp_path / "run", words, None, hooks=[Every("evaluation", EarlyStopping())])


@pytest.mark.parametrize("validation", [None, HELD])
def test_what_is_right_trains(tmp_path, validation):
    """No held-out data is nothing wrong; a hook may read a figure of a step."""
    hooks = [Every("evaluation", EarlyStopping("worst"))]
    made = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": TRAIN, "validation": validation})
    result = Trainer(devices=1, hooks=hooks).fit(made, steps=2, batch=8, run=tmp_path / "run")
    assert result.step == 2 and ("eval_loss" in result.metrics) == (validation is not None)


@pytest.mark.parametrize("count", [1, 4])
def test_an_evaluation_does_not_trace_again(count):
    traced = []

    def loss(params, batch, key):
        traced.append(len(batch["x"])) if key is None else None
        return toy.loss(params, batch, key)

    made = supervised(toy.init, loss, optax.sgd(0.1), {"train": TRAIN, "validation": HELD})
    compiled = compile_step(made, Request(batch=8), jax.devices()[:count])
    state, source = compiled.init(jax.random.key(0)), made.data("validation")
    traced.clear()
    assert sorted(rehearse(compiled, "toy", HeldOut(source, 8))) == ["loss", "worst"]
    sizes = {1: [8, 3], 4: [8, 2, 1]}[count]
    assert traced == sizes
    evaluate(compiled, state, source, 8)
    assert traced == sizes

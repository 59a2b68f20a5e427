"""Predictions of a user's function for each row of a split."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.test_own_program import Recipe as GameRecipe
from tpuswarm import ArraySource, IndexedSource, InputError, NoSuchSplit, StreamSource, Trainer, load, supervised

TEST = {name: array[:11] for name, array in toy.data(2).items()}


def guesses(params, batch):
    return {"guess": batch["x"] @ params["layer"]["w"] + params["layer"]["b"], "twice": 2 * batch["x"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe with a test split of 11 rows, and its run, whose average lags far behind the parameters."""
    splits = {"train": toy.data(0), "test": TEST}
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), splits)
    folder = tmp_path_factory.mktemp("runs") / "trained"
    Trainer(devices=1, ema=0.9).fit(recipe, steps=4, batch=8, run=folder)
    return recipe, folder


@pytest.mark.parametrize("devices", [1, 8])
def test_each_row_is_predicted_in_order_with_the_parameters_of_evaluations(trained, devices):
    recipe, folder = trained
    found = Trainer(devices=devices).predict(recipe, guesses, run=folder)
    average = load(folder)["ema"]["layer"]
    np.testing.assert_allclose(found["guess"], TEST["x"] @ average["w"] + average["b"], rtol=1e-5)
    np.testing.assert_array_equal(found["twice"], 2 * TEST["x"])
    np.testing.assert_array_equal(
        Trainer(devices=devices).predict(recipe, lambda params, batch: batch["y"], run=folder, batch=2), TEST["y"]
    )


def test_functions_get_mutable_state_and_the_state_of_own_programs(tmp_path):
    def loss(params, extra, batch, key):
        return (params["w"][None] * batch["x"]).sum(), ({}, {"seen": extra["seen"] + 1})

    recipe = supervised(
        lambda key: {"w": np.ones(5, np.float32)}, loss, optax.sgd(0.0), {"train": toy.data(), "test": TEST},
        extra=lambda key: {"seen": np.zeros(())},
    )  # fmt: skip
    Trainer(devices=1).fit(recipe, steps=3, batch=8, run=tmp_path / "run")
    found = Trainer(devices=1).predict(
        recipe, lambda params, extra, batch: batch["y"] + extra["seen"], run=tmp_path / "run"
    )
    np.testing.assert_allclose(found, TEST["y"] + 3, rtol=1e-6)
    Trainer(devices=1).fit(GameRecipe(), steps=3, batch=8, run=tmp_path / "game")
    state = load(tmp_path / "game")
    found = Trainer(devices=1).predict(
        GameRecipe(), lambda state, batch: next(iter(batch.values())), run=tmp_path / "game", split="train"
    )
    assert state and found.ndim


def numbered():
    """Return a stream of eleven rows in their order."""
    return ({"x": np.full(5, number, np.float32), "y": np.float32(number)} for number in range(11))


@pytest.mark.parametrize(
    "source",
    [
        {"x": np.arange(11, dtype=np.float32)[:, None].repeat(5, 1), "y": np.arange(11, dtype=np.float32)},
        IndexedSource(list(numbered()), seed=5),
        StreamSource(numbered, batched=False, rows_per_epoch=11),
    ],
    ids=["arrays", "indexed", "stream"],
)
def test_predictions_have_the_order_of_the_data(trained, source):
    _, folder = trained
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(0), "test": source})
    found = Trainer(devices=1).predict(recipe, lambda params, batch: batch["y"], run=folder, batch=4)
    np.testing.assert_array_equal(found, np.arange(11))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda params: 0, r"function is called as function\(params, batch\), but takes \(params\)"),
        (lambda params, batch: batch["x"].sum(), r"gives an array of shape \(\) for 8 rows: its first axis has to be"),
        (lambda params, batch: {"all": batch["x"].T}, r"gives all of shape \(5, 8\) for 8 rows"),
        (lambda params, batch: batch["z"], r"fails over a batch of 8 rows: KeyError: 'z' \(.*test_predict"),
        (jnp.add, r"the function fails over a batch of 8 rows: "),
        (lambda params, batch: "text", r"the function fails over a batch of 8 rows: "),
        (5, r"function is a int; give a function function\(params, batch\)"),
    ],
)
def test_wrong_function_is_named_by_its_line(trained, function, says):
    recipe, folder = trained
    with pytest.raises(InputError, match=says):
        Trainer(devices=1).predict(recipe, function, run=folder)


@pytest.mark.parametrize("function", [lambda params, batch: batch["x"].mean(0), lambda params, batch: batch["x"].T])
def test_sum_over_rows_is_refused_even_with_as_many_elements_as_rows(trained, function):
    """Five features, and five rows at once."""
    recipe, folder = trained
    with pytest.raises(
        InputError, match=r"gives an array of shape \(5,.*\) for 6 rows: its first axis has to be those"
    ):
        Trainer(devices=1, eval_batch=5).predict(recipe, function, run=folder)


def test_stream_shorter_than_its_rows_per_epoch_is_refused(trained):
    _, folder = trained
    stream = StreamSource(numbered, batched=False, rows_per_epoch=20)
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(0), "test": stream})
    with pytest.raises(InputError, match="the stream ended after 11 rows, and its rows_per_epoch is 20"):
        Trainer(devices=1).predict(recipe, guesses, run=folder)


class InOrder(ArraySource):
    def rows(self, start, count):
        return {name: array[start : start + count] for name, array in self._arrays.items()}


class Numbered(InOrder):
    def row_numbers(self, start, count):
        return np.arange(start, start + count)


def test_source_that_overrides_rows_needs_row_numbers(trained):
    _, folder = trained

    def predict(kind):
        recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(0), "test": kind(TEST)})
        return Trainer(devices=1).predict(recipe, lambda params, batch: batch["y"], run=folder)

    with pytest.raises(InputError, match="InOrder has rows of its own and row_numbers of ArraySource: give it"):
        predict(InOrder)
    np.testing.assert_array_equal(predict(Numbered), TEST["y"])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"split": "validation"}, NoSuchSplit, "has no validation data"),
        *(({"batch": batch}, InputError, "eval-batch must be") for batch in (0, 2.5, "auto")),
    ],
)
def test_wrong_split_and_batch_are_refused(trained, arguments, error, words):
    recipe, folder = trained
    with pytest.raises(error, match=words):
        Trainer(devices=1).predict(recipe, guesses, run=folder, **arguments)

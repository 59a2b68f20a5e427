"""Arrays of the user's: runs train on, write and show their values at the call that gave them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from tests.train.data.test_arrays import aligned
from tpuswarm import ArraySource, Every, IndexedSource, StreamSource, Trainer, supervised
from tpuswarm.train.look.outputs import Outputs
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.supervised_program import SupervisedProgram

POISON = -999


class Buffer:
    """One array for all calls; it is poisoned before each."""

    def __init__(self):
        self._array = np.full(64, POISON, np.float32)

    def fill(self, numbers):
        self._array[:] = POISON
        self._array[: len(numbers)] = numbers
        return self._array[: len(numbers)]


class Items:
    """Rows by number, all in one array."""

    def __init__(self, count):
        self._count, self._buffer = count, Buffer()

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        if number >= self._count:
            raise IndexError
        return {"x": self._buffer.fill([number])}


class Rows:
    """A source of the user's own, whose rows lie in one array."""

    def __init__(self, count, in_memory):
        self.rows_per_epoch, self.in_memory, self._buffer = count, in_memory, Buffer()

    def rows(self, start, count):
        return {"x": self._buffer.fill(np.arange(start, start + count) % self.rows_per_epoch)[:, None]}


def batches(count, size):
    def items():
        buffer = Buffer()
        for first in range(0, count, size):
            yield {"x": buffer.fill(range(first, min(count, first + size)))[:, None]}
        buffer.fill([])

    return items


def in_order(count):
    return lambda start, size: np.arange(start, start + size) % count


def shuffled(count):
    arrays = ArraySource({"x": np.arange(count)}, seed=3)
    return lambda start, size: arrays.rows(start, size)["x"]


FORMS = {
    "batches": lambda count, size: (StreamSource(batches(count, size), rows_per_epoch=count), in_order(count)),
    "rows": lambda count, size: (
        StreamSource(lambda: iter(Items(count)), batched=False, rows_per_epoch=count), in_order(count)
    ),
    "by index": lambda count, size: (IndexedSource(Items(count), seed=3), shuffled(count)),
    "own": lambda count, size: (Rows(count, False), in_order(count)),
    "own in memory": lambda count, size: (Rows(count, True), in_order(count)),
}  # fmt: skip
"""Makers of a source of `count` rows, with a function that gives the rows at its positions."""


@given(
    form=st.sampled_from(["batches", "rows", "by index"]), count=st.integers(1, 40), size=st.integers(1, 12),
    reads=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=6),
)  # fmt: skip
def test_rows_are_right_whatever_was_read_before(form, count, size, reads):
    """Other hosts or members read the rows between; the caller may overwrite its rows."""
    source, rows_at = FORMS[form](count, size)
    for start, length in reads:
        found = source.rows(start, length)["x"]
        assert np.array_equal(found[:, 0], rows_at(start, length))
        found[:] = POISON


def digest(x):
    """Return a number for rows in their order; exact in float32."""
    return (x[:, 0] * jnp.arange(1, len(x) + 1)).sum()


def fit(folder, data, steps, init=lambda key: {"w": jnp.ones(())}, **options):
    def loss(params, batch, key):
        distance = sum(jnp.square(leaf - 0.5).sum() for leaf in jax.tree.leaves(params))
        return distance, {"digest": digest(batch["x"]), "mean": batch["x"].mean()}

    recipe = supervised(init, loss, optax.sgd(0.1), data)
    batch = options.pop("batch", 4)
    return Trainer(**{"devices": 1, "seed": 0} | options).fit(recipe, steps=steps, batch=batch, run=folder)


@given(
    forms=st.tuples(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS))),
    count=st.integers(1, 40), size=st.integers(1, 12), batch=st.sampled_from([2, 6, 16]),
    devices=st.sampled_from([1, 2]), overfits=st.booleans(),
)  # fmt: skip
@settings(max_examples=15)
def test_whole_runs_train_and_evaluate_on_rows_as_they_were_read(
    tmp_path_factory, forms, count, size, batch, devices, overfits
):
    (training, rows_of_training), (validation, _) = (FORMS[form](count, size) for form in forms)
    folder, steps = tmp_path_factory.mktemp("run") / "run", 5
    options = {"overfit_batches": 2} if overfits else {"eval_every": 2}
    data = training if overfits else {"train": training, "validation": validation}
    fit(folder, data, steps, batch=batch, devices=devices, **options)
    rows = list(read_rows(folder / METRICS))
    places = [step % 2 if overfits else step for step in range(steps)]
    expected = [float(digest(rows_of_training(place * batch, batch)[:, None])) for place in places]
    assert [row["digest"] for row in rows if "digest" in row] == expected
    means = [row["eval_mean"] for row in rows if "eval_mean" in row]
    if not overfits:
        assert means == pytest.approx([(count - 1) / 2] * len(means), abs=1e-5) and len(means) == 3


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("given_by", ["init", "extra", "weights", "program"])
def test_first_arrays_may_change_after_they_were_given(tmp_path, given_by, devices):
    """A hook poisons them after the first step, before the evaluation and the checkpoint."""
    array = aligned((4096,))
    array[:] = 1

    class OfWeights(SupervisedProgram):
        def weights(self):
            return {"w": array}

        def init(self, key, shared=None):
            return super().init(key, {"w": array} if given_by == "program" and shared is None else shared)

    def loss(params, *others):
        extra, batch, _ = others if len(others) == 3 else (None, *others)
        value = jnp.square(params["w"] - 0.5).sum() + 0 * batch["x"].sum()
        return (value, ({"extra": extra["n"].sum()}, extra)) if extra else value

    def poison(step):
        array[:] = POISON

    init = (lambda key: {"w": array}) if given_by == "init" else (lambda key: {"w": jnp.ones(4096)})
    extra = (lambda key: {"n": array}) if given_by == "extra" else None
    recipe = supervised(init, loss, optax.sgd(0.1), {"x": np.ones((16, 1), np.float32)}, extra=extra)
    if given_by in ("weights", "program"):
        make = recipe.program

        def program(options):
            made = make(options)
            made.__class__ = OfWeights
            if given_by == "program":
                made.weights = lambda: None
            return made

        recipe.program = program
    trainer = Trainer(devices=devices, seed=0, hooks=[Every(1, poison)])
    result = trainer.fit(recipe, steps=3, batch=4, run=tmp_path / "run")
    np.testing.assert_allclose(result.state.params["w"], 0.5 + 0.5 * 0.8**3, rtol=1e-6)
    if extra:
        np.testing.assert_array_equal(result.state.extra["n"], 1)


def test_pictures_and_numbers_of_hooks_may_share_one_array(tmp_path):
    canvas, number = np.zeros((2, 3, 3), np.uint8), np.zeros(())

    def draw(colour):
        def hook(step):
            canvas[:] = colour + step.row["step"]
            return canvas

        return hook

    def count(factor):
        def hook(step):
            number[...] = factor * step.row["step"]
            return {f"times{factor}": number}

        return hook

    hooks = [Every(1, draw(50)), Every(1, draw(100)), Every(1, count(2)), Every(1, count(3))]
    fit(tmp_path / "run", {"x": np.ones((8, 1), np.float32)}, 2, hooks=hooks)
    for step in (1, 2):
        for hook, colour in enumerate((50, 100)):
            picture = imread(tmp_path / "run" / "pictures" / f"{step:08d}-{hook}.png")[..., :3]
            assert ((picture * 255).round() == colour + step).all()
    rows = [row for row in read_rows(tmp_path / "run" / METRICS) if "times2" in row]
    assert [(row["times2"], row["times3"]) for row in rows] == [(2, 3), (4, 6)]


def test_generated_picture_on_the_screen_stays_although_the_recipe_draws_the_next_one(tmp_path):
    shown, canvas = [], np.full((2, 3, 3), 7, np.uint8)
    outputs = Outputs(SimpleNamespace(writes=True, folder=tmp_path), SimpleNamespace(picture=shown.append), 0)
    outputs.open()
    outputs.write_picture(1, canvas)
    canvas[:] = 9
    assert (shown[0] == 7).all()


def test_loggers_may_change_their_rows(tmp_path):
    class Spoil:
        seen = ()

        def write(self, row):
            self.seen += (row["loss"],)
            row.clear()

        def close(self):
            pass

    first, second = Spoil(), Spoil()
    fit(tmp_path / "run", {"x": np.ones((8, 1), np.float32)}, 3, loggers=[first, second])
    assert first.seen == second.seen == tuple(row["loss"] for row in read_rows(tmp_path / "run" / METRICS))

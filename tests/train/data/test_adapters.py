"""Data of other libraries: sets with an index, and streams."""

import json
from random import Random
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import ArraySource, IndexedSource, InputError, StreamSource, Trainer, supervised
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows

ROWS = toy.data()
NAMES = ["x", "y"]
TUPLES = list(zip(*ROWS.values(), strict=True))


class Batched(list):
    """Like a Hugging Face dataset: rows are dicts, and one call reads many."""

    requests: ClassVar = []

    def __getitems__(self, index):
        self.requests.append(index)
        return [{"x": ROWS["x"][row], "y": float(ROWS["y"][row]), "id": row} for row in index]


class Loader:
    """Like a DataLoader: starts again each time, and its last batch is smaller."""

    def __init__(self, size):
        self.starts, self._size = 0, size

    def __iter__(self):
        self.starts += 1
        for first in range(0, toy.ROWS, self._size):
            yield [ROWS[name][first : first + self._size] for name in NAMES]


class Iterating:
    """Like a grain iterator: its position is bytes; `read` records every item."""

    def __init__(self, read):
        self._items, self._read, self._done = list(Loader(5)), read, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._done == len(self._items):
            raise StopIteration
        self._done += 1
        self._read.append(self._done)
        return self._items[self._done - 1]

    def get_state(self):
        return f"at {self._done}".encode()

    def set_state(self, state):
        self._done = int(state.removeprefix(b"at "))


class Stateful:
    """Like loaders of torchdata and Hugging Face: it has a position."""

    def __init__(self, read, extra=None):
        self._read, self._done, self._extra = read, 0, extra
        self._random = Random(5)

    def __iter__(self):
        items = Iterating(self._read)
        items._done = self._done
        for item in items:
            self._done = items._done
            yield item
        self._done = 0

    def state_dict(self):
        numpy = {"generator": np.arange(4, dtype=np.uint8), "count": np.array(3), "number": np.int64(3)}
        plain = {"done": self._done, "of": [b"\x00\xff", None], "extra": self._extra}
        return plain | numpy | {"random": self._random.getstate()}

    def load_state_dict(self, state):
        assert state["of"] == [b"\x00\xff", None] and state["generator"].tolist() == [0, 1, 2, 3]
        self._random.setstate(state["random"])  # it refuses lists instead of tuples
        assert state["count"].shape == () and state["count"] == state["number"] == 3
        self._done = state["done"]


def stream(data, **options):
    return StreamSource(data, names=NAMES, **options)


def row_numbers(source, start, count):
    return [int(np.flatnonzero((ROWS["x"] == row).all(1))[0]) for row in source.rows(start, count)["x"]]


def fit(data, folder, steps):
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.05), data)
    Trainer(devices=1).fit(recipe, steps=steps, batch=12, run=folder)


def losses(folder):
    return [row["loss"] for row in read_rows(folder / METRICS) if "loss" in row]


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory):
    """Losses of 14 uninterrupted steps over the rows in their order."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(stream(Loader(64)), folder, 14)
    return losses(folder)


@pytest.mark.parametrize("data", [TUPLES, Batched(TUPLES)])
def test_rows_by_index_come_in_the_order_of_arrays(data):
    source, arrays = IndexedSource(data, NAMES).seeded(3), ArraySource(ROWS).seeded(3)
    for start, count in ((0, 12), (60, toy.ROWS)):
        for name in NAMES:
            np.testing.assert_array_equal(source.rows(start, count)[name], arrays.rows(start, count)[name])
    if isinstance(data, Batched):
        assert {len(index) for index in data.requests} >= {12, toy.ROWS}  # never row by row


def test_stream_goes_back_within_its_last_item_without_starting_again():
    source = stream(loader := Loader(5))
    for start, count in [(0, 1), (0, 2), (1, 3), (3, 4), (5, 1), (6, 9), (10, 5), (12, 20), (30, 2), (3, 1)]:
        assert row_numbers(source, start, count) == list(range(start, start + count))
    assert loader.starts == 2  # the last read goes back to row 3


@pytest.mark.parametrize("size", [5, 30])
def test_run_on_a_stream_starts_it_once_and_resumes_exactly(expected_losses, tmp_path, size):
    """Starting a stream may take minutes: a connection, a shuffle buffer."""
    loader = Loader(size)
    fit(stream(loader), tmp_path / "run", 4)
    assert loader.starts == 1
    assert not list((tmp_path / "run").rglob("position.json"))
    fit(stream(lambda: iter(Loader(size))), tmp_path / "run", 9)
    assert losses(tmp_path / "run") == expected_losses[:9]
    assert (tmp_path / "run" / EVENTS).read_text().count("the stream has no position: 48 rows are read again") == 1


def test_run_on_a_stream_with_a_position_does_not_read_it_again(expected_losses, tmp_path):
    read = []
    fit(stream(lambda: Stateful([])), tmp_path / "run", 9)
    fit(stream(lambda: Stateful(read)), tmp_path / "run", 14)
    assert losses(tmp_path / "run") == expected_losses
    needed, inspected, ahead = 12 * (14 - 9) / 5, 3, 12  # items; inspected to learn a row's shape
    assert needed <= len(read) <= needed + inspected + ahead


@pytest.mark.parametrize("kind", [Stateful, Iterating])
@pytest.mark.parametrize("first", [36, 108])  # in the first pass over the data, and in the second
def test_stream_continues_from_a_saved_position(kind, first):
    source, read = stream(lambda: kind([])), []
    for start in range(0, first, 12):
        source.rows(start, 12)
    resumed = stream(lambda: kind(read))
    resumed.go_to(json.loads(json.dumps(source.position(first))))
    assert row_numbers(resumed, first, 60) == [row % toy.ROWS for row in range(first, first + 60)]
    assert len(read) <= 60 / 5 + 12 / 5 + 1
    with pytest.raises(InputError, match="holds a position of its stream, and this stream has none"):
        stream(lambda: iter(Loader(5))).go_to(source.position(first))


def test_position_without_a_plain_form_is_not_saved():
    source = stream(lambda: Stateful([], extra=object()))
    source.rows(0, 12)
    assert source.position(12) is None


def test_stream_that_goes_back_has_not_ended_early():
    source = StreamSource([{"x": np.arange(4)}] * 3, rows_per_epoch=12)
    source.rows(0, 6)
    source.rows(0, 2)
    assert source.ended_after is None


def test_stream_that_ends_before_its_rows_per_epoch_is_reported(tmp_path):
    """A run reports it; an evaluation refuses it, because it would count rows twice."""

    def stream(rows_per_epoch):
        items = [{"x": part, "y": part} for part in np.arange(12, dtype=np.float32).reshape(3, 4)]
        return StreamSource(lambda: iter(items), rows_per_epoch=rows_per_epoch)

    def fit(training, held, folder, **options):
        data = {"train": stream(training)} | ({"validation": stream(held)} if held else {})
        loss = lambda params, batch, key: jnp.square(params["w"] * batch["x"] - batch["y"]).mean()  # noqa: E731
        recipe = supervised(lambda key: {"w": jnp.zeros(())}, loss, optax.sgd(1e-3), data)
        Trainer(devices=1, **options).fit(recipe, steps=6, batch=4, run=tmp_path / folder)
        return (tmp_path / folder / EVENTS).read_text().count("the stream ended after 12 rows, fewer than its rows_per")

    assert fit(20, None, "long") == 1
    assert fit(12, 12, "right", eval_every=2) == 0
    assert fit(8, None, "short") == 0
    with pytest.raises(
        InputError, match=r"ended after 12 rows, and its rows_per_epoch is 20: .* give rows_per_epoch=12"
    ):
        fit(12, 20, "evaluated", eval_every=2)

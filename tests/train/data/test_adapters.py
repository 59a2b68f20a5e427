"""Data of other libraries: what has an index, and what only comes one after the other."""

from random import Random

import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import IndexedSource, InputError, StreamSource, Trainer, supervised
from tpuswarm.train.run.directory import METRICS, read_rows

ROWS = toy.data()


class Dataset:
    """As of torch: a length, an index, a tuple."""

    def __len__(self):
        return toy.ROWS

    def __getitem__(self, index):
        return ROWS["x"][index], ROWS["y"][index]


class Batched(Dataset):
    """As of Hugging Face: rows are dicts, many are asked for at once."""

    def __init__(self):
        self.asked = []

    def __getitems__(self, index):
        self.asked.append(index)
        return [{"x": ROWS["x"][each], "y": float(ROWS["y"][each]), "id": each} for each in index]


class Loader:
    """As a DataLoader: begins anew each time, its last batch is smaller."""

    def __init__(self, size, count=toy.ROWS):
        self.begun, self._size, self._count = 0, size, count

    def __iter__(self):
        self.begun += 1
        for first in range(0, self._count, self._size):
            last = min(first + self._size, self._count)
            yield [ROWS["x"][first:last], ROWS["y"][first:last]]


def fit(data, folder, steps, **options):
    made = supervised(toy.init, toy.loss, optax.sgd(0.05), data)
    return Trainer(devices=1, **options).fit(made, steps=steps, batch=12, run=folder)


def losses(folder):
    return [row["loss"] for row in read_rows(folder / METRICS) if "loss" in row]


def numbers(source, start, count):
    """Which rows these are."""
    x = source.rows(start, count)["x"]
    return [int(np.flatnonzero((ROWS["x"] == row).all(1))[0]) for row in x]


@pytest.mark.parametrize("data", [Dataset(), Batched()])
def test_rows_by_index_come_as_those_of_arrays_do(data, tmp_path):
    source = IndexedSource(data, names=["x", "y"])
    fit(source, tmp_path / "indexed", 12, seed=3)
    fit(ROWS, tmp_path / "arrays", 12, seed=3)
    assert losses(tmp_path / "indexed") == losses(tmp_path / "arrays")
    assert sorted(numbers(source, 0, toy.ROWS)) == list(range(toy.ROWS)) != numbers(source, 0, toy.ROWS)
    if isinstance(data, Batched):
        assert {len(index) for index in data.asked} >= {12, toy.ROWS}  # never row by row


def test_processes_read_the_same_rows():
    source, alone = (IndexedSource(Dataset(), ["x", "y"], workers=workers) for workers in (2, 0))
    try:
        for start, count in ((0, 7), (60, 9)):
            for name in ("x", "y"):
                np.testing.assert_array_equal(source.rows(start, count)[name], alone.rows(start, count)[name])
    finally:
        source._pool.shutdown()


@pytest.mark.parametrize("size", [5, 12, 64])
def test_a_stream_gives_its_rows_in_order_and_begins_anew(size):
    source = StreamSource(Loader(size), names=["x", "y"])
    assert numbers(source, 0, 12) == list(range(12))
    assert numbers(source, 12, 60) == [*range(12, 64), *range(8)]
    assert numbers(source, 90, 3) == [26, 27, 28]  # rows that another host has, or another member, are skipped
    assert numbers(source, 3, 4) == [3, 4, 5, 6]


def test_a_run_on_a_stream_goes_on_exactly_where_it_was(tmp_path):
    data = StreamSource(lambda: iter(Loader(5)), names=["x", "y"])
    fit(data, tmp_path / "whole", 9)
    fit(data, tmp_path / "two", 4)
    fit(StreamSource(lambda: iter(Loader(5)), names=["x", "y"]), tmp_path / "two", 9)
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")


class Stateful:
    """A loader whose position can be told and set, as torchdata's and Hugging Face's; every item read is noted."""

    def __init__(self, read, extra=None):
        self._read, self._done, self._extra = read, 0, extra
        self._random, self._count = Random(5), np.array(3)

    def __iter__(self):
        items = list(Loader(5))
        while self._done < len(items):
            self._done += 1
            self._read.append(self._done)
            yield items[self._done - 1]
        self._done = 0

    def state_dict(self):
        return {
            "done": self._done,
            "generator": np.arange(4, dtype=np.uint8),
            "of": [b"\x00\xff", None],
            "extra": self._extra,
            "random": self._random.getstate(),
            "count": self._count,
            "number": self._count[()],
        }

    def load_state_dict(self, state):
        assert state["of"] == [b"\x00\xff", None] and state["generator"].tolist() == [0, 1, 2, 3]
        self._random.setstate(state["random"])  # which refuses lists for tuples
        assert state["count"].shape == () and state["count"] == state["number"] == 3
        self._done = state["done"]


class Iterating:
    """An iterator with a position of bytes, as grain's."""

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


@pytest.mark.parametrize("kind", [Stateful, Iterating])
@pytest.mark.parametrize("begun", [3, 9])  # in the first pass over the data, and in the second
def test_a_stream_with_a_position_is_not_read_again(kind, begun, tmp_path):
    fit(StreamSource(lambda: iter(Loader(5)), names=["x", "y"]), tmp_path / "whole", 14)
    fit(StreamSource(lambda: kind([]), names=["x", "y"]), tmp_path / "two", begun)
    read = []
    fit(StreamSource(lambda: kind(read), names=["x", "y"]), tmp_path / "two", 14)
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")
    needed, looked, ahead = 12 * (14 - begun) / 5, 3, 12  # items; looked at to know a row's shape; more than a batch
    assert needed <= len(read) <= needed + looked + ahead


def test_a_position_without_a_plain_form_is_read_again(tmp_path):
    fit(StreamSource(lambda: iter(Loader(5)), names=["x", "y"]), tmp_path / "whole", 6)
    fit(StreamSource(lambda: Stateful([], extra=object()), names=["x", "y"]), tmp_path / "two", 3)
    assert not list((tmp_path / "two").rglob("position.json"))
    fit(StreamSource(lambda: Stateful([], extra=object()), names=["x", "y"]), tmp_path / "two", 6)
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")


def test_a_checkpoint_with_a_position_needs_a_stream_that_has_one(tmp_path):
    fit(StreamSource(lambda: Stateful([]), names=["x", "y"]), tmp_path / "run", 3)
    with pytest.raises(InputError, match="holds a position of its stream, and this stream has none"):
        fit(StreamSource(lambda: iter(Loader(5)), names=["x", "y"]), tmp_path / "run", 6)


@pytest.mark.parametrize("size", [5, 12, 30])
def test_a_start_begins_a_stream_once(tmp_path, size):
    """However often a first row is asked for: a shuffle buffer or a connection may take minutes."""
    loader = Loader(size)
    fit(StreamSource(loader, names=["x", "y"]), tmp_path / "run", 3)
    assert loader.begun == 1
    fit(StreamSource(lambda: iter(Loader(64)), names=["x", "y"]), tmp_path / "again", 3)
    assert losses(tmp_path / "run") == losses(tmp_path / "again")


def test_a_stream_goes_back_within_what_it_has_read_and_from_there_to_its_beginning():
    source = StreamSource(loader := Loader(5), names=["x", "y"])
    asked = [(0, 1), (0, 2), (1, 3), (3, 4), (5, 1), (6, 9), (10, 5), (12, 20), (30, 2), (3, 1)]
    for start, count in asked:
        assert numbers(source, start, count) == list(range(start, start + count))
    assert loader.begun == 2


def test_a_stream_of_rows_and_evaluations_on_one(tmp_path):
    rows = StreamSource(lambda: iter([{"x": x, "y": y} for x, y in zip(*ROWS.values(), strict=True)]), batched=False)
    held_out = StreamSource(Loader(7), names=["x", "y"], rows_per_epoch=toy.ROWS)
    result = fit({"train": rows, "validation": held_out}, tmp_path / "run", 4, eval_every=2)
    assert result.metrics["eval_rows"] == toy.ROWS
    assert numbers(rows, 62, 4) == [62, 63, 0, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IndexedSource(iter([])), "list_iterator has no length: .*; use StreamSource"),
        (lambda: IndexedSource([]), "list has no rows"),
        (lambda: IndexedSource(Dataset()).rows(0, 2), r"is a tuple of 2 parts, and 0 names are given: .*names=\['im"),
        (lambda: IndexedSource([{"x": [1]}, {"x": [1, 2]}]).rows(0, 2), "x of the data cannot be one array: .*; pad"),
        (lambda: StreamSource(iter([{"x": ROWS["x"]}])), "a list_iterator can be read only once: .*; give a function"),
        (lambda: StreamSource(lambda: iter([])).rows(0, 1), "the stream has no rows: it ended as soon as it began"),
        (
            lambda: StreamSource([{"x": ROWS["x"], "y": 3}]).rows(0, 1),
            "arrays of different rows: .*; use batched=False",
        ),
    ],
)
def test_what_cannot_be_read_is_said(make, words):
    with pytest.raises(InputError, match=words):
        make()
    with pytest.raises(InputError, match=r"is a Loader: give .*IndexedSource and StreamSource make one of"):
        supervised(toy.init, toy.loss, optax.sgd(0.1), Loader(3)).data("train")

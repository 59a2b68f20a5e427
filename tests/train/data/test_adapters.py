"""Data of other libraries: what has an index, and what only comes one after the other."""

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

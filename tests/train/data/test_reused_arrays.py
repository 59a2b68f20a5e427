"""Data that fills the same arrays again: each row that is trained on is the one that was read."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm import IndexedSource, StreamSource, Trainer, supervised
from tpuswarm.train.run.directory import METRICS, read_rows

POISON = -999


class Items:
    """Items 0, 1, … of `size` rows, all in one array that is poisoned before it is filled with the next."""

    def __init__(self, count: int, size: int | None):
        self._array = np.empty((size,) if size else (), np.float32)
        self._count, self._size = count, size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int):
        self._array[...] = POISON
        size = self._size or 1
        self._array[...] = np.arange(number * size, (number + 1) * size).reshape(self._array.shape)
        return {"x": self._array, "y": self._array[..., None]}

    def __iter__(self):
        for number in range(self._count):
            yield self[number]
            self._array[...] = POISON


@given(
    rows_per_item=st.sampled_from([None, 1, 3, 10]), items=st.integers(1, 12),
    reads=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=6),
)  # fmt: skip
def test_stream_gives_the_rows_it_read(rows_per_item, items, reads):
    source = StreamSource(Items(items, rows_per_item), batched=rows_per_item is not None)
    length = items * (rows_per_item or 1)
    for start, count in reads:
        rows = source.rows(start, count)
        expected = np.arange(start, start + count) % length
        assert np.array_equal(rows["x"], expected) and np.array_equal(rows["y"][:, 0], expected)
        rows["x"][:] = POISON  # what is handed out is the caller's


@pytest.mark.parametrize("workers", [0, 2])
def test_indexed_source_gives_the_rows_it_read(workers):
    rows = IndexedSource(Items(30, None), workers=workers, seed=1).rows(0, 30)
    assert sorted(rows["x"]) == list(range(30)) and np.array_equal(rows["x"], rows["y"][:, 0])


@pytest.mark.parametrize("in_rows", [False, True])
def test_steps_train_on_the_rows_that_were_read(tmp_path, in_rows):
    def loss(params, batch, key):
        return jnp.square(params["w"]), {"mean": batch["x"].mean()}

    source = StreamSource(Items(40, None if in_rows else 10), batched=not in_rows)
    recipe = supervised(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(0.1), source)
    Trainer(devices=1).fit(recipe, steps=5, batch=8, run=tmp_path / "run")
    rows = read_rows(tmp_path / "run" / METRICS)
    assert [row["mean"] for row in rows] == [8 * step + 3.5 for step in range(5)]

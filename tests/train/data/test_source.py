import hashlib
import os

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm import Trainer, supervised
from tpuswarm.errors import InputError
from tpuswarm.train.data.source import ArraySource, Repeated, shuffled_epochs, training_source


def flat(*place):
    return [(epoch, int(row)) for epoch, rows in shuffled_epochs(*place) for row in rows]


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(0, 5))
def test_rows_do_not_depend_on_the_size_of_batches(start, first, second, size, seed):
    parts = flat(start, first, size, seed) + flat(start + first, second, size, seed)
    assert flat(start, first + second, size, seed) == parts


@given(st.integers(0, 20), st.integers(1, 40), st.integers(0, 5))
def test_epoch_has_every_row_once(epoch, size, seed):
    [(which, rows)] = shuffled_epochs(epoch * size, size, size, seed)
    assert which == epoch and sorted(rows) == list(range(size))
    other = flat((epoch + 1) * 50, 50, 50, seed), flat(epoch * 50, 50, 50, seed + 1)
    assert all([row for _, row in order] != [row for _, row in flat(epoch * 50, 50, 50, seed)] for order in other)


def test_rows_of_several_arrays_stay_together():
    source = ArraySource({"x": np.arange(10), "y": np.arange(10) * 2}, seed=1)
    rows = source.rows(7, 25)
    assert np.array_equal(rows["y"], rows["x"] * 2) and len(rows["x"]) == 25
    first, repeated = source.rows(0, 4)["x"].tolist(), Repeated(source, 4)
    assert repeated.rows(2, 7)["x"].tolist() == (first * 3)[2:9] and repeated.rows_per_epoch == 4


@pytest.mark.parametrize("arrays", [{}, {"x": np.zeros(0)}, {"x": np.zeros(3), "y": np.zeros(4)}])
def test_arrays_without_a_common_number_of_rows_are_refused(arrays):
    with pytest.raises(InputError, match="number of rows"):
        ArraySource(arrays)


def test_memory_map_is_read_row_by_row(tmp_path):
    np.arange(16, dtype=np.float32).tofile(tmp_path / "x")
    source = ArraySource({"x": np.memmap(tmp_path / "x", np.float32, "r", shape=(8, 2)), "n": list(range(8))})
    rows = source.rows(0, 8)
    np.testing.assert_array_equal(rows["x"][:, 0], 2.0 * rows["n"])
    assert type(rows["x"]) is np.ndarray and not source.in_memory


def test_file_of_a_memory_map_is_digested_once_for_each_state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    read, real = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file.name) or real(file, name))
    path = tmp_path / "rows.bin"
    np.arange(20, dtype=np.int32).tofile(path)

    def digest(part=slice(None)):
        return ArraySource({"x": np.memmap(path, np.int32, "r")[part]}).digest

    first = digest()
    assert digest() == first and read == [str(path)]
    assert len({first, digest(slice(10)), digest(slice(10, None)), digest(slice(None, None, 2))}) == 4
    changed = np.memmap(path, np.int32, "r+")
    changed[7] = -1
    changed.flush()
    os.utime(path)
    assert digest() != first and len(read) == 2


def test_seed_of_a_run_orders_arrays_without_their_own(tmp_path):
    def recipe(data):
        def loss(params, batch, key):
            return params["w"] * 0.0, {"row": batch["x"][0]}

        return supervised(lambda key: {"w": jnp.zeros(())}, loss, optax.sgd(0.1), data)

    arrays = {"x": np.arange(64, dtype=np.float32)}
    orders = [ArraySource(arrays, seed=seed).rows(0, 64)["x"].tolist() for seed in (0, 3)]
    assert [training_source(recipe(arrays), seed).rows(0, 64)["x"].tolist() for seed in (0, 3)] == orders
    own = recipe(ArraySource(arrays, seed=0))
    assert training_source(own, 3).rows(0, 64)["x"].tolist() == orders[0] != orders[1]
    step = next(Trainer(devices=1, seed=3).steps(recipe(arrays), steps=2, batch=4, run=tmp_path / "run"))
    assert step.row["row"] == orders[1][0]

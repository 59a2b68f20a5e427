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
from tpuswarm.train.data.source import ArraySource, shuffled


def flat(*place):
    return [(epoch, int(row)) for epoch, rows in shuffled(*place) for row in rows]


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(0, 5))
def test_rows_do_not_depend_on_how_they_are_cut(start, first, second, size, seed):
    parts = flat(start, first, size, seed) + flat(start + first, second, size, seed)
    assert flat(start, first + second, size, seed) == parts


@given(st.integers(0, 20), st.integers(1, 40), st.integers(0, 5))
def test_an_epoch_has_every_row_once(epoch, size, seed):
    [(which, rows)] = shuffled(epoch * size, size, size, seed)
    assert which == epoch and sorted(rows) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(flat(epoch * 50, 50, 50, seed)) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16


def test_arrays_stay_together():
    source = ArraySource({"x": np.arange(10), "y": np.arange(10) * 2})
    rows = source.rows(7, 25)
    assert np.array_equal(rows["y"], rows["x"] * 2) and len(rows["x"]) == 25


@pytest.mark.parametrize("arrays", [{}, {"x": np.zeros(0)}, {"x": np.zeros(3), "y": np.zeros(4)}])
def test_arrays_that_do_not_fit_are_refused(arrays):
    with pytest.raises(InputError, match="number of rows"):
        ArraySource(arrays)


def test_the_digest_of_a_memory_map_is_that_of_what_it_maps(tmp_path, monkeypatch):
    """And its file is read once for each state that it is in."""
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    read = []
    real = hashlib.file_digest
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


def test_the_seed_of_a_run_orders_arrays_that_have_none_of_their_own(tmp_path):
    def trained(of_run, **own):
        def loss(params, batch, key):
            return params["w"] * 0.0, {"row": batch["x"][0]}

        arrays = {"x": np.arange(64, dtype=np.float32)}
        data = ArraySource(arrays, **own) if own else arrays
        made = supervised(lambda key: {"w": jnp.zeros(())}, loss, optax.sgd(0.1), data)
        trainer = Trainer(devices=1, seed=of_run)
        return trainer.fit(made, steps=1, batch=4, run=tmp_path / f"{of_run}-{len(own)}").metrics["row"]

    usual, other = trained(None), trained(3)
    assert usual == ArraySource({"x": np.arange(64)}, seed=0).rows(0, 1)["x"][0]
    assert other == ArraySource({"x": np.arange(64)}, seed=3).rows(0, 1)["x"][0] != usual
    assert trained(4, seed=0) == usual

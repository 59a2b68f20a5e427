"""Evaluations count every held-out row once, whatever their number."""

import jax
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import ArraySource, InputError, Trainer, Weighted, supervised
from tpuswarm.train.loop.evaluate import evaluate, parts
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

INIT = {"w": np.arange(5, dtype=np.float32)}


def held_out(rows):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, 5)).astype(np.float32)
    return {"x": x, "y": x.sum(1) ** 2, "counts": (random.random(rows) < 0.3).astype(np.float32)}


def loss(params, batch, key):
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    counted = Weighted((error * batch["counts"]).sum(), batch["counts"].sum())
    return error.mean(), {"counted": counted}


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 64, 100, 130])
@pytest.mark.parametrize("count", [1, 8])
def test_every_row_counts_once(devices, rows, count):
    data = held_out(rows)
    made = supervised(lambda key: INIT, loss, optax.sgd(0.1), data)
    compiled = compile_step(made, Request(batch=64), devices[:count])
    values, counted = evaluate(compiled, compiled.init(jax.random.key(0)), ArraySource(data), 64)
    error = (data["x"].astype(np.float64) @ INIT["w"] - data["y"]) ** 2
    assert counted == rows
    np.testing.assert_allclose(values["loss"], error.mean(), rtol=1e-5)
    total = data["counts"].sum()
    np.testing.assert_allclose(values["counted"], error @ data["counts"] / max(total, 1), rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 23, 24, 25, 71, 240])
def test_parts_hold_all_rows_in_few_sizes_and_give_no_device_more_than_a_batch_does(rows, devices):
    found = list(parts(rows, 24, devices))
    assert [row for part in found for row in range(part.first, part.first + part.rows)] == list(range(rows))
    assert len({(part.rows, part.split) for part in found}) <= 4
    for part in found:
        assert not part.split or part.rows % devices == 0
        assert (part.rows // devices if part.split else part.rows) <= 24 // devices


def test_an_evaluation_has_a_batch_of_its_own(tmp_path):
    def trained(name, **options):
        trainer = Trainer(devices=4, seed=0, **options)
        return trainer.fit(toy.recipe(), steps=2, batch=8, run=tmp_path / name).metrics

    usual, own = trained("usual"), trained("own", eval_batch=60)
    np.testing.assert_allclose(own["eval_loss"], usual["eval_loss"], rtol=1e-6)
    with pytest.raises(InputError, match=r"a batch of 6 rows does not divide evenly over devices \(4\)"):
        trained("odd", eval_batch=6)

"""Batches and held-out rows with weight 0 change nothing and have no figures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.waiting import until
from tpuswarm import EarlyStopping, Every, InputError, Trainer, Weighted, supervised
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.member.metrics_buffer import MetricsBuffer
from tpuswarm.train.losses import HAS_COUNTED_ROWS
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.best import best_step
from tpuswarm.train.run.directory import METRICS, read_rows

COUNTED = {"x": np.arange(8, dtype=np.float32), "mask": np.ones(8, np.float32), "rare": np.zeros(8, np.float32)}
UNCOUNTED = COUNTED | {"mask": np.zeros(8, np.float32)}


def loss(params, batch, key):
    errors = jnp.square(params["w"] - batch["x"])
    rare = Weighted((errors * batch["rare"]).sum(), batch["rare"].sum())
    return Weighted((errors * batch["mask"]).sum(), batch["mask"].sum()), {"rare": rare}


class Batches:
    """A source in which no row of the given batches counts."""

    def __init__(self, *uncounted):
        self._uncounted = uncounted

    def rows(self, start, count):
        return UNCOUNTED if start // 8 in self._uncounted else COUNTED


def recipe(train, validation=None, optimizer=None):
    def decayed(lr, mask):
        return optimizer or optax.adamw(lr, weight_decay=0.1)

    data = {"train": train, "validation": validation}
    return supervised(lambda key: {"w": jnp.ones(())}, loss, decayed, data.get, lambda progress: 0.1)


@pytest.mark.parametrize("options", [{}, {"ema": 0.9, "clip": 1.0, "accumulate": 2}, {"devices": 4}], ids=str)
def test_step_in_which_nothing_counts_changes_nothing(tmp_path, options):
    """Neither Adam's momentum nor its decay moves a parameter."""

    def fit(source, steps, folder):
        trainer = Trainer(**{"devices": 1, "seed": 0} | options)
        return trainer.fit(recipe(source), steps=steps, batch=8, run=tmp_path / folder).state

    after, before = fit(Batches(2, 3), 4, "uncounted"), fit(Batches(), 2, "counted")
    assert jax.tree.all(jax.tree.map(np.array_equal, after, before)), "two more steps in which nothing counts"
    rows = list(read_rows(tmp_path / "uncounted" / METRICS))
    assert [row["loss"] is None for row in rows] == [False, False, True, True]
    assert all(row["rare"] is None for row in rows), "no row counts for this metric"
    events = (tmp_path / "uncounted" / "events.jsonl").read_text()
    assert events.count("no row counts in step 3") == 1 and "step 4" not in events.replace("of 4", "")


def test_divergence_is_still_found(tmp_path):
    bad = COUNTED | {"x": np.full(8, np.nan, np.float32)}
    with pytest.raises(RunFailed, match="NaN or infinity at step 1"):
        Trainer(devices=1).fit(recipe(bad), steps=2, batch=8, run=tmp_path / "run")


def test_evaluation_in_which_nothing_counts_is_neither_best_nor_an_early_stop(tmp_path):
    stop = Every("evaluation", EarlyStopping(patience=1))
    trainer = Trainer(devices=1, eval_every=1, keep_best="eval_loss", hooks=[stop])
    result = trainer.fit(recipe(COUNTED, UNCOUNTED), steps=4, batch=8, run=tmp_path / "run")
    assert result.ended == "finished" and result.step == 4 and best_step(tmp_path / "run") is None
    rows = [row for row in read_rows(tmp_path / "run" / METRICS) if "eval_rows" in row]
    assert len(rows) == 4 and all(row["eval_loss"] is None and row["eval_rare"] is None for row in rows)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count("eval_loss, eval_rare have no value at step 1: NaN or infinity, or no row counts") == 1
    assert events.count("no value at") == 2 and "no evaluation had a value of eval_loss" in events


def loss_of_step(loss):
    program = supervised(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(0.1), COUNTED).program(Options())
    return program.step(program.init(jax.random.key(0)), COUNTED, toy.clock())[1]["loss"]


def test_weight_that_depends_on_parameters_is_refused():
    """No gradient would go through it."""

    def attended(params, batch, key):
        weights = jax.nn.sigmoid(params["w"] * batch["x"])
        return Weighted((weights * batch["x"]).sum(), weights.sum())

    with pytest.raises(InputError, match=r"the weight of the loss depends on parameters.*stop_gradient"):
        loss_of_step(attended)


def test_weight_that_compares_with_parameters_is_a_constant():
    def near(params, batch, key):
        is_near = jnp.abs(params["w"] - batch["x"]) < 3
        return Weighted((is_near * jnp.square(params["w"] - batch["x"])).sum(), is_near.sum())

    assert loss_of_step(near) == pytest.approx((1 + 0 + 1 + 4) / 4)


def test_member_of_a_swarm_marks_steps_in_which_nothing_counts():
    """Without a mark its supervisor would take the missing loss for one that is not finite."""
    rows = MetricsBuffer("m0", 0, 8, lambda: 1)
    for counts in (1.0, 0.0):
        rows.add_step(
            {"loss": jnp.float32(2.0 if counts else np.nan), "grad_norm": jnp.float32(counts), HAS_COUNTED_ROWS: counts}
        )
    found = until(lambda: len(rows.since(0)) == 2 and rows.since(0))
    assert [row.get("uncounted") for row in found] == [None, True]
    assert [row["loss"] for row in found] == [2.0, None] and not any(HAS_COUNTED_ROWS in row for row in found)

"""What checks a model before a long run: two steps in a run that is not kept, and a few batches learnt by heart."""

import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import Every, InputError, Trainer, supervised
from tpuswarm.train.data.source import ArraySource, Repeated
from tpuswarm.train.run.directory import METRICS, read_config, read_rows


def test_a_fast_dev_run_goes_through_everything_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, called = [], []

    class Kept:
        def write(self, row):
            rows.append(row)

        def close(self):
            called.append("closed")

    hooks = [Every(1000, lambda step: called.append(step.row["step"]))]
    trainer = Trainer(devices=1, eval_batch=8, fast_dev_run=True, keep_best="eval_loss", hooks=hooks, loggers=[Kept()])
    result = trainer.fit(toy.recipe(), steps=10**6, batch=8, run=tmp_path / "run")
    assert (result.ended, result.step, result.steps) == ("finished", 2, 2)
    assert [row["step"] for row in rows] == [1, 2, 2] and rows[-1]["eval_rows"] == 8  # of 64
    assert called == [2, "closed"] and not result.run.exists() and not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="a fast dev run is of one host"):
        Trainer(fast_dev_run=True, hosts=2, host=0, hosts_at="127.0.0.1:1").fit(toy.recipe(), run=tmp_path / "run")


def test_a_few_batches_again_and_again(tmp_path):
    """Labels that are noise cannot be learnt, but a few of them can be learnt by heart: held out are the same rows."""
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(64, 5)).astype(np.float32), "y": random.normal(size=64).astype(np.float32)}
    made = supervised(toy.init, toy.loss, optax.adam(0.1), data)

    def fit(**options):
        return Trainer(devices=1, **options).fit(made, steps=120, batch=2, run=tmp_path / "run")

    result = fit(overfit_batches=2)
    assert result.metrics["eval_loss"] < 1e-3 and result.metrics["eval_rows"] == 4
    assert read_config(tmp_path / "run")["train"]["overfit_batches"] == 2
    assert any(row.get("eval_rows") == 4 for row in read_rows(tmp_path / "run" / METRICS))
    assert fit().step == 120  # the run knows
    with pytest.raises(InputError, match="overfit_batches was 2, now 3"):
        fit(overfit_batches=3)
    with pytest.raises(InputError, match="overfit-batches must be at least 1, not 0"):
        fit(overfit_batches=0)


def test_rows_that_are_repeated_are_the_first_of_the_order():
    source = ArraySource({"n": np.arange(10)}, seed=1)
    first = source.rows(0, 4)["n"].tolist()
    again = Repeated(source, 4)
    assert again.rows(2, 7)["n"].tolist() == (first * 3)[2:9] and again.rows_per_epoch == 4

"""Runs that end before their last step: non-finite numbers, broken data, stops that must not wait."""

import math
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.processes import rows_without_times as rows
from tests.train import toy
from tests.train.toy import trainer
from tests.waiting import until
from tpuswarm import ArraySource, InputError, RunFailed, supervised
from tpuswarm.train.data.source import rows_of
from tpuswarm.train.loop import session
from tpuswarm.train.process.stop import decide_stop
from tpuswarm.train.run.checkpoint import checkpoint_folders
from tpuswarm.train.run.listing import read_status


def fit(recipe, folder, **options):
    return trainer(**{"eval_every": None, **options}).fit(recipe, steps=20, batch=8, run=folder)


def on(data):
    return supervised(toy.init, toy.loss, optax.sgd(0.01), data)


def test_nan_fails_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    data = toy.data()
    data["x"][60] = np.nan
    with pytest.raises(RunFailed) as error:
        fit(on(data), tmp_path / "run", save_every=2)
    updates = rows(tmp_path / "run")
    bad = updates[-1]["step"] + 1
    assert f"at step {bad} (loss nan" in str(error.value) and "layer/b, layer/w" in str(error.value)
    assert all(math.isfinite(row["loss"]) for row in updates)
    newest = int(checkpoint_folders(tmp_path / "run" / "checkpoints")[0].name)
    assert newest == (bad - 1) // 2 * 2 and f"step {newest} is safe" in str(error.value)
    assert read_status(tmp_path / "run").state == "failed"


def test_non_finite_parameters_behind_a_finite_loss_are_not_saved(tmp_path):
    def init(key):
        return {"good": jnp.ones(2), "w": jnp.zeros(2)}

    def loss(params, batch, key):
        return jnp.sqrt(jnp.square(params["w"]).sum()) + 0 * batch["x"].sum() + params["good"].sum()

    recipe = supervised(init, loss, optax.sgd(0.1), {"x": np.ones((8, 1))})
    with pytest.raises(RunFailed, match=r"step 1 \(loss 2.0, gradient norm nan; parameters not finite: w\).*no update"):
        fit(recipe, tmp_path / "run")
    assert [int(folder.name) for folder in checkpoint_folders(tmp_path / "run" / "checkpoints")] == [0]


def test_parameters_that_are_no_numbers_are_named_before_the_first_step(tmp_path):
    def init(key):
        return toy.init(key) | {"unused": jnp.full(3, jnp.nan)}

    with pytest.raises(InputError, match=r"init of \w+ gives NaN or infinity in unused: check"):
        fit(supervised(init, toy.loss, optax.sgd(0.1), toy.data()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_imported_parameters_that_are_no_numbers_are_named(tmp_path, monkeypatch):
    fit(toy.recipe(), tmp_path / "parent")
    load = session.initial_parameters
    broken = lambda *args: jax.tree.map(lambda leaf: leaf * jnp.nan, load(*args))  # noqa: E731
    monkeypatch.setattr(session, "initial_parameters", broken)
    with pytest.raises(InputError, match=r"parent gives NaN or infinity in layer/b, layer/w, unused: check"):
        trainer().fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run", init_from=tmp_path / "parent")


def test_data_that_breaks_midway_ends_the_run_with_its_own_line(tmp_path):
    class Broken(ArraySource):
        def rows(self, start, count):
            if start >= 40:
                raise ValueError("row 40 is torn")
            return super().rows(start, count)

    with pytest.raises(InputError, match=r"the data source failed: ValueError: row 40 is torn \(.*test_cut_short.py:"):
        fit(on(Broken(toy.data())), tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def terminate_after_first_save(folder):
    """From then on the run knows how long a save takes."""
    until((folder / "checkpoints" / "00000000" / "manifest.json").exists)
    os.kill(os.getpid(), signal.SIGTERM)


def test_evaluation_ends_early_at_a_stop_and_is_repeated_on_resume(tmp_path, monkeypatch, capsys):
    class Slow(ArraySource):
        def rows(self, start, count):
            if start == 16:
                terminate_after_first_save(tmp_path / "run")
            assert start <= 24, "evaluated on after the signal"
            return super().rows(start, count)

    recipe = on({"train": toy.data(), "validation": Slow(toy.data())})
    result = fit(recipe, tmp_path / "run", save_every=100, eval_every=5, grace=1000)
    assert (result.ended, result.signal, result.step) == ("stopped", signal.SIGTERM, 5)
    assert "saved at step 5" in result.message
    assert f"{result.message}. To resume: the same program with run=" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(Slow, "rows", ArraySource.rows)
    fit(recipe, tmp_path / "run", eval_every=5)
    assert [row["step"] for row in rows(tmp_path / "run") if "eval_loss" in row] == [5, 10, 15, 20]


@pytest.mark.parametrize("has_position", [False, True])
def test_blocked_data_does_not_delay_a_stop(has_position, tmp_path):
    release, timeouts = threading.Event(), []

    class Blocked(ArraySource):
        def rows(self, start, count):
            if start >= 40:
                terminate_after_first_save(tmp_path / "run")
                if not release.wait(300):
                    timeouts.append(start)
            return super().rows(start, count)

    if has_position:
        Blocked.position = lambda self, row: {"row": row}
        Blocked.go_to = lambda self, position: None
    result = fit(on(Blocked(toy.data())), tmp_path / "run", grace=1000)
    assert not timeouts
    release.set()
    assert result.ended == "stopped" and f"saved at step {result.step}" in result.message
    assert 1 <= result.step <= 5  # the feed reads ahead of the loop


def test_data_that_hangs_does_not_delay_a_later_run_on_arrays(tmp_path):
    is_reading, release = threading.Event(), threading.Event()

    class Hangs(ArraySource):
        def rows(self, start, count):
            is_reading.set()
            assert release.wait(300)
            return super().rows(start, count)

    thread = threading.Thread(target=rows_of, args=(Hangs(toy.data()), 0, 8))
    thread.start()
    assert is_reading.wait(300)
    assert fit(on(ArraySource(toy.data())), tmp_path / "run").ended == "finished"
    assert thread.is_alive()
    release.set()
    thread.join()


@pytest.mark.parametrize(
    ("asked", "seconds", "busy", "save", "words"),
    [
        (signal.SIGINT, 500.0, True, True, "interrupted"),
        (signal.SIGTERM, 4.0, False, True, "a save takes 4.0 s of the 10.0 s left"),
        (signal.SIGTERM, 6.0, True, False, "a save takes 12.0 s, more than the 10.0 s left"),
        (signal.SIGTERM, 11.0, False, False, "more than the 10.0 s left"),
        (signal.SIGTERM, None, False, False, "no save has been timed yet"),
    ],
)
def test_stopping_run_saves_if_the_notice_is_long_enough(asked, seconds, busy, save, words):
    decision = decide_stop(asked, seconds, busy, remaining_s=10.0)
    assert decision.save == save and words in decision.reason


@pytest.mark.parametrize(("clip", "advice"), [(None, "rate or --clip may help"), (1e9, "rate may help")])
def test_advice_names_no_option_that_is_on(tmp_path, clip, advice):
    diverges = supervised(toy.init, toy.loss, optax.sgd(float("inf")), toy.data())
    with pytest.raises(RunFailed, match=f"a lower learning {advice}"):
        fit(diverges, tmp_path / "run", clip=clip)

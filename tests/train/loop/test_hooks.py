import signal
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.image import imread

from tests.train import toy
from tpuswarm import EarlyStopping, Every, InputError, Stop, Trainer, load
from tpuswarm.train.look import report
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows


def test_a_hook_sees_the_state_of_its_row_and_the_end(tmp_path):
    """The devices run a step ahead of the rows that a loop yields."""
    seen, held_out = [], toy.data(1)

    def look(step):
        layer = step.state.params["layer"]
        error = held_out["x"] @ np.asarray(layer["w"]) + float(layer["b"]) - held_out["y"]
        assert step.row["eval_loss"] == pytest.approx(np.mean(np.square(error)), rel=1e-5)
        seen.append(step.row)

    trainer = Trainer(devices=1, eval_every=4, hooks=[Every(4, look), Every("1h", look)])
    trainer.fit(toy.recipe(), steps=10, batch=8, run=tmp_path / "run")
    assert [row["step"] for row in seen] == [4, 8, 10, 10]
    updates = {row["step"]: row for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row}
    assert all(updates[row["step"]].items() <= row.items() for row in seen)


def test_a_hook_that_fails_is_named_by_its_line_and_the_run_goes_on_from_there(tmp_path):
    def breaks(step):
        if step.row["step"] == 6:
            raise KeyError("colour")

    def fit(**options):
        return Trainer(devices=1, save_every=2, **options).fit(toy.recipe(), steps=8, batch=8, run=tmp_path / "run")

    with pytest.raises(InputError, match=r"a hook failed at step 6: KeyError: 'colour' \(.*test_hooks\.py:"):
        fit(hooks=[Every(3, breaks)])
    assert fit().ended == "finished"
    with pytest.raises(InputError, match="a hook's every is steps such as 500"):
        fit(hooks=[Every("often", breaks)])


def constant(rate=0.0):
    """A recipe that never improves."""
    return toy.supervised(toy.init, toy.loss, optax.sgd(rate), toy.splits)


def test_a_run_ends_where_evaluations_get_no_better_and_stays_ended(tmp_path):
    def fit(**options):
        hooks = [Every("evaluation", EarlyStopping(patience=2))]
        return Trainer(devices=1, eval_every=2, hooks=hooks).fit(constant(), batch=64, run=tmp_path / "run", **options)

    result = fit(steps=20)
    assert (result.ended, result.step, result.steps) == ("finished", 6, 20)
    assert result.message == "ended at step 6: eval_loss was no better in 2 evaluations than at step 2"
    assert (tmp_path / "run" / "report.html").exists()
    again = fit(steps=20)
    for name in ("ended", "step", "steps", "message", "metrics", "signal"):
        assert getattr(again, name) == getattr(result, name)
    assert fit(steps=30).step == 12  # more steps go on


def test_what_a_hook_returns_is_shown(tmp_path):
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[1, 2] = 255, 128, 0
    hooks = [
        Every(2, lambda step: "said this"),
        Every(4, lambda step: picture),
        Every(1, lambda step: step.row["step"]),
    ]
    Trainer(devices=1, hooks=hooks).fit(toy.recipe(), steps=4, batch=8, run=tmp_path / "run")
    said = [(row["step"], row["text"]) for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "sample"]
    assert said == [(2, "said this"), (4, "said this")]
    [file] = (tmp_path / "run" / "pictures").iterdir()
    assert file.name == "00000004-1.png"
    np.testing.assert_array_equal((imread(file)[..., :3] * 255).round().astype(np.uint8), picture)
    assert "said this" in (tmp_path / "run" / "report.html").read_text()
    stops = Trainer(devices=1, hooks=[Every(3, lambda step: Stop("enough"))])
    ended = stops.fit(toy.recipe(), steps=8, batch=8, run=tmp_path / "stopped")
    assert (ended.step, ended.message) == (3, "ended at step 3: enough")


@pytest.mark.parametrize(
    ("validation", "eval_every", "expected"),
    [
        (None, None, [(2, False), (4, False)]),
        (toy.data(1), 4, [(2, False), (4, True)]),
        (toy.data(1), None, [(2, False), (4, False), (4, True)]),  # the last evaluation is only known then
    ],
)
def test_at_the_step_that_ends_the_run_each_hook_sees_every_row_once(tmp_path, validation, eval_every, expected):
    seen, others = [], []

    def fit(**options):
        made = toy.supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(), "validation": validation})
        trainer = Trainer(devices=1, eval_every=eval_every, **options)
        return trainer.fit(made, steps=8, batch=8, run=tmp_path / "run")

    hooks = [
        Every(2, lambda step: seen.append((step.row["step"], "eval_loss" in step.row))),
        Every(4, lambda step: Stop("enough")),
        Every(100, lambda step: others.append((step.row["step"], "eval_loss" in step.row))),
    ]
    assert fit(hooks=hooks).message == "ended at step 4: enough"
    assert seen == expected and others == expected[-1:]


def test_the_hooks_of_an_evaluation_that_a_resumed_run_makes_up_for(tmp_path, monkeypatch):
    seen = []

    def fit(*hooks):
        trainer = Trainer(devices=1, save_every=4, eval_every=4, hooks=hooks)
        return trainer.fit(constant(), steps=20, batch=8, run=tmp_path / "run")

    def breaks(*args, **options):
        raise OSError("the machine was taken away")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="taken away"):
        patch.setattr("tpuswarm.train.loop.loop.evaluate", breaks)
        fit()
    result = fit(
        Every("evaluation", lambda step: seen.append(step.row)), Every("evaluation", EarlyStopping(patience=1))
    )
    assert [row["step"] for row in seen] == [4, 8] and all({"loss", "eval_loss"} <= row.keys() for row in seen)
    assert result.message == "ended at step 8: eval_loss was no better in 1 evaluations than at step 4"


def test_early_stopping_counts_evaluations_alone():
    for every in (10, "5m"):
        with pytest.raises(InputError, match=rf"EarlyStopping counts .* not as Every\({every!r}, …\); eval_every says"):
            Trainer(hooks=[Every(every, EarlyStopping())]).fit(toy.recipe(), steps=1)


def test_what_is_no_array_of_three_dimensions_is_nobodys_picture(tmp_path):
    """As a function in one line returns whatever it is about."""
    table = SimpleNamespace(shape=(3, 4, 5)[:2])
    hooks = [Every(2, lambda step, each=each: each) for each in (table, np.zeros((3, 4)), np.zeros((1, 2, 3, 4)))]
    Trainer(devices=1, hooks=hooks).fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run" / "pictures").exists()


def test_an_array_that_is_no_picture_is_refused(tmp_path):
    hooks = [Every(2, lambda step: np.zeros((4, 6, 3)))]
    with pytest.raises(InputError, match=r"a hook returned float64 \(4, 6, 3\): a picture is uint8 \(height, width, 3"):
        Trainer(devices=1, hooks=hooks).fit(toy.recipe(), steps=4, batch=8, run=tmp_path / "run")


def test_the_best_checkpoint_is_kept_however_old(tmp_path):
    """A rate that is too high makes it worse from some step on; a second process keeps the same one."""

    def fit(steps, **options):
        trainer = Trainer(devices=1, eval_every=1, save_every=3, keep=1, **options)
        made = toy.supervised(toy.init, toy.loss, optax.chain(optax.sgd(0.2), bad_after(4)), toy.splits)
        return trainer.fit(made, steps=steps, batch=64, run=tmp_path / "run")

    fit(7, keep_best="eval_loss")
    fit(9, keep_best="eval_loss")
    losses = {row["step"]: row["eval_loss"] for row in read_rows(tmp_path / "run" / METRICS) if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert best < 6
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 9}
    loaded = load(tmp_path / "run", best=True)["params"]["layer"]
    held_out = toy.data(1)
    error = held_out["x"] @ loaded["w"] + loaded["b"] - held_out["y"]
    assert np.mean(np.square(error)) == pytest.approx(losses[best], rel=1e-5)
    with pytest.raises(InputError, match="the evaluations have no eval_wurst; they have eval_loss, eval_worst"):
        fit(11, keep_best="eval_wurst")
    Trainer(devices=1, eval_every=1).fit(constant(), steps=1, batch=64, run=tmp_path / "none")
    with pytest.raises(InputError, match="none has no checkpoint of its best evaluation: train with keep_best"):
        load(tmp_path / "none", best=True)
    alone = toy.supervised(toy.init, toy.loss, optax.sgd(0.1), toy.data())
    with pytest.raises(InputError, match="has no held-out rows: keep_best eval_loss has no meaning"):
        Trainer(devices=1, keep_best="eval_loss").fit(alone, steps=1, batch=64, run=tmp_path / "alone")


def bad_after(count):
    """Turns the updates around from a step on."""
    return optax.scale_by_schedule(lambda step: jnp.where(step < count, 1.0, -1.0))


def test_loggers_get_every_row_and_their_faults_are_named(tmp_path):
    class Mine:
        def __init__(self, breaks=False):
            self.rows, self.closed, self._breaks = [], 0, breaks

        def write(self, row):
            self.rows.append(row)
            if self._breaks:
                raise OSError("no disk")

        def close(self):
            self.closed += 1

    mine = Mine()
    Trainer(devices=1, eval_every=2, loggers=[mine]).fit(toy.recipe(), steps=4, batch=8, run=tmp_path / "run")
    assert mine.rows == list(read_rows(tmp_path / "run" / METRICS)) and mine.closed == 1
    broken = Mine(breaks=True)
    with pytest.raises(InputError, match=r"a logger failed at step 1: OSError: no disk \(.*test_hooks\.py:"):
        Trainer(devices=1, loggers=[broken]).fit(toy.recipe(), steps=4, batch=8, run=tmp_path / "broken")
    assert broken.closed == 1


def test_ctrl_c_while_the_report_is_written_leaves_the_run_finished(tmp_path, monkeypatch):
    """Else the same command would train on a run that a hook has ended."""
    write = report.write_report

    def interrupted(folder: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        write(folder)

    monkeypatch.setattr(report, "write_report", interrupted)
    for hooks in ([Every(2, lambda step: Stop("enough"))], []):
        found = Trainer(devices=1, hooks=hooks).fit(toy.recipe(), steps=50, batch=8, run=tmp_path / "run")
        assert found.ended == "finished" and found.step < 50

"""Hooks and loggers: what they see and return, and those that fail or hang."""

import json
import shutil
import signal
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train import toy
from tpuswarm import (
    EarlyStopping,
    Every,
    InputError,
    RunFailed,
    ScaleLearningRate,
    Stop,
    Trainer,
    load,
)
from tpuswarm.train.look import guarded_logger, report
from tpuswarm.train.loop import evaluations
from tpuswarm.train.loop.hooks import Hooks, Step
from tpuswarm.train.run.directory import EVENTS, METRICS, read_config, read_rows
from tpuswarm.train.storage.folders import BEST


class Logger:
    def __init__(self, fails=None):
        self.rows, self.closed, self._fails = [], 0, fails

    def write(self, row):
        self.rows.append(row)
        if self._fails:
            raise self._fails

    def close(self):
        self.closed += 1


NEVER_BETTER = toy.supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)


def fit(folder, recipe=None, steps=8, batch=8, **options):
    return Trainer(devices=1, **options).fit(recipe or toy.recipe(), steps=steps, batch=batch, run=folder)


def test_hook_sees_state_of_its_row_and_logger_every_row(tmp_path):
    """The devices run a step ahead of the rows that a loop yields."""
    seen, held_out, logger = [], toy.data(1), Logger()

    def hook(step):
        layer = step.state.params["layer"]
        error = held_out["x"] @ np.asarray(layer["w"]) + float(layer["b"]) - held_out["y"]
        assert step.row["eval_loss"] == pytest.approx(np.mean(np.square(error)), rel=1e-5)
        seen.append(step.row)

    fit(tmp_path / "run", steps=10, eval_every=4, hooks=[Every(4, hook), Every("1h", hook)], loggers=[logger])
    assert [row["step"] for row in seen] == [4, 8, 10, 10]
    rows = list(read_rows(tmp_path / "run" / METRICS))
    updates = {row["step"]: row for row in rows if "loss" in row}
    assert all(updates[row["step"]].items() <= row.items() for row in seen)
    assert logger.rows == rows and logger.closed == 1


def notes(run):
    return [event["message"] for event in read_rows(run / EVENTS) if event["event"] == "note"]


def test_run_ends_when_evaluations_stop_improving_and_stays_ended(tmp_path):
    hooks = [Every("evaluation", EarlyStopping(patience=2))]

    def fit_steps(steps):
        return fit(tmp_path / "run", NEVER_BETTER, steps=steps, eval_every=2, hooks=hooks)

    result = fit_steps(20)
    assert (result.ended, result.step, result.steps) == ("finished", 6, 20)
    assert result.message == "ended at step 6: eval_loss was no better in 2 evaluations than at step 2"
    assert (tmp_path / "run" / "report.html").exists()
    again = fit_steps(20)
    assert (again.ended, again.step, again.message, again.metrics) == ("finished", 6, result.message, result.metrics)
    assert fit_steps(30).step == 12  # more steps continue, and the hook counts anew
    stopping = EarlyStopping(patience=2, least=0.5)
    losses = (3.0, 2.9, 2.4, 2.3, 2.2)
    found = [stopping(Step({"step": step, "eval_loss": loss}, None)) for step, loss in enumerate(losses)]
    assert found[:-1] == [None] * 4, "improvements below the least do not count"
    assert found[-1].reason == "eval_loss was no better in 2 evaluations than at step 2"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan"), None])
def test_value_that_is_not_finite_is_neither_better_nor_worse(value):
    stopping = EarlyStopping(patience=2)
    losses = (value, 3.0, value, 4.0, value, 5.0)
    found = [stopping(Step({"step": step, "eval_loss": loss}, None)) for step, loss in enumerate(losses)]
    assert found[:-1] == [None] * 5 and found[-1].reason.endswith("no better in 2 evaluations than at step 1")


def test_texts_and_pictures_of_hooks_are_kept_and_stop_ends_the_run(tmp_path):
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[1, 2] = 255, 128, 0
    ignored = SimpleNamespace(shape=(3, 4)), np.zeros((3, 4)), np.zeros((1, 2, 3, 4)), 5, ["a list"]
    returned = {2: "a sample", 3: Stop("enough")}, {3: picture}, *({2: other} for other in ignored)
    hooks = [Every(1, lambda step, by_step=by_step: by_step.get(step.row["step"])) for by_step in returned]
    ended = fit(tmp_path / "run", hooks=hooks)
    assert (ended.step, ended.message) == (3, "ended at step 3: enough")
    events = list(read_rows(tmp_path / "run" / EVENTS))
    assert [(row["step"], row["text"]) for row in events if row["event"] == "sample"] == [(2, "a sample")]
    unused = [note for note in notes(tmp_path / "run") if "which is ignored" in note]
    assert len(unused) == len(ignored) and "a hook returned a list, which is ignored: return a text" in unused[-1]
    assert "a sample" in (tmp_path / "run" / "report.html").read_text()
    [file] = (tmp_path / "run" / "pictures").iterdir()
    assert file.name == "00000003-1.png"
    np.testing.assert_array_equal((imread(file)[..., :3] * 255).round().astype(np.uint8), picture)


@pytest.mark.parametrize(
    ("validation", "eval_every", "expected"),
    [
        (None, None, [(2, False), (4, False)]),
        (toy.data(1), 4, [(2, False), (4, True)]),
        (toy.data(1), None, [(2, False), (4, False), (4, True)]),  # the last evaluation comes after the hooks
    ],
)
def test_each_hook_sees_every_row_of_the_last_step_once(tmp_path, validation, eval_every, expected):
    seen, others = [], []
    hooks = [
        Every(2, lambda step: seen.append((step.row["step"], "eval_loss" in step.row))),
        Every(4, lambda step: Stop("enough")),
        Every(100, lambda step: others.append((step.row["step"], "eval_loss" in step.row))),
    ]
    recipe = toy.supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(), "validation": validation})
    assert fit(tmp_path / "run", recipe, eval_every=eval_every, hooks=hooks).message == "ended at step 4: enough"
    assert seen == expected and others == expected[-1:]


def test_resumed_run_makes_up_for_a_lost_evaluation_and_calls_its_hooks(tmp_path, monkeypatch):
    seen = []

    def fit_with(*hooks):
        return fit(tmp_path / "run", NEVER_BETTER, steps=20, save_every=4, eval_every=4, hooks=hooks)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="taken away"):
        patch.setattr(
            "tpuswarm.train.loop.evaluations.evaluate", Mock(side_effect=OSError("the machine was taken away"))
        )
        fit_with()
    hooks = Every("evaluation", lambda step: seen.append(step.row)), Every("evaluation", EarlyStopping(patience=1))
    result = fit_with(*hooks)
    assert [row["step"] for row in seen] == [4, 8] and all({"loss", "eval_loss"} <= row.keys() for row in seen)
    assert result.message == "ended at step 8: eval_loss was no better in 1 evaluations than at step 4"


def test_best_checkpoint_is_kept_however_old(tmp_path):
    """Updates turn around after 4 steps, and the loss grows again; a second process keeps the same checkpoint."""
    turned = optax.scale_by_schedule(lambda step: jnp.where(step < 4, 1.0, -1.0))
    recipe = toy.supervised(toy.init, toy.loss, optax.chain(optax.sgd(0.2), turned), toy.splits)
    for steps in (7, 9):
        fit(tmp_path / "run", recipe, steps, batch=64, eval_every=1, save_every=3, keep=1, keep_best="eval_loss")
    rows = list(read_rows(tmp_path / "run" / METRICS))
    assert max(row.get("tokens_per_s", 0) for row in rows) < 1e9, "a row's time is without saves, each taken off once"
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert best < 6
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 9}
    loaded = load(tmp_path / "run", best=True)["params"]["layer"]
    held_out = toy.data(1)
    error = held_out["x"] @ loaded["w"] + loaded["b"] - held_out["y"]
    assert np.mean(np.square(error)) == pytest.approx(losses[best], rel=1e-5)


def test_numbers_of_hooks_are_logged_and_decide_what_is_best_and_when_to_stop(tmp_path):
    """The score rises until step 6; the second process keeps the best score of both."""
    scores, logger = {2: 1.0, 4: 3.0, 6: 5.0, 8: 4.0, 10: np.float32(2.0), 12: float("nan")}, Logger()

    def score(step):
        return {"score": scores[step.row["step"]]}

    hooks = [
        Every("evaluation", EarlyStopping("eval_score:max", patience=2)),
        Every("evaluation", score),
        Every(3, lambda step: {"norm": jnp.linalg.norm(step.state.params["layer"]["w"]), "odd": True}),
    ]
    options = {"eval_every": 2, "keep_best": "eval_score:max", "hooks": hooks}
    for steps in (4, 20):
        result = fit(tmp_path / "run", NEVER_BETTER, steps=steps, loggers=[logger], **options)
    assert (result.step, result.metrics["eval_score"]) == (10, 2.0)
    assert result.message == "ended at step 10: eval_score:max was no better in 2 evaluations than at step 6"
    rows = list(read_rows(tmp_path / "run" / METRICS))
    evaluations = {row["step"]: row for row in rows if "eval_loss" in row}
    assert [(step, row["eval_score"]) for step, row in evaluations.items()] == [*scores.items()][:5]
    own = [row for row in rows if "norm" in row]
    assert [(row["step"], row["tokens"], row["odd"]) for row in own] == [(n, 8 * n, 1) for n in (3, 4, 6, 9, 10)]
    assert all(row.keys() == {"step", "tokens", "norm", "odd"} for row in own) and logger.rows == rows
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert 6 in kept and json.loads((tmp_path / "run" / BEST).read_text()) == {"step": 6, "eval_score": 5.0}
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("eval_score")] == [2, 4, 6, 8, 10]
    assert [event.step for event in board.Scalars("norm")] == [3, 4, 6, 9, 10]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"eval_score": 1}, "a hook returned eval_score: numbers of evaluations are for hooks of Every"),
        ({"text": "good"}, "a hook returned a dict with 'text': 'good'; in a dict of a hook are names and numbers"),
        ({"picture": np.zeros(3)}, "a hook returned a dict with 'picture'"),
        ({"ragged": [[1], [2, 3]]}, r"a hook returned a dict that cannot be used: .* \(.*test_hooks\.py:"),
        ({3: 1.0}, "a hook returned a dict with 3: 1.0"),
        ({"z": 1j}, "a hook returned a dict with 'z': 1j"),
        (np.zeros((4, 6, 3)), r"a hook returned float64 \(4, 6, 3\): a picture is uint8"),
        (np.zeros((0, 4, 3), np.uint8), r"a hook returned uint8 \(0, 4, 3\): a picture is"),
        (plt.Figure().suptitle("$\\nothing$").figure, r"a Figure that cannot be used: .*test_hooks\.py:"),
        *((ScaleLearningRate(factor), "the factor of ScaleLearningRate") for factor in (np.nan, -1.0, 0, "x", None)),
    ],
)
def test_unusable_result_of_a_hook_is_refused(returned, says):
    with pytest.raises(InputError, match=says):
        Hooks([Every(2, lambda step: returned)]).call(0, {"step": 2}, None)


def test_names_of_numbers_are_checked(tmp_path):
    named = [("evaluation", "loss"), ("evaluation", "rows"), (2, "score"), (1, "score")]
    hooks = [Every(every, lambda step, name=name: {name: 1}) for every, name in named]
    fit(tmp_path / "run", eval_every=2, hooks=hooks)
    for says in (
        "called eval_loss, which is a column of rows already: rename it",
        "called eval_rows, which is a column of rows already",
        "a number called score, which is another hook's: rename it",
    ):
        assert [note for note in notes(tmp_path / "run") if says in note and "training continues" in note]


def test_unknown_number_is_refused_as_the_best(tmp_path):
    hooks = [Every("evaluation", lambda step: {"score": 1})]
    with pytest.raises(InputError, match=r"have no eval_scor; they have .*, eval_score"):
        fit(tmp_path / "run", eval_every=2, hooks=hooks, keep_best="eval_scor")
    assert "keep_best" not in read_config(tmp_path / "run")["may_change"], "the next start would fail again"


def test_run_without_evaluations_calls_their_hooks_only_at_the_end(tmp_path):
    recipe = toy.supervised(toy.init, toy.loss, optax.sgd(0.1), toy.data())
    score = Every("evaluation", lambda step: {"score": step.row["step"]})
    fit(tmp_path / "run", recipe, hooks=[score])
    assert [row["eval_score"] for row in read_rows(tmp_path / "run" / METRICS) if "eval_score" in row] == [8]


@pytest.mark.parametrize("at", [4, 8], ids=["mid-run", "at the end"])
def test_evaluation_whose_hooks_were_not_called_is_made_again(tmp_path, monkeypatch, at):
    """The score is best there: a run that resumed without it would keep another checkpoint."""
    left = []

    def score(step):
        return {"score": 9.0 if step.row["step"] == at else 1.0}

    def interrupted(*given, **named):
        found = evaluate(*given, **named)
        if len(made) == at // 2 - 1 and not left:
            left.append(at)
            signal.raise_signal(signal.SIGTERM)
        made.append(found)
        return found

    evaluate, made = evaluations.evaluate, []
    monkeypatch.setattr(evaluations, "evaluate", interrupted)
    options = {"eval_every": 2, "save_every": 2, "keep_best": "eval_score:max", "hooks": [Every("evaluation", score)]}
    assert fit(tmp_path / "run", NEVER_BETTER, **options).ended == "stopped" and left
    result = fit(tmp_path / "run", NEVER_BETTER, **options)
    assert result.ended == "finished" and result.metrics["eval_score"] == (9.0 if at == 8 else 1.0)
    assert json.loads((tmp_path / "run" / BEST).read_text()) == {"step": at, "eval_score": 9.0}
    scores = {row["step"]: row["eval_score"] for row in read_rows(tmp_path / "run" / METRICS) if "eval_loss" in row}
    assert scores == {step: 9.0 if step == at else 1.0 for step in (2, 4, 6, 8)}


@pytest.mark.parametrize("at", [4, 8], ids=["mid-run", "at the end"])
def test_evaluation_whose_hook_fails_lacks_its_number_alone(tmp_path, at):
    def score(step):
        if step.row["step"] == at:
            raise OSError("no network")
        return {"score": step.row["step"]}

    hooks = [Every("evaluation", score), Every("evaluation", EarlyStopping("eval_score:max"))]
    result = fit(tmp_path / "run", NEVER_BETTER, eval_every=2, keep_best="eval_score:max", hooks=hooks)
    assert result.ended == "finished"
    rows = [row for row in read_rows(tmp_path / "run" / METRICS) if "eval_loss" in row]
    assert {row["step"]: row.get("eval_score") for row in rows} == {n: None if n == at else n for n in (2, 4, 6, 8)}
    assert json.loads((tmp_path / "run" / BEST).read_text())["step"] == (6 if at == 8 else 8)
    assert any("a hook failed at step" in note and "OSError: no network (" in note for note in notes(tmp_path / "run"))


def test_recipe_brings_hooks_and_loggers(tmp_path):
    seen, made = [], []
    recipe = toy.recipe()
    recipe.hooks = lambda: [Every(4, lambda step: seen.append(step.row["step"]))]
    recipe.loggers = lambda: [made.append(Logger()) or made[-1]]
    fit(tmp_path / "run", recipe, hooks=[Every(8, lambda step: seen.append(-step.row["step"]))])
    assert sorted(seen) == [-8, 4, 8] and len(made) == 1 and made[0].rows and made[0].closed == 1
    fit(tmp_path / "run", recipe)  # is finished
    assert len(made) == 1
    for name, wrong in (("hooks", None), ("hooks", Every(1, print)), ("loggers", Logger())):
        other = toy.recipe()
        setattr(other, name, lambda wrong=wrong: wrong)
        with pytest.raises(InputError, match=rf"{name} of .* returns a \w+, not a list of"):
            fit(tmp_path / name, other)


def test_numbers_of_the_last_step_are_written_once(tmp_path, monkeypatch):
    """The process ends after it wrote them, and the next process calls the hook again."""
    with monkeypatch.context() as patch, pytest.raises(RunFailed, match="killed"):
        patch.setattr(report, "write_report", Mock(side_effect=OSError("killed")))
        fit(tmp_path / "run", hooks=[Every(4, lambda step: {"norm": 1.0})])
    fit(tmp_path / "run", hooks=[Every(4, lambda step: {"norm": 1.0})])
    assert [row["step"] for row in read_rows(tmp_path / "run" / METRICS) if "norm" in row] == [4, 8]


def test_figure_of_matplotlib_is_a_picture():
    def draw(step):
        figure, axes = plt.subplots(figsize=(2, 1), dpi=50, facecolor="red")
        axes.remove()
        plt.close(figure)
        return figure

    picture = Hooks([Every(2, draw)]).call(0, {"step": 2}, None)
    assert (picture.shape, picture.dtype) == ((50, 100, 3), np.uint8) and (picture == [255, 0, 0]).all()


def test_another_figure_for_the_best_checkpoint_is_noted(tmp_path):
    for steps, goal in ((4, "eval_loss"), (6, "eval_loss"), (8, "eval_worst")):
        fit(tmp_path / "run", NEVER_BETTER, steps=steps, eval_every=2, keep_best=goal)
    changed = "the best checkpoint was kept by eval_loss; from here on it is by eval_worst"
    assert sum(changed in note for note in notes(tmp_path / "run")) == 1
    assert json.loads((tmp_path / "run" / BEST).read_text()).keys() == {"step", "eval_worst"}


def test_ctrl_c_while_the_report_is_written_leaves_the_run_finished(tmp_path, monkeypatch):
    """Otherwise the same command would continue a run that a hook has ended."""
    write = report.write_report

    def interrupted(folder):
        signal.raise_signal(signal.SIGINT)
        write(folder)

    monkeypatch.setattr(report, "write_report", interrupted)
    result = fit(tmp_path / "run", hooks=[Every(2, lambda step: Stop("enough"))])
    again = fit(tmp_path / "run")
    assert (result.ended, result.step) == (again.ended, again.step) == ("finished", 2)


def test_state_that_a_hook_or_a_loop_changes_is_refused(tmp_path):
    replaces = Every(2, lambda step: step.state["layer"].update(w=jnp.zeros(3)))
    with pytest.raises(InputError, match="it replaced layer/w"):
        Hooks([replaces]).call(0, {"step": 2}, {"layer": {"w": jnp.ones(3)}})
    loop = Trainer(devices=1).steps(toy.recipe(), steps=4, batch=8, run=tmp_path / "loop")
    del next(loop).state.params["layer"]
    with pytest.raises(InputError, match=r"it replaced params/layer/\w+"):
        next(loop)


@pytest.mark.parametrize("error", [OSError("no disk"), RunFailed("mine")], ids=repr)
def test_failing_hook_and_logger_are_named_by_line_and_the_run_goes_on(tmp_path, error):
    def fails(step):
        if step.row["step"] >= 3:
            raise error

    loggers = Logger(fails=error), Logger()
    recipe = toy.recipe()
    recipe.loggers = lambda: fails(Step({"step": 3}, None))
    seen, hooks = [], [Every(2, fails), Every(2, lambda step: seen.append(step.row["step"]))]
    assert fit(tmp_path / "run", recipe, loggers=loggers, hooks=hooks).ended == "finished"
    rows = list(read_rows(tmp_path / "run" / METRICS))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9)) and seen == [2, 4, 6, 8]
    assert all(logger.rows == rows and logger.closed == 1 for logger in loggers)
    reported = notes(tmp_path / "run")
    for start in ("loggers of", "a logger failed at step 1", "a hook failed at step 4"):
        [note] = [note for note in reported if note.startswith(start) or note.startswith("mine")][:1]
        assert "training continues" in note and ("test_hooks.py:" in note or note.startswith("mine"))
    assert f"a logger failed {len(rows)} times in all; metrics.jsonl has every row" in reported


def test_failing_hook_is_not_called_before_its_time(tmp_path):
    calls = []

    def fails(step):
        calls.append(step.row["step"])
        raise OSError("no disk")

    fit(tmp_path / "run", hooks=[Every("1h", fails)])
    assert calls == [8]


def test_failing_hook_ends_several_hosts(tmp_path, monkeypatch):
    """The others may wait for it in a collective of theirs."""

    def fails(step):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise OSError("no disk")

    with pytest.raises(InputError, match=r"a hook failed at step 4: OSError: no disk \(.*test_hooks\.py:"):
        fit(tmp_path / "run", hooks=[Every(4, fails)])


def test_logger_that_hangs_is_left_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded_logger, "TIMEOUT_S", 0.5)

    def hang(row=None):
        while True:
            with suppress(Exception):  # as a logger does that tries again and again
                threading.Event().wait()

    written, sound = Mock(**{"write.side_effect": hang}), Logger()
    closed = Mock(**{"close.side_effect": hang})
    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody answers
        asked = Mock(**{"write.side_effect": lambda row: socket.create_connection(server.getsockname()).recv(1)})
        assert fit(tmp_path / "run", loggers=[written, closed, asked, sound]).ended == "finished"
    assert sound.rows == list(read_rows(tmp_path / "run" / METRICS)) and sound.closed == 1
    assert (written.write.call_count, asked.write.call_count, closed.write.call_count) == (1, 1, len(sound.rows))
    reported = [note for note in notes(tmp_path / "run") if "it hung for 0.5 s" in note]
    assert len(reported) == 3 and all("test_hooks.py:" in note for note in reported)


def test_tensorboard_that_cannot_be_written_does_not_end_the_run(tmp_path):
    fit(tmp_path / "run", NEVER_BETTER, steps=4)
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / "tensorboard").touch()
    picture = np.zeros((4, 6, 3), np.uint8)
    assert fit(tmp_path / "run", NEVER_BETTER, hooks=[Every(1, lambda step: picture)]).ended == "finished"
    assert any("tensorboard" in note and "training continues" in note for note in notes(tmp_path / "run"))
    assert (tmp_path / "run" / "pictures" / "00000008-0.png").exists()

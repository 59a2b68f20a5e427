"""The trainer as a library, on the toy recipe, in one process."""

import math
import shutil
import threading
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import TIMES
from tests.processes import rows_without_times as rows
from tests.train import toy
from tests.train.toy import trainer
from tpuswarm import EarlyStopping, Every, InputError, RunFailed, Trainer, load, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.look.report import write_report
from tpuswarm.train.run.checkpoint import MANIFEST, checkpoint_folders
from tpuswarm.train.run.directory import EVENTS, METRICS, Run, read_rows
from tpuswarm.train.run.listing import read_status
from tpuswarm.train.settings import count_steps


def fit(folder, **options):
    return trainer(**options).fit(toy.recipe(), steps=20, batch=8, run=folder)


def saved_steps(folder):
    return sorted(int(path.name) for path in checkpoint_folders(folder / "checkpoints"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, fit(folder)


def leave_after(rows_read, folder, **options):
    loop = trainer(**options).steps(toy.recipe(), steps=20, batch=8, run=folder)
    list(islice(loop, rows_read))
    loop.close()


@pytest.fixture(scope="module")
def stopped_original(tmp_path_factory):
    """The same run, stopped after its row 9."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    leave_after(9, folder)
    assert read_status(folder).state == "stopped"
    return folder


@pytest.fixture
def stopped(stopped_original, tmp_path):
    return Path(shutil.copytree(stopped_original, tmp_path / "run"))


def test_run_writes_metrics_checkpoints_and_report(whole):
    folder, result = whole
    assert (result.ended, result.step, result.steps, result.run) == ("finished", 20, 20, folder)
    updates = [row for row in read_rows(folder / METRICS) if "loss" in row]
    assert [row["step"] for row in updates] == list(range(1, 21))
    assert [row["tokens"] for row in updates] == [8 * step for step in range(1, 21)]
    assert {"loss", "lr", "grad_norm", "worst", *TIMES} <= updates[0].keys()
    np.testing.assert_allclose([row["lr"] for row in updates], [0.05 * (1 - n / 20) for n in range(20)], rtol=1e-6)
    evaluations = [row for row in read_rows(folder / METRICS) if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [5, 10, 15, 20]
    assert not any("loss" in row for row in evaluations)
    assert result.metrics["worst"] == updates[-1]["worst"]
    assert result.metrics["eval_worst"] == evaluations[-1]["eval_worst"]
    assert {"config.toml", "checkpoints", "report.html"} <= {path.name for path in folder.iterdir()}
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    curves = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name, steps in (("loss", [1, 11]), ("eval_loss", [5, 10, 15, 20])):
        assert [point.step for point in curves.Scalars(name)] == steps
    assert read_status(folder).state == "finished"


def test_losses_equal_those_of_a_bare_optax_loop(whole):
    source = toy.recipe().data("train")
    params = jax.jit(toy.init)(jax.random.split(jax.random.key(0))[0])
    no_decay = jax.tree.map(lambda _: False, params)
    state = toy.adam(0.0, no_decay).init(params)
    gradient = jax.jit(jax.value_and_grad(toy.loss, has_aux=True))
    for row in (row for row in rows(whole[0]) if "loss" in row):
        step = row["step"] - 1
        (loss, _), grads = gradient(params, source.rows(step * 8, 8), None)
        updates, state = toy.adam(0.05 * (1 - step / 20), no_decay).update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(row["loss"], loss, rtol=1e-4)


def test_same_run_on_another_thread_is_equal_bit_for_bit(whole, tmp_path):
    thread = threading.Thread(target=fit, args=[tmp_path / "run"])
    thread.start()
    thread.join()
    assert rows(tmp_path / "run") == rows(whole[0])


def test_loop_left_anywhere_resumes_bit_for_bit(whole, tmp_path):
    """Before and after the evaluations of every 5 steps, the saves of every 7, and the last step."""
    folder = tmp_path / "run"
    for rows_read in (1, 2, 1, 1, 3, 5, 2, 4):
        leave_after(rows_read, folder)
    stops = [event["step"] for event in read_rows(folder / EVENTS) if event["event"] == "stopped"]
    assert stops == [2, 5, 5, 7, 10, 14, 15, 20]
    assert fit(folder).ended == "finished"
    assert rows(folder) == rows(whole[0])


def test_finished_run_reports_it_and_changes_nothing(whole, capsys):
    folder, first = whole
    before = (folder / METRICS).read_bytes()
    with mock.patch("tpuswarm.train.loop.session.compile_step", side_effect=AssertionError("it compiles")):
        again = fit(folder)
    assert "finished; nothing left to do" in capsys.readouterr().err
    assert (folder / METRICS).read_bytes() == before
    assert again.metrics == first.metrics
    jax.tree.map(np.testing.assert_array_equal, again.state, first.state)


def test_devices_sharding_saving_and_evaluating_may_change(whole, stopped):
    fit(stopped, devices=8, shard="fsdp", save_every="1h", eval_every=4, keep=1)
    resumed, expected = ([row["loss"] for row in rows(folder) if "loss" in row] for folder in (stopped, whole[0]))
    np.testing.assert_allclose(resumed, expected, rtol=1e-4)
    assert saved_steps(stopped) == [20]


@pytest.mark.parametrize(
    ("options", "fit_options", "words"),
    [
        ({"seed": 3}, {}, "seed was 0, now 3"),
        ({"precision": "bf16", "ema": 0.9}, {}, "precision was f32, now bf16; ema was none, now 0.9; only --devi"),
        ({}, {"steps": 30}, "steps was 20, now 30; a run can only become longer, .* no schedule. .* --init-from"),
        ({}, {"batch": 16}, "batch was 8, now 16"),
    ],
)
def test_other_settings_may_not_change(stopped, options, fit_options, words):
    before = sorted(stopped.rglob("*"))
    with pytest.raises(InputError, match=words):
        trainer(**options).fit(toy.recipe(), run=stopped, **{"steps": 20, "batch": 8, **fit_options})
    assert sorted(stopped.rglob("*")) == before


def test_settings_stay_as_given_and_run_without_schedule_can_grow(tmp_path):
    def fit(steps, run="run", **options):
        recipe = supervised(toy.init, toy.loss, optax.adam(0.1), toy.splits)
        return Trainer(devices=1, **options).fit(recipe, steps=steps, batch=8, run=tmp_path / run)

    def saved_and_evaluated():
        evaluated = [row["step"] for row in rows(tmp_path / "run") if "eval_loss" in row]
        return saved_steps(tmp_path / "run"), evaluated

    assert fit(4, clip=0.7, seed=5, save_every=2, keep=9, eval_every=2).step == 4
    assert saved_and_evaluated() == ([0, 2, 4], [2, 4])
    longer = fit(8)
    assert saved_and_evaluated() == ([0, 2, 4, 6, 8], [2, 4, 6, 8])
    fixed = Run(tmp_path / "run").config()["train"]
    assert (fixed["clip"], fixed["seed"]) == (0.7, 5)
    assert longer.metrics["loss"] == fit(8, "whole", clip=0.7, seed=5).metrics["loss"]
    fit(10, keep=1)
    assert saved_and_evaluated() == ([10], [2, 4, 6, 8, 10])
    with pytest.raises(InputError, match="steps was 10, now 6; a run can only become longer"):
        fit(6)


def test_command_without_options_keeps_settings_of_the_run(typed, tmp_path):
    """An evaluation batch that the new devices do not divide is rounded up."""
    (tmp_path / "made.py").write_text("from tests.train.toy import toy as recipe\n")
    run = ["train", f"{tmp_path}/made.py:recipe", "--batch", "8", "--run", f"{tmp_path}/run"]
    given = ["--save-every", "2", "--keep", "9", "--keep-best", "eval_loss", "--eval-batch", "6", "--steps", "4"]
    assert typed(*run, *given, "--devices", "2")[0] == 0
    before = Run(tmp_path / "run").config()["may_change"]
    (tmp_path / "run" / "checkpoints" / "00000004" / MANIFEST).unlink()
    assert typed(*run, "--devices", "4")[0] == 0
    assert Run(tmp_path / "run").config()["may_change"] == before | {"devices": "4", "eval_batch": 8}
    code, _, err = typed(*run[:-1], f"{tmp_path}/other", "--devices", "4", "--eval-batch", "6")
    assert code == 2 and "use --eval-batch 8" in " ".join(err.split())


def test_damaged_checkpoint_is_reported_and_the_one_before_resumed(whole, stopped, capsys):
    newest = checkpoint_folders(stopped / "checkpoints")[0]
    (newest / MANIFEST).unlink()
    fit(stopped)
    printed = capsys.readouterr().err
    assert f"checkpoint {newest.name} is damaged" in printed and "resumed from the checkpoint of step 7" in printed
    assert rows(stopped) == rows(whole[0])


def test_damaged_option_of_the_configuration_is_named(tmp_path):
    """The number of heads changes no shape, and a run is resumed with the options of its configuration."""
    options = {"layers": 1, "width": 8, "heads": 2, "context": 4, "data": "fake", "tokenizer": "bytes"}
    trainer(eval_every=None).fit(GPT2(**options), steps=2, batch=8, run=tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("heads = 2", "heads = 4"))
    with pytest.raises(InputError, match="it has heads 4, and the checkpoint of step 2 was saved with 2; put that"):
        trainer(eval_every=None).fit(GPT2(**options | {"heads": 4}), steps=2, batch=8, run=tmp_path)


def test_damaged_setting_of_the_configuration_is_named(tmp_path):
    """Neither data nor program show the seed."""

    class Ones:
        def rows(self, start, count):
            return {"x": np.ones((count, 5), np.float32), "y": np.ones(count, np.float32)}

    def steps():
        recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": Ones()})
        return trainer(eval_every=None).steps(recipe, steps=20, batch=8, run=tmp_path)

    loop = steps()
    next(loop)
    loop.close()
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 4"))
    with pytest.raises(InputError, match="it has seed 4, and the checkpoint of step 2 was saved with 0; put that back"):
        list(steps())


@pytest.mark.parametrize("content", ["", '{"step": 5, "eval_loss": "many"}', '{"step": 3, "eval_loss": 0.5}'])
def test_best_checkpoint_that_is_damaged_is_reported(tmp_path, capsys, content):
    """Step 3 has no checkpoint."""
    leave_after(9, tmp_path / "run", keep_best="eval_loss")
    (tmp_path / "run" / "best.json").write_text(content)
    fit(tmp_path / "run")
    assert "best.json or its checkpoint is damaged" in " ".join(capsys.readouterr().err.split())
    assert load(tmp_path / "run", best=True)


def test_report_leaves_out_damaged_rows(whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    names = {METRICS: ("tokens", "wall_s"), EVENTS: ("findings", "kind", "mfu", "text", "message")}
    for file, columns in names.items():
        lines = (run / file).read_text().splitlines(keepends=True)
        damaged = [line.replace(f'"{name}":', '"other":') for name in columns for line in lines if f'"{name}":' in line]
        (run / file).write_text("".join([*lines, *damaged]))
    assert "training time" in write_report(run).read_text()


def test_resumed_deterministic_run_is_deterministic(stopped, monkeypatch):
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("deterministic = false", "deterministic = true"))

    def prepare(deterministic=False):
        raise RunFailed(str(deterministic))

    monkeypatch.setattr("tpuswarm.train.process.platform.configure_jax", prepare)
    with pytest.raises(RunFailed, match=r"^True$"):
        trainer().fit(toy.recipe(), run=stopped)


def test_run_starts_from_parameters_of_a_run_of_a_program(whole, tmp_path):
    """The parent has Adam's moments and no average; the child has no moments, an average, and frozen leaves."""
    folder, first = whole
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)
    child = trainer(ema=0.9, freeze="unused").fit(recipe, steps=1, batch=8, run=tmp_path / "child", init_from=folder)
    jax.tree.map(np.testing.assert_array_equal, child.state.params["layer"], first.state.params["layer"])
    jax.tree.map(np.testing.assert_allclose, child.state.ema["layer"], first.state.params["layer"])
    other = supervised(
        lambda key: {"w": jnp.zeros(7)}, lambda params, *_: params["w"].sum(), optax.sgd(0.1), toy.data()
    )
    with pytest.raises(InputError, match="a different model: 4 parameters differ, the first params/layer/b"):
        trainer(eval_every=None).fit(other, steps=2, batch=8, run=tmp_path / "other", init_from=folder)


def test_arrays_of_a_run_load_without_its_recipe(whole, tmp_path):
    folder, first = whole
    loaded = load(folder)
    assert loaded.keys() == {"params", "opt"}
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], first.state.params)
    again = load(folder, like=jax.eval_shape(lambda: first.state))
    jax.tree.map(np.testing.assert_array_equal, again, first.state)
    assert jax.tree.structure(again) == jax.tree.structure(first.state)
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        load(tmp_path)
    with pytest.raises(InputError, match="run has no checkpoint of its best evaluation: train with keep_best"):
        load(folder, best=True)


def test_recipes_batch_is_rounded_up_to_the_devices(tmp_path, capsys):
    recipe = toy.recipe(defaults={"batch": 12, "steps": 2})
    assert next(Trainer().steps(recipe, run=tmp_path / "run")).row["tokens"] == 16
    assert "batch 16, a multiple of 8 devices" in capsys.readouterr().err


def test_run_without_held_out_data_trains_unless_evaluations_are_requested(tmp_path):
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.01), toy.data())
    with pytest.raises(InputError, match="no validation data"):
        trainer().fit(recipe, steps=2, batch=8, run=tmp_path / "run")
    hooks = [Every("evaluation", EarlyStopping("worst"))]  # a figure of steps
    result = trainer(eval_every=None, hooks=hooks).fit(recipe, steps=2, batch=8, run=tmp_path / "run")
    assert result.step == 2 and "eval_loss" not in result.metrics


def test_options_that_toml_cannot_hold_are_refused(tmp_path):
    recipe = toy.recipe()
    recipe.options = lambda: {"model": object()}
    with pytest.raises(InputError, match="must be plain values"):
        trainer().fit(recipe, steps=2, batch=8, run=tmp_path / "run")


def test_fast_dev_run_exercises_everything_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger, hook = mock.Mock(), mock.Mock(return_value=None)
    options = {"eval_batch": 16, "keep_best": "eval_loss", "hooks": [Every(1000, lambda step: hook(step.row["step"]))]}
    trainer = Trainer(devices=1, fast_dev_run=True, loggers=[logger], **options)
    result = trainer.fit(toy.recipe(), steps=10**6, batch=8, run=tmp_path / "run")
    assert (result.ended, result.step, result.steps) == ("finished", 2, 2)
    logged = [call.args[0] for call in logger.write.call_args_list]
    assert [row["step"] for row in logged] == [1, 2, 2] and logged[-1]["eval_rows"] == 16  # of 64 held-out rows
    hook.assert_called_once_with(2)
    logger.close.assert_called_once_with()
    assert not result.run.exists() and not list(tmp_path.iterdir())


def test_number_of_batches_to_overfit_is_kept_by_the_run(tmp_path):
    recipe = supervised(toy.init, toy.loss, optax.adam(0.1), toy.data())

    def fit(**options):
        return Trainer(devices=1, **options).fit(recipe, steps=2, batch=2, run=tmp_path / "run")

    assert fit(overfit_batches=2).metrics["eval_rows"] == 4
    assert fit().step == 2
    with pytest.raises(InputError, match="overfit_batches was 2, now 3"):
        fit(overfit_batches=3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1000}, 4),
        ({"tokens": 768}, 3),
        ({"epochs": 2.0}, 50),
        ({"epochs": 0.001}, 1),
        ({}, None),
        ({"steps": 5, "tokens": 5}, "one of steps, tokens and epochs, not steps and tokens"),
        ({"steps": -5}, "steps must be above 0"),
        ({"epochs": math.nan}, "epochs must be above 0"),
        ({"epochs": 1.0, "rows_per_epoch": None}, "no epochs"),
    ],
)
def test_length_of_a_run_in_steps(given, expected):
    length = {"steps": None, "tokens": None, "epochs": None, "rows_per_epoch": 100} | given
    with pytest.raises(InputError, match=expected) if isinstance(expected, str) else nullcontext():
        assert count_steps(**length, tokens_per_step=256, batch=4) == expected

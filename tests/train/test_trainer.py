"""The trainer as a library, on the toy recipe: every promise about a run that needs no second process."""

import json
import math
import os
import shutil
import struct
import threading
from itertools import islice
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

from tests.train import toy
from tests.train.toy import TIMES, rows, trainer
from tpuswarm import InputError, RunFailed, Trainer, load, supervised
from tpuswarm.train.run.checkpoint import MANIFEST, checkpoint_folders
from tpuswarm.train.run.directory import Run, read_rows
from tpuswarm.train.run.listing import status


def curves(folder):
    """Steps of two curves as TensorBoard's files hold them, read with the protobuf messages of its format."""
    found = {"loss": [], "eval_loss": []}
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (size,) = struct.unpack_from("<Q", data, place)
            event = event_pb2.Event.FromString(data[place + 12 : place + 12 + size])
            place += 12 + size + 4
            for value in event.summary.value:
                if value.tag in found:
                    found[value.tag].append(event.step)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 20 steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    return folder, result


def test_a_run_leaves_what_it_promises(whole):
    folder, result = whole
    assert (result.ended, result.step, result.steps, result.run) == ("finished", 20, 20, folder)
    updates = [row for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in updates] == list(range(1, 21))
    assert [row["tokens"] for row in updates] == [8 * step for step in range(1, 21)]
    assert {"loss", "lr", "grad_norm", "worst", *TIMES} <= updates[0].keys()
    np.testing.assert_allclose([row["lr"] for row in updates], [0.05 * (1 - n / 20) for n in range(20)], rtol=1e-6)
    evaluations = [row for row in read_rows(folder / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [5, 10, 15, 20]
    assert not any("loss" in row for row in evaluations)
    assert (
        result.metrics["worst"] == updates[-1]["worst"]
        and result.metrics["eval_worst"] == evaluations[-1]["eval_worst"]
    )
    names = {path.name for path in folder.iterdir()}
    assert {"config.toml", "events.jsonl", "checkpoints", "report.html", "loss.png", "tensorboard"} <= names
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert curves(folder) == {"loss": [1, 11], "eval_loss": [5, 10, 15, 20]}
    assert status(folder).state == "finished"


def test_the_losses_are_those_of_a_bare_loop(whole):
    """Oracle: the same descent written out with optax alone."""
    folder, _ = whole
    source = toy.recipe().data("train")
    params = jax.jit(toy.init)(jax.random.split(jax.random.key(0))[0])
    nothing = jax.tree.map(lambda _: False, params)
    state = toy.adam(0.0, nothing).init(params)
    for row in (row for row in rows(folder) if "loss" in row):
        step = row["step"] - 1
        batch = source.rows(step * 8, 8)
        (loss, _), grads = jax.value_and_grad(toy.loss, has_aux=True)(params, batch, None)
        updates, state = toy.adam(0.05 * (1 - step / 20), nothing).update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(row["loss"], loss, rtol=1e-4)


def test_training_again_is_the_same_bit_for_bit(whole, tmp_path):
    trainer().fit(toy.recipe(), steps=20, batch=8, run=tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole[0])


@pytest.mark.parametrize("left_after", [1, 2, 4, 5, 6, 7, 8, 13, 19])
def test_a_loop_left_anywhere_goes_on_bit_for_bit(whole, tmp_path, left_after):
    folder = tmp_path / "run"
    loop = trainer().steps(toy.recipe(), steps=20, batch=8, run=folder)
    seen = [row for row, _ in islice(loop, left_after)]
    assert seen[-1]["step"] <= left_after
    loop.close()
    assert status(folder).state == "stopped"
    result = trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    assert result.ended == "finished"
    assert rows(folder) == rows(whole[0])


def test_a_finished_run_says_so_and_changes_nothing(whole, capsys):
    folder, first = whole
    before = (folder / "metrics.jsonl").read_bytes()
    with mock.patch("tpuswarm.train.loop.session.compile_step", side_effect=AssertionError("it compiles")):
        again = trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    assert "finished; nothing left to do" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert again.metrics == first.metrics
    for got, want in zip(jax.tree.leaves(again.state), jax.tree.leaves(first.state), strict=True):
        np.testing.assert_array_equal(got, want)


def stopped_run(folder, **options):
    loop = trainer(**options).steps(toy.recipe(), steps=20, batch=8, run=folder)
    list(islice(loop, 9))
    loop.close()


def test_devices_shard_saving_and_evaluating_may_change(whole, tmp_path):
    stopped_run(tmp_path / "run")
    other = trainer(devices=8, shard="fsdp", save_every="1h", eval_every=4, keep=1)
    other.fit(toy.recipe(), steps=20, batch=8, run=tmp_path / "run")
    got = {row["step"]: row["loss"] for row in rows(tmp_path / "run") if "loss" in row}
    want = {row["step"]: row["loss"] for row in rows(whole[0]) if "loss" in row}
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-4)
    assert len(checkpoint_folders(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.parametrize(
    ("options", "fit_options", "words"),
    [
        ({"seed": 3}, {}, "seed was 0, now 3"),
        ({"clip": 1.0}, {}, "clip was none, now 1.0"),
        ({"precision": "bf16", "ema": 0.9}, {}, "precision was f32, now bf16; ema was none"),
        ({}, {"steps": 30}, "steps was 20, now 30, and a run can only become longer, .* no schedule; .* --init-from"),
        ({}, {"batch": 16}, "batch was 8, now 16"),
    ],
)
def test_nothing_else_may_change(tmp_path, options, fit_options, words):
    stopped_run(tmp_path / "run")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=words):
        trainer(**options).fit(toy.recipe(), run=tmp_path / "run", **{"steps": 20, "batch": 8, **fit_options})
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_finished_run_without_a_schedule_may_be_made_longer(tmp_path):
    def fit(steps, folder):
        recipe = supervised(toy.init, toy.loss, optax.adam(0.1), toy.splits)
        return trainer().fit(recipe, steps=steps, batch=8, run=tmp_path / folder)

    assert fit(6, "run").step == 6
    longer, whole = fit(9, "run"), fit(9, "whole")
    assert longer.step == 9 and longer.metrics["loss"] == whole.metrics["loss"]
    with pytest.raises(InputError, match="steps was 9, now 6"):
        fit(6, "run")


def test_what_is_not_asked_is_taken_from_the_run(tmp_path):
    stopped_run(tmp_path / "run", clip=0.7, seed=5)
    result = trainer().fit(toy.recipe(), run=tmp_path / "run")
    assert result.step == 20
    assert json.dumps(Run(tmp_path / "run").config()["train"]["clip"]) == "0.7"


def test_saving_and_evaluating_stay_as_the_run_was_told(tmp_path):
    def fit(steps, **options):
        recipe = supervised(toy.init, toy.loss, optax.adam(0.1), toy.splits)
        Trainer(devices=1, **options).fit(recipe, steps=steps, batch=8, run=tmp_path / "run")
        saved = [int(folder.name) for folder in checkpoint_folders(tmp_path / "run" / "checkpoints")]
        return sorted(saved), [row["step"] for row in rows(tmp_path / "run") if "eval_loss" in row]

    assert fit(4, save_every=2, keep=9, eval_every=2) == ([0, 2, 4], [2, 4])
    assert fit(8) == ([0, 2, 4, 6, 8], [2, 4, 6, 8])
    assert fit(10, keep=1) == ([10], [2, 4, 6, 8, 10])


def test_a_command_that_names_nothing_changes_nothing(typed, tmp_path):
    """Whatever its own defaults are; a batch of evaluations that other devices do not divide is rounded up."""
    (tmp_path / "made.py").write_text("from tests.train.toy import toy as recipe\n")
    run = ["train", f"{tmp_path}/made.py:recipe", "--batch", "8", "--run", f"{tmp_path}/run"]
    told = ["--save-every", "2", "--keep", "9", "--keep-best", "eval_loss", "--eval-batch", "6", "--steps", "4"]
    assert typed(*run, *told, "--devices", "2")[0] == 0
    before = Run(tmp_path / "run").config()["may_change"]
    (tmp_path / "run" / "checkpoints" / "00000004" / MANIFEST).unlink()
    assert typed(*run, "--devices", "4")[0] == 0
    assert Run(tmp_path / "run").config()["may_change"] == before | {"devices": "4", "eval_batch": 8}
    code, _, err = typed(*run[:-1], f"{tmp_path}/other", "--devices", "4", "--eval-batch", "6")
    assert code == 2 and "use --eval-batch 8" in " ".join(err.split())


def test_a_damaged_checkpoint_is_passed_over_aloud(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    stopped_run(folder)
    last = checkpoint_folders(folder / "checkpoints")[0]
    (last / MANIFEST).unlink()
    trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    said = capsys.readouterr().err
    assert f"checkpoint {last.name} is damaged" in said and "resumed from the checkpoint of step 7" in said
    assert rows(folder) == rows(whole[0])


def test_a_run_killed_before_its_first_checkpoint_was_whole_starts_again(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    stopped_run(folder)
    *others, first = checkpoint_folders(folder / "checkpoints")
    for each in others:
        shutil.rmtree(each)
    (first / MANIFEST).unlink()
    lines = len(rows(folder))
    trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    assert rows(folder) == rows(whole[0])
    assert f"starting over: no checkpoint was finished; {lines} rows of metrics cut" in capsys.readouterr().err


def test_a_resumed_deterministic_run_is_deterministic(tmp_path, monkeypatch):
    with mock.patch.dict(os.environ):
        stopped_run(tmp_path / "run", deterministic=True)
    asked = []
    monkeypatch.setattr(
        "tpuswarm.train.process.platform.prepare", lambda deterministic=False: asked.append(deterministic)
    )
    trainer().fit(toy.recipe(), run=tmp_path / "run")
    assert asked[0] is True


@pytest.mark.parametrize("lost", ["state/_METADATA", MANIFEST])
def test_when_every_checkpoint_is_damaged_nothing_is_lost(tmp_path, lost):
    folder = tmp_path / "run"
    stopped_run(folder)
    for each in checkpoint_folders(folder / "checkpoints"):
        (each / lost).unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFailed, match="every checkpoint"):
        trainer().fit(toy.recipe(), steps=20, batch=8, run=folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_off_the_main_thread(whole, tmp_path):
    found = []

    def work():
        found.append(trainer().fit(toy.recipe(), steps=20, batch=8, run=tmp_path / "run"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].ended == "finished" and rows(tmp_path / "run") == rows(whole[0])


def test_parameters_of_another_run(whole, tmp_path):
    maker = tmp_path / "made.py"
    maker.write_text("from tests.train.toy import toy\n")
    from tpuswarm.train.user_code import build_recipe

    parent = trainer().fit(build_recipe(f"{maker}:toy", {}), steps=20, batch=8, run=tmp_path / "parent")
    loop = trainer().steps(
        toy.recipe(rate=1e-9), steps=2, batch=8, run=tmp_path / "child", init_from=tmp_path / "parent"
    )
    _, state = next(loop)
    np.testing.assert_allclose(state.params["layer"]["w"], parent.state.params["layer"]["w"], atol=1e-6)
    loop.close()

    def wider(key):
        return {"layer": {"w": jnp.zeros(7), "b": jnp.zeros(())}, "unused": jnp.ones(3)}

    def loss(params, batch, key):
        return params["layer"]["w"].sum()

    other = supervised(wider, loss, optax.sgd(0.1), toy.data())
    with pytest.raises(
        InputError, match=r"a different model: 1 parameters differ, the first layer/w \(\(5,\) there, \(7,\) here"
    ):
        trainer(eval_every=None).fit(other, steps=2, batch=8, run=tmp_path / "other", init_from=tmp_path / "parent")


def test_parameters_of_a_run_whose_recipe_was_built_in_a_program(whole, tmp_path):
    """It ran with Adam's moments and without an average; this one has no moments, an average, and frozen leaves."""
    folder, first = whole
    made = supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)
    child = trainer(ema=0.9, freeze="unused").fit(made, steps=1, batch=8, run=tmp_path / "child", init_from=folder)
    jax.tree.map(np.testing.assert_array_equal, child.state.params["layer"], first.state.params["layer"])
    jax.tree.map(np.testing.assert_allclose, child.state.ema["layer"], first.state.params["layer"])

    def wider(key):
        return {"layer": {"w": jnp.zeros(7)}, "unused": jnp.ones(3)}

    made = supervised(wider, lambda params, batch, key: params["layer"]["w"].sum(), optax.sgd(0.1), toy.data())
    words = r"a different model: 2 parameters differ, the first params/layer/b \(\(\) there, missing here\)"
    with pytest.raises(InputError, match=words):
        trainer(eval_every=None).fit(made, steps=2, batch=8, run=tmp_path / "other", init_from=folder)


def test_a_runs_arrays_without_its_recipe(whole, tmp_path):
    folder, first = whole
    loaded = load(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], first.state.params)
    again = load(folder, like=jax.eval_shape(lambda: first.state))
    jax.tree.map(np.testing.assert_array_equal, again, first.state)
    assert jax.tree.structure(again) == jax.tree.structure(first.state)
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        load(tmp_path)


def test_the_recipes_batch_is_rounded_up_to_the_devices(tmp_path, capsys):
    recipe = toy.recipe()
    recipe.defaults = {"batch": 12, "steps": 2}
    Trainer(save_every="1h").fit(recipe, run=tmp_path / "run")
    assert "batch 16, a multiple of 8 devices" in capsys.readouterr().err
    assert [row["tokens"] for row in rows(tmp_path / "run") if "loss" in row] == [16, 32]


@pytest.mark.parametrize(
    ("options", "fit_options", "words"),
    [
        ({"devices": 9}, {}, "9 devices were asked for"),
        ({"devices": [8]}, {}, "devices: index 8 is out of range"),
        ({"precision": "fp8"}, {}, "precision is bf16, f32 or highest, not 'fp8'"),
        ({"keep": 0}, {}, "keep must be at least 1"),
        ({"save_every": "often"}, {}, "save_every"),
        ({"freeze": "nope"}, {}, "matches none"),
        ({"devices": 8}, {"batch": 12}, "does not divide evenly over devices \\(8\\)"),
        ({}, {"steps": -1}, "steps must be at least 1"),
        ({}, {"epochs": math.nan}, "epochs must be above 0"),
        ({}, {"steps": 5, "epochs": 1}, "one of steps, tokens and epochs"),
    ],
)
def test_wrong_input_leaves_no_run_behind(tmp_path, options, fit_options, words):
    with pytest.raises(InputError, match=words):
        trainer(**options).fit(toy.recipe(), run=tmp_path / "run", **fit_options)
    assert not (tmp_path / "run" / "config.toml").exists()
    Run(tmp_path / "run").close()  # and it is not held


def test_evaluating_without_held_out_data_is_refused_when_asked_for(tmp_path):
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.01), toy.data())
    with pytest.raises(InputError, match="no validation data"):
        trainer().fit(recipe, steps=2, batch=8, run=tmp_path / "run")
    result = trainer(eval_every=None).fit(recipe, steps=2, batch=8, run=tmp_path / "run")
    assert "eval_loss" not in result.metrics


def test_options_that_toml_cannot_hold_are_refused(tmp_path):
    recipe = toy.recipe()
    recipe.options = lambda: {"model": object()}
    with pytest.raises(InputError, match="must be plain values"):
        trainer().fit(recipe, steps=2, batch=8, run=tmp_path / "run")

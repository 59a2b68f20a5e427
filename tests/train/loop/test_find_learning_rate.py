"""The search for a learning rate, and hooks that scale it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.test_own_program import Game
from tests.train.test_own_program import Recipe as GameRecipe
from tpuswarm import Every, InputError, ReduceOnPlateau, ScaleLearningRate, Trainer, load, supervised
from tpuswarm.train.loop import run_config
from tpuswarm.train.loop.find_learning_rate import steepest
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows

CURVATURE = 50.0
RATES = np.geomspace(1e-6, 1.0, 100)


def bowl(schedule=lambda progress: 1e-3, **options):
    """A loss of known curvature: gradient descent diverges from a rate of 2 / CURVATURE on."""

    def loss(params, batch, key):
        return 0.5 * CURVATURE * jnp.sum(jnp.square(params["w"])) + 0 * jnp.mean(batch["y"])

    optimizer = (lambda rate, mask: optax.sgd(rate)) if schedule else optax.sgd(0.1)
    return supervised(lambda key: {"w": jnp.ones(3)}, loss, optimizer, toy.data(), schedule, **options)


def test_found_rate_is_one_that_trains():
    found = Trainer(devices=2).find_lr(bowl(), batch=8)
    assert 0.01 / CURVATURE < found.lr < 2 / CURVATURE
    assert [rate for rate, _ in found.tried] == pytest.approx(list(1e-6 * 1e6 ** (np.arange(len(found.tried)) / 100)))
    assert found.tried[-1][1] > found.tried[0][1] and len(found.tried) < 100  # it stopped when it had grown too large
    # The recipe's batch is rounded up to a multiple of the devices' micro-batches.
    assert Trainer(devices=8, accumulate=2).find_lr(bowl(defaults={"batch": 12})).lr > 0


def test_steepest_is_where_the_curve_falls_fastest():
    losses = 3 - 2 / (1 + np.exp(-3 * (np.log10(RATES) + 3)))  # around 1e-3
    losses[85:] = 50.0
    assert 1e-3 <= steepest(list(zip(RATES, losses, strict=True))) < 1e-2  # smoothing looks back, so it comes later


@pytest.mark.parametrize("losses", [np.full(100, 2.0), np.linspace(1, 1.5, 100), np.full(100, np.nan)])
def test_loss_that_never_falls_is_refused(losses):
    with pytest.raises(InputError, match="does not fall at any learning rate from 1e-06 to 1e"):
        steepest(list(zip(RATES, losses, strict=True)))


@pytest.mark.parametrize(
    ("trainer", "arguments", "words"),
    [
        ({}, {"steps": 0}, "steps must be at least 1"),
        ({}, {"batch": "auto"}, "with a batch in rows"),
        ({"hosts": 2, "host": 0, "hosts_at": "127.0.0.1:1"}, {}, "runs on one host"),
        ({}, {"recipe": bowl(None), "batch": 8}, "has no schedule whose learning rate could be looked for"),
    ],
)
def test_wrong_arguments_are_refused(trainer, arguments, words):
    with pytest.raises(InputError, match=words):
        Trainer(**trainer).find_lr(**{"recipe": bowl()} | arguments)


def scales(folder):
    return [row["total"] for row in read_rows(folder / EVENTS) if row["event"] == "lr_scale"]


def noisy(optimizer=None, schedule=None):
    """Return a recipe whose held-out loss never falls."""

    def loss(params, batch, key):
        return jnp.square(params["w"]).sum() + jnp.square(batch["x"]).mean() if key is not None else jnp.ones(())

    data = {"x": np.ones(8, np.float32)}
    splits = {"train": data, "validation": data}
    return toy.supervised(lambda key: {"w": jnp.ones(3)}, loss, optimizer or optax.sgd(0.1), splits, schedule)


def train_to_plateau(folder, recipe, leave_at=None):
    """Train 12 steps, or leave the loop at a step; return the parameters: gradients are 2 w, so they show the rates."""
    hooks = [Every("evaluation", ReduceOnPlateau(factor=0.5, patience=2))]
    loop = Trainer(devices=1, eval_every=2, save_every=1, hooks=hooks).steps(recipe, steps=12, batch=8, run=folder)
    for step in loop:
        if step.row["step"] == leave_at and "loss" in step.row:
            loop.close()
    return load(folder)["params"]["w"]


def test_learning_rate_falls_on_a_plateau(tmp_path):
    """The first evaluation, at step 2, is the best."""
    found = train_to_plateau(tmp_path / "run", noisy(lambda rate, mask: optax.sgd(rate), lambda step: 0.1))
    np.testing.assert_allclose(found, 0.8**6 * 0.9**4 * 0.95**2, rtol=1e-5)
    assert scales(tmp_path / "run") == [0.5, 0.25]
    rates = [row["lr"] for row in read_rows(tmp_path / "run" / METRICS) if "lr" in row]
    np.testing.assert_allclose(rates, [0.1] * 6 + [0.05] * 4 + [0.025] * 2, rtol=1e-6)


@pytest.mark.parametrize("has_events", [True, False])
def test_fallen_learning_rate_stays_after_a_restart_even_without_the_events(tmp_path, capsys, has_events):
    """The process that resumes counts anew: its first evaluation, at step 8, is its best."""
    run = tmp_path / "run"
    train_to_plateau(run, noisy(), leave_at=7)
    assert scales(run) == [0.5]
    if not has_events:
        (run / EVENTS).unlink()
    np.testing.assert_allclose(train_to_plateau(run, noisy()), 0.8**6 * 0.9**6, rtol=1e-5)
    if has_events:
        assert scales(run) == [0.5, 0.25]
    else:
        assert "its factor is 0.5, as the checkpoint says" in " ".join(capsys.readouterr().err.split())


def test_scale_that_a_later_start_undoes_does_not_count():
    def row(event, step, **more):
        return {"event": event, "step": step, **more}

    events = [row("started", 0), row("lr_scale", 4, total=0.5), row("lr_scale", 8, total=0.1)]
    assert [run_config.lr_scale_after(events, step) for step in (3, 4, 8)] == [1.0, 0.5, 0.1]
    events += [row("started", 5), row("note", 6)]
    assert run_config.lr_scale_after(events, 12) == 0.5


class JittedGame(Game):
    step = jax.jit(Game.step, static_argnums=0)


class JittedGameRecipe(GameRecipe):
    def program(self, options):
        return JittedGame()


SCALES, PLATEAU = Every(2, lambda step: ScaleLearningRate(0.5)), Every("evaluation", ReduceOnPlateau())


@pytest.mark.parametrize(
    ("recipe", "hook"),
    [
        (GameRecipe(), SCALES),
        (JittedGameRecipe(), PLATEAU),
        (noisy(optax.lookahead(optax.sgd(0.1), 5, 0.5)), PLATEAU),
        (noisy(optax.contrib.schedule_free_sgd(0.1)), SCALES),
    ],
)
def test_program_that_ignores_the_scale_is_refused(tmp_path, recipe, hook):
    with pytest.raises(InputError, match="a hook scales the learning rate, but "):
        Trainer(devices=1, eval_every=2, hooks=[hook]).fit(recipe, steps=4, batch=8, run=tmp_path / "run")
    assert hook is SCALES or not (tmp_path / "run").exists(), "refused before the first step"

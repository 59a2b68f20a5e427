"""Gradient descent of own models: complex parameters, schedules, weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, supervised
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.trained import usual_decay

DATA = {"x": np.zeros(8, np.float32)}


def train(recipe, steps):
    """Return the last state and the metrics of each step."""
    program = recipe.program(Options())
    state, step, metrics = program.init(jax.random.key(0)), jax.jit(program.step), []
    for number in range(steps):
        state, found = step(state, DATA, toy.clock(number, number / steps))
        metrics.append(found)
    return state, metrics


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1), optax.sgd(0.1, momentum=0.5)])
def test_complex_parameters_descend(optimizer):
    goal = jnp.array([1 - 2j, 0.5j])

    def loss(params, batch, key):
        return jnp.square(jnp.abs(params["w"] - goal)).sum() + 0 * batch["x"].sum()

    state, metrics = train(supervised(lambda key: {"w": jnp.zeros(2, jnp.complex64)}, loss, optimizer, DATA), 200)
    np.testing.assert_allclose(state.params["w"], goal, atol=0.05)
    assert metrics[0]["loss"] == pytest.approx(5.25) and metrics[-1]["loss"] < 1e-2


def quadratic(params, batch, key):
    return jnp.square(params["w"]).sum() + 0 * batch["x"].sum()


def scheduled(schedule):
    return supervised(lambda key: {"w": jnp.ones(())}, quadratic, lambda rate, mask: optax.sgd(rate), DATA, schedule)


@pytest.mark.parametrize(
    ("schedule", "of_progress"),
    [
        (optax.cosine_decay_schedule(1e-2, 12), False),
        (optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 12), False),
        (optax.exponential_decay(1e-2, 5, 0.5), False),
        (optax.piecewise_constant_schedule(1e-2, {4: 0.1}), False),
        (optax.constant_schedule(1e-2), False),
        (lambda progress: 1e-2 * (1 - progress), True),
        (lambda p: jnp.where(p < 0.5, 1e-2, 1e-3), True),
    ],
)
def test_schedules_of_optax_count_updates_and_others_get_progress(schedule, of_progress):
    _, metrics = train(scheduled(schedule), 12)
    expected = [float(schedule(number / 12 if of_progress else number)) for number in range(12)]
    np.testing.assert_allclose([found["lr"] for found in metrics], expected, rtol=1e-6)


def test_run_with_a_schedule_of_steps_can_become_longer(tmp_path):
    schedule = optax.cosine_decay_schedule(1e-2, 12)
    for steps in (12, 14):
        Trainer(devices=1).fit(scheduled(schedule), steps=steps, batch=8, run=tmp_path / "run")
    rates = [row["lr"] for row in read_rows(tmp_path / "run" / METRICS)]
    np.testing.assert_allclose(rates, [float(schedule(step)) for step in range(14)], rtol=1e-6)


def test_schedule_that_only_moves_with_steps_is_refused():
    inner = optax.cosine_decay_schedule(1e-2, 24)
    with pytest.raises(InputError, match=r"moves from 0\.01 to 0\.009957.*parameter is called `step` or `count`"):
        scheduled(lambda x: inner(x)).program(Options())


def test_matrices_decay_unless_told_otherwise(tmp_path, capsys):
    def init(key):
        layer = {"w": jnp.ones((3, 2)), "b": jnp.ones((4, 2)), "scale": jnp.ones((4, 2)), "vector": jnp.ones(5)}
        return {"layer": layer}

    def flat(params, batch, key):
        return 0 * sum(leaf.sum() for leaf in jax.tree.leaves(params)) + batch["x"].sum()

    def optimizer(rate, mask):
        return optax.adamw(rate, weight_decay=0.5, mask=mask)

    def decayed(folder, **options):
        recipe = supervised(init, flat, optimizer, DATA, lambda progress: 0.1)
        result = Trainer(devices=1, **options).fit(recipe, steps=1, batch=8, run=tmp_path / folder)
        return {name for name, leaf in result.state.params["layer"].items() if np.all(np.asarray(leaf) < 1)}

    assert decayed("usual") == {"w"} and "6 of them in the decay mask" in capsys.readouterr().err
    assert decayed("given", decay="vector|scale") == {"vector", "scale"}


def test_biases_and_scales_of_stacked_layers_do_not_decay():
    """Whatever library named them: Haiku, Flax NNX, PyTorch."""
    names = {"layer/w": True, "layer/b": False, "norm/scale/value": False, "kernel/value": True, "ln.bias": False}
    names |= {"ln.weight": True, "norm/gamma": False}
    found = usual_decay({name: np.ones((4, 2), np.float32) for name in names})
    assert found == names


def noisy_quadratic(params, batch, key):
    noise = 0.0 if key is None else jax.random.normal(key, (2,))
    return jnp.square(params["w"] - jnp.array([1.0, -2.0]) + noise).sum() + 0 * batch["x"].sum()


@pytest.mark.parametrize(
    ("wrap", "freeze"), [(lambda each: each, None), (lambda each: optax.chain(optax.clip(10.0), each), "frozen")]
)
def test_schedule_free_optimizers_are_evaluated_at_their_average(tmp_path, wrap, freeze):
    optimizer = wrap(optax.contrib.schedule_free_sgd(0.2))
    splits = {"train": DATA, "validation": DATA}

    def init(key):
        return {"w": jnp.full(2, 9.0)} | ({"frozen": jnp.ones(3)} if freeze else {})

    recipe = supervised(init, noisy_quadratic, optimizer, splits)
    result = Trainer(devices=1, freeze=freeze).fit(recipe, steps=60, batch=8, run=tmp_path / "run")
    params, opt = result.state.params, result.state.opt[1] if freeze else result.state.opt
    average = optax.contrib.schedule_free_eval_params(opt, {"w": params["w"]} | ({"frozen": None} if freeze else {}))
    at_average, at_training = (
        float(noisy_quadratic({"w": each["w"]}, {"x": jnp.zeros(8)}, None)) for each in (average, params)
    )
    assert result.metrics["eval_loss"] == pytest.approx(at_average, rel=1e-5)
    assert at_average < at_training


def test_schedule_free_part_of_an_optimizer_is_refused(tmp_path):
    parts = {"a": optax.contrib.schedule_free_sgd(0.1), "b": optax.sgd(0.1)}
    optimizer = optax.multi_transform(parts, {"a": "a", "b": "b"})
    recipe = supervised(lambda key: {"a": jnp.ones(2), "b": jnp.ones(2)}, quadratic, optimizer, DATA)
    with pytest.raises(InputError, match="schedule-free optimizer averages all parameters"):
        Trainer(devices=1).fit(recipe, steps=2, batch=8, run=tmp_path / "run")

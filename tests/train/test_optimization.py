"""Optimizers: complex parameters, schedules, weight decay, those with arguments of their own."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, Weighted, supervised
from tpuswarm.train.look.describe import describe_start
from tpuswarm.train.optimizer import default_decay_mask, swarm_obstacle
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows
from tpuswarm.train.supervised_program import inference_params

DATA = {"x": np.zeros(8, np.float32)}


def train(recipe, steps, **options):
    """Return the states before and after each step on the same batch, and the metrics of the steps."""
    program, batch = recipe.program(Options(**options)), recipe.data("train").rows(0, 16)
    step, states, metrics = jax.jit(program.step), [jax.jit(program.init)(jax.random.key(0))], []
    for number in range(steps):
        state, found = step(states[-1], batch, toy.clock(number, number / steps))
        states.append(state)
        metrics.append(found)
    return states, metrics


def losses(metrics):
    return [float(found["loss"]) for found in metrics]


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1), optax.sgd(0.1, momentum=0.5)])
def test_complex_parameters_descend(optimizer):
    goal = jnp.array([1 - 2j, 0.5j])

    def loss(params, batch, key):
        return jnp.square(jnp.abs(params["w"] - goal)).sum() + 0 * batch["x"].sum()

    states, metrics = train(supervised(lambda key: {"w": jnp.zeros(2, jnp.complex64)}, loss, optimizer, DATA), 200)
    np.testing.assert_allclose(states[-1].params["w"], goal, atol=0.05)
    assert metrics[0]["loss"] == pytest.approx(5.25) and metrics[-1]["loss"] < 1e-2


def quadratic(params, batch, key):
    return jnp.square(params["w"]).sum() + 0 * batch["x"].sum()


def scheduled(schedule, rows=8):
    data = {"x": np.zeros(rows, np.float32)}
    return supervised(lambda key: {"w": jnp.ones(())}, quadratic, lambda rate, mask: optax.sgd(rate), data, schedule)


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
    compiled = jax.jit(schedule)  # operation by operation, 1 + cos may differ in its last digit
    expected = [float(compiled(number / 12 if of_progress else number)) for number in range(12)]
    np.testing.assert_allclose([found["lr"] for found in metrics], expected, rtol=1e-6)


def test_schedule_of_epochs_counts_passes_over_the_data():
    _, metrics = train(scheduled(lambda epoch: 1e-2 / (1 + epoch)), 3)  # a step is two passes: 16 rows of 8
    np.testing.assert_allclose([found["lr"] for found in metrics], [1e-2, 1e-2 / 3, 1e-2 / 5], rtol=1e-6)


@pytest.mark.parametrize("steps_per_epoch", [41, 47, 12.5])
def test_epoch_begins_after_the_steps_of_whole_epochs(steps_per_epoch):
    recipe = scheduled(lambda epoch: jnp.floor(epoch), int(16 * steps_per_epoch))
    program, batch = recipe.program(Options()), recipe.data("train").rows(0, 16)
    state, step = program.init(jax.random.key(0)), jax.jit(program.step)
    for number in filter(lambda step: step % steps_per_epoch == 0, range(300)):
        assert step(state, batch, toy.clock(number, 0.0))[1]["lr"] == number / steps_per_epoch


def with_step_size(step_size):
    """A transformation of somebody else, with a variable that is called as those of optax are."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -g, updates), (state, step_size)

    return optax.GradientTransformation(lambda params: (), update)


WARMUP = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 100, 1_000, 1e-4)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "rate"),
    [
        (optax.adamw(3e-4, mask=default_decay_mask), None, "0.0003"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), None, "0.1"),
        (optax.adam(WARMUP), None, "0 to 0.01 after 10% of the run, then to 0.0001"),
        (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(WARMUP), optax.scale(-1.0)), None,
         "0 to 0.01 after 10% of the run, then to 0.0001"),
        (None, WARMUP, "0 to 0.01 after 10% of the run, then to 0.0001"),
        (None, lambda progress: 1e-2 * (1 - progress), "0.01 to 0 over the run"),
        (None, lambda epoch: 1e-2 / (1 + epoch), "0.01 to 0.0025 over the run"),
        (optax.partition({"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, "a"), None, ""),
        (optax.masked(optax.sgd(0.1), default_decay_mask), None, ""),
        (optax.lbfgs(), None, ""),
        (with_step_size({"w": 1.0}), None, ""),
        (with_step_size(lambda step: missing), None, ""),  # noqa: F821
        (optax.MultiSteps(optax.sgd(0.1), 2), None, ""),
    ],
)  # fmt: skip
def test_settings_tell_the_learning_rate_where_the_optimizer_does(optimizer, schedule, rate):
    data = {"x": np.zeros(3_000, np.float32)}
    recipe = supervised(lambda key: {}, quadratic, optimizer or (lambda rate, mask: optax.sgd(rate)), data, schedule)
    about = describe_start(recipe, {"steps": 1_000, "batch": 9, "precision": "f32"}, 1, "", recipe.data("train"), 0)
    assert about["settings"] == f"9 rows a step{', learning rate ' * bool(rate)}{rate}, f32"


def test_run_with_a_schedule_of_steps_can_become_longer(tmp_path):
    schedule = optax.cosine_decay_schedule(1e-2, 12)
    for steps in (12, 14):
        Trainer(devices=1).fit(scheduled(schedule), steps=steps, batch=8, run=tmp_path / "run")
    rates = [row["lr"] for row in read_rows(tmp_path / "run" / METRICS)]
    compiled = jax.jit(schedule)
    np.testing.assert_allclose(rates, [float(compiled(step)) for step in range(14)], rtol=1e-6)


def test_schedule_that_only_moves_with_steps_is_refused():
    inner = optax.cosine_decay_schedule(1e-2, 24)
    with pytest.raises(InputError, match=r"goes from 0\.01 to 0\.009957.*call its parameter `step` or `count`"):
        scheduled(lambda x: inner(x)).program(Options())


def test_matrices_decay_unless_told_otherwise(tmp_path):
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

    def log(folder):
        rows = read_rows(tmp_path / folder / EVENTS)
        return next(row["message"] for row in rows if row["event"] == "parameters")

    assert decayed("usual") == {"w"}
    assert "6 of them in the decay mask" in log("usual") and "MiB optimizer + " in log("usual")
    assert decayed("given", decay="vector|scale", ema=0.9) == {"vector", "scale"}
    assert "MiB optimizer and average + " in log("given")


def test_biases_and_scales_of_stacked_layers_do_not_decay():
    """Names of Haiku, Flax NNX and PyTorch."""
    names = {"layer/w": True, "layer/b": False, "norm/scale/value": False, "kernel/value": True, "ln.bias": False}
    names |= {"ln.weight": True, "norm/gamma": False}
    found = default_decay_mask({name: np.ones((4, 2), np.float32) for name in names})
    assert found == names


def noisy_quadratic(params, batch, key):
    noise = 0.0 if key is None else jax.random.normal(key, (2,))
    return jnp.square(params["w"] - jnp.array([1.0, -2.0]) + noise).sum() + 0 * batch["x"].sum()


@pytest.mark.parametrize(
    ("wrap", "freeze"), [(lambda inner: inner, None), (lambda inner: optax.chain(optax.clip(10.0), inner), "frozen")]
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
        float(noisy_quadratic({"w": point["w"]}, {"x": jnp.zeros(8)}, None)) for point in (average, params)
    )
    assert result.metrics["eval_loss"] == pytest.approx(at_average, rel=1e-5)
    assert at_average < at_training


def test_schedule_free_part_of_an_optimizer_is_refused(tmp_path):
    parts = {"a": optax.contrib.schedule_free_sgd(0.1), "b": optax.sgd(0.1)}
    optimizer = optax.multi_transform(parts, {"a": "a", "b": "b"})
    recipe = supervised(lambda key: {"a": jnp.ones(2), "b": jnp.ones(2)}, quadratic, optimizer, DATA)
    with pytest.raises(InputError, match="schedule-free optimizer must average all trained parameters"):
        Trainer(devices=1).fit(recipe, steps=2, batch=8, run=tmp_path / "run")


RATE = 3e-3


def test_rate_that_follows_the_loss_falls_on_a_plateau():
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    states, _ = train(supervised(toy.init, toy.loss, optimizer, toy.data()), 9)
    assert float(optax.tree.get(states[-1].opt, "scale")) == pytest.approx(0.5**4)


def summed_loss(params, batch, key):
    loss, metrics = toy.loss(params, batch, key)
    return Weighted(loss * len(batch["y"]), len(batch["y"])), metrics


@pytest.mark.parametrize(("loss", "accumulate"), [(toy.loss, 1), (summed_loss, 4)])
def test_line_search_sees_the_loss_of_the_whole_batch(loss, accumulate):
    """L-BFGS solves a least-squares problem of 6 unknowns in a few steps."""
    recipe = supervised(toy.init, loss, optax.lbfgs(), toy.data())
    found = losses(train(recipe, 12, accumulate=accumulate, freeze="unused")[1])
    assert found[-1] < 1e-6 * found[0] and found == sorted(found, reverse=True)


ASCENT = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
STEPS = 5


def train_by_hand(optimizer, params, extra_args=lambda loss: {}):
    """Return the parameters after STEPS steps on the batch of `train`, in a loop as optax documents it."""
    batch, state = toy.recipe().data("train").rows(0, 16), optimizer.init(params)

    def loss(params):
        return toy.loss(params, batch, None)[0]

    for _ in range(STEPS):
        grads = jax.grad(loss)(getattr(params, "fast", params))
        updates, state = optimizer.update(grads, state, params, **extra_args(loss))
        params = optax.apply_updates(params, updates)
    return params


def train_supervised(optimizer, **options):
    recipe = supervised(toy.init, toy.loss, optimizer, toy.splits)
    return train(recipe, STEPS, **options)[0]


def assert_close(params, wanted):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5), params, wanted)


@pytest.mark.parametrize(
    ("optimizer", "extra_args"),
    [
        (optax.contrib.sam(optax.sgd(0.1), ASCENT), lambda loss: {}),
        (
            optax.chain(optax.identity(), optax.contrib.sam(optax.sgd(0.1), ASCENT, opaque_mode=True)),
            lambda loss: {"grad_fn": lambda params, _: jax.grad(loss)(params)},
        ),
        (optax.contrib.sophia(0.1), lambda loss: {"obj_fn": loss}),
        (optax.MultiSteps(optax.adam(0.1), 2), lambda loss: {}),
    ],
    ids=["sam", "opaque sam in a chain", "sophia", "MultiSteps"],
)
def test_optimizer_trains_as_in_the_loop_of_its_documentation(optimizer, extra_args):
    states = train_supervised(optimizer)
    assert_close(states[-1].params, train_by_hand(optimizer, states[0].params, extra_args))


def test_lookahead_trains_fast_parameters_and_evaluates_slow_ones():
    optimizer = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    states = train_supervised(optimizer, freeze="unused")
    wanted = train_by_hand(optimizer, optax.LookaheadParams.init_synced(states[0].params))
    assert_close(states[-1].params, wanted.fast)
    assert_close(inference_params(states[-1]), wanted.slow)


def test_sam_is_evaluated_at_the_parameters_of_its_updates():
    """After an odd number of steps the parameters are at the ascended point."""
    states = train_supervised(optax.contrib.sam(optax.sgd(0.1), ASCENT))
    assert_close(inference_params(states[1]), states[0].params)
    assert_close(inference_params(states[2]), states[2].params)
    averaged = train_supervised(optax.contrib.sam(optax.sgd(0.1), ASCENT), ema=0.5)
    assert_close(averaged[1].ema, states[0].params)


def test_clip_holds_for_gradients_that_an_optimizer_computes():
    """The optimizer of SAM sees only the gradient at the ascended parameters, which `grad_fn` gives."""
    before, after = train_supervised(optax.contrib.sam(optax.sgd(1.0), ASCENT, opaque_mode=True), clip=0.1)[:2]
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, before.params, after.params))
    assert float(moved) == pytest.approx(0.1, rel=1e-4)


def needs_temperature(updates, state, params=None, *, temperature):
    return updates, state


def fails(updates, state, params=None):
    raise ValueError("my own mistake")


EMPTY = optax.init_empty_state


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0), "dpsgd needs the gradient of each row"),
        (
            optax.GradientTransformationExtraArgs(EMPTY, needs_temperature),
            "optimizer fails.*'temperature'.*ion.py:",
        ),
        (optax.GradientTransformation(EMPTY, fails), r"optimizer fails: ValueError: my own mistake \(.*ion.py:"),
        (
            optax.GradientTransformation(lambda params: {}["a"], fails),
            r"optimizer fails: KeyError: 'a' \(.*ion.py:",
        ),
    ],
)
def test_optimizer_that_cannot_work_is_refused_by_name(optimizer, words):
    def vector_loss(params, batch, key):  # dpsgd would take the entries of its only parameter as rows
        return jnp.mean(batch["x"] @ params)

    with pytest.raises(InputError, match=words):
        train(supervised(lambda key: jnp.zeros(5), vector_loss, optimizer, toy.data()), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rate, decay_mask: None, "returned a NoneType: return an optax.*ion.py:"),
        (lambda rate, decay_mask: optax.adam(rte=rate), "fails: TypeError.*rte.*ion.py:"),
    ],
)
def test_function_that_makes_no_optimizer_is_refused_with_its_line(make, words):
    with pytest.raises(InputError, match=r"optimizer\(learning_rate, decay_mask\) " + words):
        train(toy.recipe(make), 1)


def test_parameters_in_the_form_of_lookahead_are_refused_with_the_way_out():
    def init(key):
        return optax.LookaheadParams.init_synced(toy.init(key))

    with pytest.raises(InputError, match=r"init returned optax\.LookaheadParams: return the parameters"):
        train(supervised(init, toy.loss, optax.lookahead(optax.adam(0.1), 5, 0.5), toy.data()), 1)


def optimizers(rate):
    """Yield each optimizer of optax that has a learning rate, by name."""
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(make).parameters
            if "learning_rate" in parameters and name not in ("optimistic_adam", "dpsgd"):  # refuse schedules; refused
                required = {
                    other: 0.1 for other, parameter in parameters.items()
                    if parameter.default is parameter.empty and other != "learning_rate"
                }  # fmt: skip
                try:
                    yield name, make(rate, **{other: value for other, value in required.items() if other != "kwargs"})
                except (AttributeError, TypeError, ValueError):  # takes numbers alone, or other optimizers
                    continue


@pytest.mark.filterwarnings("ignore:.*seed.* is deprecated", "ignore:Specifying a key will be required")
def test_swarm_refuses_each_optimizer_with_a_schedule_and_no_other():
    params, found = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, {}
    for kind, rate in ("schedule", optax.cosine_decay_schedule(1e-2, 24)), ("number", 1e-2):
        for name, optimizer in optimizers(rate):
            for wrapped in (optimizer, optax.chain(optax.clip(1.0), optimizer)):
                try:
                    state = wrapped.init(params)
                except (TypeError, ValueError):
                    continue
                found.setdefault((name, kind), set()).add("schedule" in swarm_obstacle(wrapped, state))
    taken = {name for (name, kind), refused in found.items() if kind == "schedule" and refused != {True}}
    refused = {name for (name, kind), refused in found.items() if kind == "number" and refused != {False}}
    assert len(found) > 60 and not taken and refused <= {"noisy_sgd"}, (taken, refused)  # its noise fades

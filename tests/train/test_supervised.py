"""Every option of `supervised`, against arithmetic done by hand in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import ArraySource, Weighted
from tpuswarm.errors import InputError
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options
from tpuswarm.train.supervised import inference_params, supervised

CLOCK = Clock(jax.random.key(0), np.int32(0), np.float32(0.25))
BATCH = {name: array[:16] for name, array in toy.data().items()}
RATE = 0.05 * 0.75


def one_step(optimizer=toy.sgd, **options):
    program = toy.recipe(optimizer).program(Options(**options))
    state = program.init(jax.random.key(3))
    after, metrics = jax.jit(program.step)(state, BATCH, CLOCK)
    return state, after, metrics


def gradient_by_hand(params):
    w, b = np.asarray(params["layer"]["w"], np.float64), float(params["layer"]["b"])
    error = BATCH["x"] @ w + b - BATCH["y"]
    return {"w": 2 * BATCH["x"].T @ error / 16, "b": 2 * error.mean()}, (error**2).mean()


def test_one_step_is_gradient_descent_at_the_scheduled_rate():
    before, after, metrics = one_step()
    grads, loss = gradient_by_hand(before.params)
    norm = np.sqrt((grads["w"] ** 2).sum() + grads["b"] ** 2)
    np.testing.assert_allclose(after.params["layer"]["w"], before.params["layer"]["w"] - RATE * grads["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["lr"], RATE, rtol=1e-6)
    assert "worst" in metrics


@pytest.mark.parametrize("count", [2, 4, 16])
def test_micro_batches_have_the_gradient_of_the_whole_batch(count):
    _, whole, metrics = one_step()
    _, split, split_metrics = one_step(accumulate=count)
    np.testing.assert_allclose(split.params["layer"]["w"], whole.params["layer"]["w"], rtol=1e-5)
    np.testing.assert_allclose(split_metrics["loss"], metrics["loss"], rtol=1e-5)


def masked(params, batch, key):
    error = jnp.square(batch["x"] @ params["w"] - batch["y"]) * batch["counts"]
    right = Weighted(((error < 1) * batch["counts"]).sum(), batch["counts"].sum())
    return Weighted(error.sum(), batch["counts"].sum()), {"right": right, "largest": error.max()}


def masked_data():
    """Rows that mostly do not count, and those that do are not spread evenly over micro-batches, devices, batches."""
    counts = np.zeros(toy.ROWS, np.float32)
    counts[[0, 1, 2, 3, 5, 8, 40]] = 1
    return toy.data() | {"counts": counts}


@pytest.mark.parametrize("opted", [False, True])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_weighted_loss_is_that_of_the_whole_batch_for_any_split(count, opted, devices):
    data = masked_data()
    batch = {name: array[:16] for name, array in data.items()}
    recipe = supervised(lambda key: {"w": jnp.ones(5)}, masked, optax.sgd(1.0), data, micro_batches=opted)
    compiled = compile_step(recipe, Request(batch=16, accumulate=count), devices[: 16 // count])
    before = compiled.init(jax.random.key(0))
    after, metrics = compiled.step(before, batch, CLOCK)
    x, chosen = batch["x"].astype(np.float64), batch["counts"]
    error = (x.sum(1) - batch["y"]) * chosen
    np.testing.assert_allclose(metrics["loss"], (error**2).sum() / chosen.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["right"], ((error**2 < 1) * chosen).sum() / chosen.sum(), rtol=1e-5)
    np.testing.assert_allclose(after.params["w"], 1 - 2 * error @ x / chosen.sum(), rtol=1e-4)


def test_nothing_that_counts_is_no_step():
    recipe = supervised(lambda key: {"w": jnp.ones(5)}, masked, optax.sgd(1.0), masked_data())
    program = recipe.program(Options(accumulate=2))
    batch = {name: array[48:] for name, array in masked_data().items()}
    after, metrics = program.step(program.init(jax.random.key(0)), batch, CLOCK)
    assert metrics["loss"] == metrics["right"] == metrics["grad_norm"] == 0
    np.testing.assert_array_equal(after.params["w"], np.ones(5))


def test_clipping_limits_the_norm_and_leaves_small_gradients_alone():
    before, after, metrics = one_step(clip=0.5)
    moved = jax.tree.map(lambda a, b: (a - b) / RATE, before.params, after.params)
    np.testing.assert_allclose(optax.tree.norm(moved), 0.5, rtol=1e-4)
    assert metrics["grad_norm"] > 0.5  # what is reported is before the clipping
    _, free, _ = one_step()
    _, loose, _ = one_step(clip=1e6)
    np.testing.assert_array_equal(free.params["layer"]["w"], loose.params["layer"]["w"])


def test_a_frozen_leaf_stays_and_has_no_optimizer_state():
    before, after, _ = one_step(toy.adam, freeze="layer/w|unused")
    np.testing.assert_array_equal(before.params["layer"]["w"], after.params["layer"]["w"])
    assert after.params["layer"]["b"] != before.params["layer"]["b"]
    assert {leaf.shape for leaf in jax.tree.leaves(after.opt)} == {()}  # nothing of w's or unused's shape


def test_decay_touches_only_what_it_names():
    before, after, _ = one_step(decay="unused")
    np.testing.assert_allclose(after.params["unused"], before.params["unused"] * (1 - RATE * 0.1), rtol=1e-6)
    plain = one_step()[1]
    np.testing.assert_array_equal(plain.params["unused"], before.params["unused"])
    np.testing.assert_array_equal(plain.params["layer"]["w"], after.params["layer"]["w"])


def test_ema_is_the_moving_average_of_trained_leaves_and_is_what_is_evaluated():
    before, after, _ = one_step(ema=0.9, freeze="unused")
    wanted = 0.9 * np.asarray(before.params["layer"]["w"]) + 0.1 * np.asarray(after.params["layer"]["w"])
    np.testing.assert_allclose(after.ema["layer"]["w"], wanted, rtol=1e-6)
    assert after.ema["unused"] is None
    np.testing.assert_array_equal(inference_params(after)["layer"]["w"], after.ema["layer"]["w"])
    np.testing.assert_array_equal(inference_params(after)["unused"], after.params["unused"])
    program = toy.recipe(toy.sgd).program(Options(ema=0.9, freeze="unused"))
    direct, _ = toy.loss(inference_params(after), BATCH, None)
    np.testing.assert_allclose(program.evaluate(after, BATCH)["loss"], direct, rtol=1e-6)


def test_the_average_of_parameters_in_bf16_moves():
    """A thousandth of a step is less than one of bfloat16's digits."""
    made = supervised(lambda key: {"w": jnp.ones(5, jnp.bfloat16)}, halves, optax.sgd(0.5), toy.splits)
    program = made.program(Options(ema=0.999))
    before = program.init(jax.random.key(0))
    after, _ = jax.jit(program.step)(before, BATCH, CLOCK)
    assert after.params["w"].dtype == jnp.bfloat16 and float(after.params["w"][0]) == 0.5
    np.testing.assert_allclose(after.ema["w"], np.full(5, 0.9995), rtol=1e-6)


def halves(params, batch, key):
    return params["w"].astype(jnp.float32).sum() + 0 * batch["x"].sum()


def matmuls(precision):
    program = toy.recipe(cast="x").program(Options(precision=precision))
    state = jax.eval_shape(program.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(program.step)(state, BATCH, CLOCK)
    return [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"], state


def test_precisions_are_seen_in_the_program():
    for precision, dtype in (("f32", jnp.float32), ("highest", jnp.float32), ("bf16", jnp.bfloat16)):
        found, state = matmuls(precision)
        assert found and all(eqn.invars[0].aval.dtype == dtype for eqn in found)
        exact = (jax.lax.Precision.HIGHEST,) * 2
        assert all((eqn.params["precision"] == exact) == (precision == "highest") for eqn in found)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("cast", [(), "x", ["x"]])
def test_bf16_leaves_targets_as_they_are_and_casts_the_inputs_that_are_named(cast):
    data = toy.data() | {"y": np.linspace(100, 101, toy.ROWS, dtype=np.float32)}
    seen = {}

    def loss(params, batch, key):
        seen.update(params | {name: array.dtype for name, array in batch.items()})
        return jnp.mean(jnp.square(batch["y"] - 0 * params["w"].sum())), {"largest": batch["y"].max()}

    made = supervised(lambda key: {"w": jnp.ones(5)}, loss, optax.sgd(0.1), data, cast=cast)
    program = made.program(Options(precision="bf16"))
    metrics = program.evaluate(program.init(jax.random.key(0)), data)
    assert seen["y"] == jnp.float32 and seen["x"] == (jnp.bfloat16 if cast else jnp.float32)
    assert seen["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(metrics["largest"], np.float32(101))
    np.testing.assert_allclose(metrics["loss"], np.square(data["y"], dtype=np.float64).mean(), rtol=1e-6)


def test_parameters_that_stay_float32_are_named_by_their_path():
    """With a last layer in float32 sums of many small logits keep their digits, and gradients are float32 anyway."""
    seen = {}

    def loss(params, batch, key):
        seen.update({name: leaf.dtype for name, leaf in params.items()})
        h = batch["x"] @ params["w"]
        seen["h"], seen["out"] = h.dtype, (h @ params["head"]).dtype
        return jnp.square((h * jnp.broadcast_to(params["norm"], h.shape)) @ params["head"] - batch["y"]).mean()

    def init(key):
        return {"w": jnp.ones((5, 3)), "norm": jnp.ones(3), "head": jnp.ones(3)}

    made = supervised(init, loss, optax.sgd(0.01), toy.data(), cast="x", float32="norm|head")
    batch = made.data("train").rows(0, 8)
    for precision, narrow in (("bf16", jnp.bfloat16), ("f32", jnp.float32)):
        program = made.program(Options(precision=precision))
        state = program.init(jax.random.key(0))
        program.step(state, batch, Clock(jax.random.key(0), 0, 0.0))
        assert seen["w"] == seen["h"] == narrow and seen["norm"] == seen["head"] == seen["out"] == jnp.float32
        wrong = supervised(init, loss, optax.sgd(0.01), toy.data(), float32="nrom").program(
            Options(precision=precision)
        )
        with pytest.raises(InputError, match="float32 'nrom' matches none of the parameters: head, norm, w"):
            wrong.step(state, batch, Clock(jax.random.key(0), 0, 0.0))


@pytest.mark.parametrize(
    ("cast", "words"),
    [("xx", "cast names xx, which the data has not; did you mean x"), ("n", "n, which is int32: only float32")],
)
def test_only_float32_inputs_can_be_cast(cast, words):
    data = toy.data() | {"n": np.arange(toy.ROWS, dtype=np.int32)}
    with pytest.raises(InputError, match=words):
        supervised(toy.init, toy.loss, optax.sgd(0.1), data, cast=cast).program(Options())


def test_a_product_that_takes_one_dtype_only_names_the_input_to_cast():
    def loss(params, batch, key):
        x = jax.lax.conv_general_dilated(batch["x"][:, None], params["w"], (1,), "SAME")
        return jnp.mean(jnp.square(x - batch["y"][:, None, None]))

    program = supervised(lambda key: {"w": jnp.ones((1, 1, 3))}, loss, optax.sgd(0.1), toy.data()).program(
        Options(precision="bf16")
    )
    with pytest.raises(TypeError, match=r"x and y of the batch stay float32 without cast=\['x', 'y'\]"):
        program.evaluate(program.init(jax.random.key(0)), toy.data())


def test_randomness_follows_key_and_step_alone():
    def noisy(params, batch, key):
        return params["w"].sum() * jax.random.normal(key)

    recipe = supervised(lambda key: {"w": jnp.ones(2)}, noisy, optax.sgd(0.1), toy.data())
    program = recipe.program(Options())
    state = program.init(jax.random.key(0))

    def loss_at(seed, step):
        clock = Clock(jax.random.key(seed), np.int32(step), np.float32(0))
        return float(program.step(state, BATCH, clock)[1]["loss"])

    assert loss_at(0, 5) == loss_at(0, 5)
    assert len({loss_at(seed, step) for seed in range(3) for step in range(3)}) == 9


def test_a_ready_optimizer_brings_its_own_rate():
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), toy.data())
    program = recipe.program(Options())
    state = program.init(jax.random.key(3))
    after, metrics = program.step(state, BATCH, CLOCK)
    grads, _ = gradient_by_hand(state.params)
    np.testing.assert_allclose(after.params["layer"]["b"], -0.1 * grads["b"], rtol=1e-5)
    assert "lr" not in metrics
    with pytest.raises(InputError, match="decay needs"):
        recipe.program(Options(decay="w"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"freeze": "no_such_leaf"}, "freeze 'no_such_leaf' matches none"),
        ({"freeze": "("}, "not a regular expression"),
        ({"freeze": ".*"}, "freeze .* matches every parameter: nothing is left to train"),
        ({"ema": 1.5}, "ema must be above 0 and below 1"),
        ({"clip": -1.0}, "clip must be above 0"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        program = toy.recipe().program(Options(**options))
        jax.eval_shape(program.init, jax.random.key(0))


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [(optax.adam, None), (optax.sgd(0.1), lambda progress: 0.1), ("adam", lambda progress: 0.1)],
)
def test_optimizers_that_are_none_are_refused(optimizer, schedule):
    with pytest.raises(InputError, match="optimizer is a ready optax transformation"):
        supervised(toy.init, toy.loss, optimizer, toy.data(), schedule).program(Options())


def test_integer_parameters_are_refused_by_name():
    program = supervised(lambda key: {"n": jnp.arange(3)}, toy.loss, optax.sgd(0.1), toy.data()).program(Options())
    with pytest.raises(InputError, match="parameter n is int32"):
        program.init(jax.random.key(0))


def test_data_is_asked_for_once_a_split():
    asked = []
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), lambda split: asked.append(split) or toy.data())
    recipe.program(Options())
    recipe.data("train"), recipe.data("train"), recipe.data("validation")
    assert asked == ["train", "validation"]


def test_data_may_be_a_dict_of_splits():
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), {"train": toy.data(0), "validation": toy.data(1)})
    assert recipe.data("validation").digest == ArraySource(toy.data(1)).digest
    with pytest.raises(InputError, match="has no all data"):
        recipe.data("all")


def rows():
    yield toy.data()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((toy.data()["x"], toy.data()["y"]), "the train data of toy is a tuple: give a dict of arrays"),
        (rows(), "the train data of toy is a generator: give a dict of arrays"),
        ({"in": {"x": np.ones(4)}, "y": np.ones(4)}, "a dict under in: a batch is one dict of arrays, without dicts"),
        ({"x": [[1], [1, 2]]}, "x of the data is no array: setting an array element with a sequence"),
        ({"x": np.ones(4), "n": 4}, r"n of the data is a int \(int64\): a batch is one dict of arrays of numbers"),
        ({"x": ["a", "b"]}, r"x of the data is a list \(<U1\)"),
    ],
)
def test_data_of_another_form_is_refused_in_words(data, words):
    with pytest.raises(InputError, match=words):
        supervised(toy.init, toy.loss, optax.sgd(0.1), data).data("train")


def test_the_average_of_bfloat16_parameters_moves():
    """By a thousandth a step, which is below bfloat16's resolution."""
    recipe = supervised(
        lambda key: {"w": jnp.ones(5, jnp.bfloat16)},
        lambda params, batch, key: params["w"].astype(jnp.float32).sum(),
        optax.sgd(1.0),
        toy.data(),
    )
    program = recipe.program(Options(ema=0.999))
    state, _ = program.step(program.init(jax.random.key(0)), BATCH, CLOCK)
    np.testing.assert_allclose(state.ema["w"], 0.999, rtol=1e-6)
    assert inference_params(state)["w"].dtype == jnp.bfloat16


def test_a_state_around_given_parameters_starts_its_average_with_them():
    program = toy.recipe().program(Options(ema=0.999))
    given = jax.tree.map(lambda leaf: leaf + 7, program.init(jax.random.key(0)).params)
    state = program.init(jax.random.key(1), given)
    for got in (state.params, state.ema):
        jax.tree.map(np.testing.assert_array_equal, got, given)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda params, batch, key: batch["x"] @ params["w"], r"the loss has shape \(16,\), it must be a scalar"),
        (lambda params, batch, key: None, r"the loss is a NoneType: a loss returns a scalar, or \(scalar, dict"),
        (lambda params, batch, key: (jnp.sum(params["w"]), 1, 2), "the loss is a tuple"),
        (lambda params, batch, key: (jnp.sum(params["w"]), [1]), "the loss is a tuple"),
        (lambda params, batch, key: (jnp.sum(params["w"]), {"best": [1]}), "best is a list"),
        (lambda params, batch, key: (params["w"].sum(), {"all": params["w"]}), r"all has shape \(5,\)"),
        (lambda params, batch, key: (params["w"].sum(), {"step": params["w"].sum()}), "cannot be called step"),
    ],
)
def test_losses_that_are_no_scalars_are_refused(loss, words):
    program = supervised(lambda key: {"w": jnp.ones(5)}, loss, optax.sgd(0.1), toy.data()).program(Options())
    with pytest.raises(InputError, match=words):
        program.step(program.init(jax.random.key(0)), BATCH, CLOCK)


def test_a_recipe_refuses_what_it_does_not_honour():
    Options(platform="gpu", precision="bf16", remat="full").require_only("clip", by="thing")  # defaults, choices
    with pytest.raises(InputError, match="thing does not support ema"):
        Options(ema=0.9).require_only("clip", by="thing")


def test_loss_passes_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        program = toy.recipe().program(Options(clip=1.0, ema=0.9, accumulate=2, decay="w"))
        state = jax.eval_shape(program.init, jax.random.key(0))
        jax.eval_shape(program.step, state, BATCH, CLOCK)


def test_wishes_for_a_run_are_settings_of_a_run():
    wishes = {"steps": 7, "batch": 16}
    assert supervised(toy.init, toy.loss, optax.sgd(0.1), toy.data(), defaults=wishes).defaults == wishes
    with pytest.raises(InputError, match=r"defaults takes no step; did you mean steps\?"):
        supervised(toy.init, toy.loss, optax.sgd(0.1), toy.data(), defaults={"step": 7})

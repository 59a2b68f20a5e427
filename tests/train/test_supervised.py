"""Every option of `supervised`, against arithmetic by hand in NumPy; what cannot work is refused in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import ArraySource, EarlyStopping, Every, IndexedSource, InputError, Trainer, Weighted, supervised
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.directory import Run
from tpuswarm.train.supervised_program import inference_params

CLOCK = toy.clock(progress=0.25)
BATCH = {name: array[:16] for name, array in toy.data().items()}
RATE = 0.05 * 0.75


def recipe_of(init=lambda key: {"w": jnp.ones(5)}, loss=toy.loss, optimizer=optax.sgd(0.1), data=None, **options):  # noqa: B008
    return supervised(init, loss, optimizer, toy.data() if data is None else data, **options)


def run_step(program, batch=BATCH):
    state = program.init(jax.random.key(3))
    return state, *jax.jit(program.step)(state, batch, CLOCK)


def toy_step(optimizer=toy.sgd, **options):
    return run_step(toy.recipe(optimizer).program(Options(**options)))


@pytest.fixture(scope="module")
def plain():
    return toy_step()


def gradient_by_hand(params):
    w, b = np.asarray(params["layer"]["w"], np.float64), float(params["layer"]["b"])
    error = BATCH["x"] @ w + b - BATCH["y"]
    return {"w": 2 * BATCH["x"].T @ error / 16, "b": 2 * error.mean()}, (error**2).mean()


def test_step_is_gradient_descent_at_the_scheduled_rate(plain):
    before, after, metrics = plain
    grads, loss = gradient_by_hand(before.params)
    norm = np.sqrt((grads["w"] ** 2).sum() + grads["b"] ** 2)
    np.testing.assert_allclose(after.params["layer"]["w"], before.params["layer"]["w"] - RATE * grads["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["lr"], RATE, rtol=1e-6)
    assert "worst" in metrics


def masked(params, batch, key):
    error = jnp.square(batch["x"] @ params["w"] - batch["y"]) * batch["counts"]
    right = Weighted(((error < 1) * batch["counts"]).sum(), batch["counts"].sum())
    return Weighted(error.sum(), batch["counts"].sum()), {"right": right, "largest": error.max()}


def masked_data():
    """Few rows count, and unevenly many in micro-batches, devices and batches."""
    counts = np.zeros(toy.ROWS, np.float32)
    counts[[0, 1, 2, 3, 5, 8, 40]] = 1
    return toy.data() | {"counts": counts}


@pytest.mark.parametrize(("count", "micro_batches"), [(1, False), (2, False), (2, True), (16, True)])
def test_weighted_loss_is_that_of_the_whole_batch_for_any_split(count, micro_batches, devices):
    batch = {name: array[:16] for name, array in masked_data().items()}
    recipe = recipe_of(loss=masked, optimizer=optax.sgd(1.0), data=masked_data(), micro_batches=micro_batches)
    compiled = compile_step(recipe, Request(batch=16, accumulate=count), devices[: 16 // count])
    after, metrics = compiled.step(compiled.init(jax.random.key(0)), batch, CLOCK)
    x, chosen = batch["x"].astype(np.float64), batch["counts"]
    error = (x.sum(1) - batch["y"]) * chosen
    np.testing.assert_allclose(metrics["loss"], (error**2).sum() / chosen.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["right"], ((error**2 < 1) * chosen).sum() / chosen.sum(), rtol=1e-5)
    np.testing.assert_allclose(after.params["w"], 1 - 2 * error @ x / chosen.sum(), rtol=1e-4)


def test_clipping_limits_the_norm_and_keeps_small_gradients(plain):
    before, after, metrics = toy_step(clip=0.5)
    moved = jax.tree.map(lambda a, b: (a - b) / RATE, before.params, after.params)
    np.testing.assert_allclose(optax.tree.norm(moved), 0.5, rtol=1e-4)
    assert metrics["grad_norm"] > 0.5  # the norm before clipping is reported
    _, loose, _ = toy_step(clip=1e6)
    np.testing.assert_array_equal(plain[1].params["layer"]["w"], loose.params["layer"]["w"])


def test_frozen_leaf_stays_and_has_no_optimizer_state():
    before, after, _ = toy_step(toy.adam, freeze="layer/w|unused")
    np.testing.assert_array_equal(before.params["layer"]["w"], after.params["layer"]["w"])
    assert after.params["layer"]["b"] != before.params["layer"]["b"]
    assert {leaf.shape for leaf in jax.tree.leaves(after.opt)} == {()}  # nothing of w's or unused's shape


def test_decay_changes_only_the_leaves_it_names(plain):
    before, after, _ = toy_step(decay="unused")
    np.testing.assert_allclose(after.params["unused"], before.params["unused"] * (1 - RATE * 0.1), rtol=1e-6)
    np.testing.assert_array_equal(plain[1].params["unused"], before.params["unused"])
    np.testing.assert_array_equal(plain[1].params["layer"]["w"], after.params["layer"]["w"])


def test_ema_averages_trained_leaves_and_is_evaluated():
    program = toy.recipe(toy.sgd).program(Options(ema=0.9, freeze="unused"))
    before, after, _ = run_step(program)
    expected = 0.9 * np.asarray(before.params["layer"]["w"]) + 0.1 * np.asarray(after.params["layer"]["w"])
    np.testing.assert_allclose(after.ema["layer"]["w"], expected, rtol=1e-6)
    assert after.ema["unused"] is None
    np.testing.assert_array_equal(inference_params(after)["layer"]["w"], after.ema["layer"]["w"])
    np.testing.assert_array_equal(inference_params(after)["unused"], after.params["unused"])
    direct, _ = toy.loss(inference_params(after), BATCH, None)
    np.testing.assert_allclose(program.evaluate(after, BATCH)["loss"], direct, rtol=1e-6)


def test_ema_of_bfloat16_parameters_moves():
    """By a thousandth a step, which is below bfloat16's resolution."""
    recipe = recipe_of(
        lambda key: {"w": jnp.ones(5, jnp.bfloat16)},
        lambda params, batch, key: params["w"].astype(jnp.float32).sum() + 0 * batch["x"].sum(),
        optax.sgd(0.5),
    )
    _, after, _ = run_step(recipe.program(Options(ema=0.999)))
    assert after.params["w"].dtype == jnp.bfloat16 and float(after.params["w"][0]) == 0.5
    np.testing.assert_allclose(after.ema["w"], np.full(5, 0.9995), rtol=1e-6)
    assert inference_params(after)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("precision", "dtype"), [("f32", jnp.float32), ("highest", jnp.float32), ("bf16", jnp.bfloat16)]
)
def test_matrix_products_have_the_requested_precision(precision, dtype):
    program = toy.recipe(cast="x").program(Options(precision=precision))
    state = jax.eval_shape(program.init, jax.random.key(0))
    equations = jax.make_jaxpr(program.step)(state, BATCH, CLOCK).jaxpr.eqns
    products = [equation for equation in equations if equation.primitive.name == "dot_general"]
    assert products and all(product.invars[0].aval.dtype == dtype for product in products)
    exact = (jax.lax.Precision.HIGHEST,) * 2
    assert all((product.params["precision"] == exact) == (precision == "highest") for product in products)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("cast", [(), "x", ["x"]])
def test_bf16_casts_the_named_inputs_and_keeps_targets(cast):
    data = toy.data() | {"y": np.linspace(100, 101, toy.ROWS, dtype=np.float32)}
    seen = {}

    def loss(params, batch, key):
        seen.update(params | {name: array.dtype for name, array in batch.items()})
        return jnp.mean(jnp.square(batch["y"] - 0 * params["w"].sum())), {"largest": batch["y"].max()}

    program = recipe_of(loss=loss, data=data, cast=cast).program(Options(precision="bf16"))
    metrics = program.evaluate(program.init(jax.random.key(0)), data)
    assert seen["y"] == jnp.float32 and seen["x"] == (jnp.bfloat16 if cast else jnp.float32)
    assert seen["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(metrics["largest"], np.float32(101))
    np.testing.assert_allclose(metrics["loss"], np.square(data["y"], dtype=np.float64).mean(), rtol=1e-6)


@pytest.mark.parametrize(("precision", "narrow"), [("bf16", jnp.bfloat16), ("f32", jnp.float32)])
def test_parameters_named_by_float32_keep_their_precision(precision, narrow):
    """A last layer in float32 keeps the digits of sums of many small logits; gradients are float32 anyway."""
    seen = {}

    def loss(params, batch, key):
        seen.update({name: leaf.dtype for name, leaf in params.items()})
        h = batch["x"] @ params["w"]
        seen["h"], seen["out"] = h.dtype, (h @ params["head"]).dtype
        return jnp.square((h * jnp.broadcast_to(params["norm"], h.shape)) @ params["head"] - batch["y"]).mean()

    def init(key):
        return {"w": jnp.ones((5, 3)), "norm": jnp.ones(3), "head": jnp.ones(3)}

    def trace(float32):
        program = recipe_of(init, loss, cast="x", float32=float32).program(Options(precision=precision))
        jax.eval_shape(program.step, jax.eval_shape(program.init, jax.random.key(0)), BATCH, CLOCK)

    trace("norm|head")
    assert seen["w"] == seen["h"] == narrow and seen["norm"] == seen["head"] == seen["out"] == jnp.float32
    with pytest.raises(InputError, match="float32 'nrom' matches none of the parameters: head, norm, w"):
        trace("nrom")


def test_product_of_mixed_dtypes_names_the_inputs_to_cast():
    def loss(params, batch, key):
        x = jax.lax.conv_general_dilated(batch["x"][:, None], params["w"], (1,), "SAME")
        return jnp.mean(jnp.square(x - batch["y"][:, None, None]))

    program = recipe_of(lambda key: {"w": jnp.ones((1, 1, 3))}, loss).program(Options(precision="bf16"))
    with pytest.raises(TypeError, match=r"x and y of the batch stay float32 without cast=\['x', 'y'\]"):
        program.evaluate(program.init(jax.random.key(0)), toy.data())


def test_ready_optimizer_has_its_own_rate():
    recipe = recipe_of(toy.init)
    before, after, metrics = run_step(recipe.program(Options()))
    grads, _ = gradient_by_hand(before.params)
    np.testing.assert_allclose(after.params["layer"]["b"], -0.1 * grads["b"], rtol=1e-5)
    assert "lr" not in metrics


def loss_and_metrics(metrics):
    return {"loss": lambda params, batch, key: (params["unused"].sum(), metrics)}


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ({}, {"freeze": "no_such_leaf"}, "freeze 'no_such_leaf' matches none"),
        ({}, {"decay": "w"}, "decay needs"),
        ({}, {"freeze": "("}, "not a regular expression"),
        ({}, {"freeze": ".*"}, "freeze .* matches every parameter: nothing is left to train"),
        ({}, {"ema": 1.5}, "ema must be above 0 and below 1"),
        ({}, {"clip": -1.0}, "clip must be above 0"),
        ({"optimizer": optax.adam}, {}, "optimizer is a ready optax transformation"),
        ({"schedule": lambda progress: 0.1}, {}, "optimizer is a ready optax transformation"),
        ({"optimizer": "adam", "schedule": lambda progress: 0.1}, {}, "optimizer is a ready optax transformation"),
        ({"init": lambda key: {"n": jnp.arange(3)}}, {}, "parameter n is int32"),
        ({"cast": "xx"}, {}, "cast names xx, which the data has not; did you mean x"),
        ({"cast": "n"}, {}, "n, which is int32: only float32"),
        ({"loss": lambda params, batch, key: batch["x"] @ params["layer"]["w"]}, {}, r"the loss has shape \(16,\), it"),
        ({"loss": lambda params, batch, key: None}, {}, "the loss is a NoneType: a loss returns a scalar, or"),
        (loss_and_metrics([1]), {}, "the loss is a tuple"),
        (loss_and_metrics({"best": [1]}), {}, "best is a list"),
        (loss_and_metrics({"all": np.ones(5)}), {}, r"all has shape \(5,\)"),
        (loss_and_metrics({"step": 1.0}), {}, "cannot be called step"),
        (loss_and_metrics({"eval_a": 1.0}), {}, "cannot be called eval_a"),
        ({"data": (toy.data()["x"], toy.data()["y"])}, {}, "the train data of toy is a tuple: give a dict of arrays"),
        ({"data": {"in": {"x": np.ones(4)}, "y": np.ones(4)}}, {}, "a dict under in: a batch is one dict of arrays, w"),
        ({"data": {"x": [[1], [1, 2]]}}, {}, "x of the data is not an array: setting an array element with a sequence"),
        ({"data": {"x": np.ones(4), "n": 4}}, {}, r"n of the data is a int \(int64\): a batch is one dict of arrays"),
        ({"data": {"x": ["a", "b"]}}, {}, r"x of the data is a list \(<U1\)"),
    ],
)
def test_wrong_arguments_and_options_are_refused(arguments, options, words):
    data = toy.data() | {"n": np.arange(toy.ROWS, dtype=np.int32)}
    with pytest.raises(InputError, match=words):
        program = recipe_of(**{"init": toy.init, "data": data} | arguments).program(Options(**options))
        jax.eval_shape(program.step, jax.eval_shape(program.init, jax.random.key(0)), BATCH, CLOCK)


def test_data_may_be_a_dict_of_splits_or_a_function_that_is_called_once_for_each():
    splits, made = [], {"train": toy.data(0), "validation": toy.data(1)}
    recipe = recipe_of(data=lambda split: splits.append(split) or made[split])
    recipe.program(Options())
    recipe.data("train"), recipe.data("train"), recipe.data("validation")
    assert splits == ["train", "validation"]
    assert recipe_of(data=made).data("validation").digest == ArraySource(toy.data(1)).digest
    with pytest.raises(InputError, match="has no all data"):
        recipe_of(data=made).data("all")


def test_option_that_a_recipe_does_not_support_is_refused():
    Options(platform="gpu", precision="bf16", remat="full").require_only("clip", by="thing")  # defaults, choices
    with pytest.raises(InputError, match="thing does not support ema"):
        Options(ema=0.9).require_only("clip", by="thing")


def test_step_passes_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        program = toy.recipe().program(Options(clip=1.0, ema=0.9, accumulate=2, decay="w"))
        jax.eval_shape(program.step, jax.eval_shape(program.init, jax.random.key(0)), BATCH, CLOCK)


X = np.ones((64, 3), np.float32)
DATA = {"train": {"x": X}, "validation": {"x": X[:8]}}
ITEMS = [{"x": row, "text": "a text"} for row in X]


class LightningModule:
    """Recognised by its name."""


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, batch, key):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - 1))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": lambda params, batch: 0}, r"called as loss\(params, batch, key\).*\(params, batch\).*supervised.py:"),
        ({"loss": None}, r"loss is a NoneType; give a function loss\(params, batch, key\)"),
        ({"extra": init}, r"loss is called as loss\(params, extra, batch, key\)"),
        ({"init": lambda: {}}, r"init is called as init\(key\)"),
        ({"init": lambda key: {"a": {"w": "x"}}}, r"parameter a/w is a str: parameters are .* \(.*supervised.py:\d+\)"),
        ({"extra": lambda key: "x", "loss": lambda *_: 0}, "extra of the state .* is a str"),
        ({"defaults": 3}, "defaults is a int, not a dict"),
        ({"defaults": {"step": 7}}, r"defaults takes no step; did you mean steps\?"),
        ({"schedule": lambda: 0.1, "optimizer": optax.adam}, r"schedule is called as schedule\(progress\)"),
        ({"schedule": lambda p: p, "optimizer": lambda lr: optax.adam(lr)}, r"optimizer\(learning_rate, decay_mask\)"),
        ({"data": lambda: DATA}, r"data is called as data\(split\)"),
        ({"data": {"train": {"x": X}, "valid": {"x": X}}}, "data has a dict under train.*train, validation, test, all"),
        ({"data": IndexedSource(ITEMS, names=["x", "txt"])}, r"row 16 of the data has no txt; did you mean text\?"),
        ({"data": IndexedSource(ITEMS, names=["x", "text"])}, r"text of row 16 of the data is a str"),
    ],
)
def test_wrong_argument_of_supervised_is_refused(tmp_path, changed, sentence):
    with pytest.raises(InputError, match=sentence):
        arguments = {"init": init, "loss": loss, "optimizer": optax.adam(0.1), "data": DATA} | changed
        Trainer(devices=1).fit(supervised(**arguments), steps=2, batch=8, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "fit_options", "sentence"),
    [
        ({"devices": 4, "eval_batch": 6}, {}, r"a batch of 6 rows does not divide evenly over devices \(4\)"),
        ({"keep": 0}, {}, "keep must be at least 1"),
        ({"eval_batch": "x"}, {}, "eval-batch must be a number, not 'x'"),
        ({"hooks": Every(2, print)}, {}, r"hooks are given as a list, \[Every\(100, function\)\]"),
        ({"hooks": [print]}, {}, r"hooks are given as \[Every\(100, function\)\], not as a builtin"),
        ({"hooks": [Every(1, lambda: None)]}, {}, r"hook is called as hook\(step\)"),
        ({"hooks": [Every("often", lambda step: None)]}, {}, "a hook's every is steps such as 500"),
        ({"hooks": [Every("5m", EarlyStopping())]}, {}, r"EarlyStopping counts eval.* not as Every\('5m', …\)"),
        ({"loggers": [3]}, {}, r"a logger needs write\(row\) and close\(\); got a int"),
        ({}, {"batch": 8.0}, "batch must be a whole number, not 8.0"),
        ({}, {"batch": "many"}, "batch must be a number, not 'many'"),
        ({}, {"recipe": (init, loss)}, "recipe is a tuple; give a recipe, such as .*supervised"),
        (
            {},
            {"recipe": LightningModule()},
            r"LightningModule; make a recipe .*tpuswarm.torch.recipe\(module, data=…\)",
        ),
        ({"fast_dev_run": True, "hosts": 2, "host": 0, "hosts_at": "127.0.0.1:1"}, {}, "a fast dev run is of one"),
    ],
)
def test_wrong_argument_of_a_trainer_leaves_no_run_behind(tmp_path, options, fit_options, sentence):
    folder = tmp_path / "run"
    with pytest.raises(InputError, match=sentence):
        toy.trainer(**options).fit(**{"recipe": toy.recipe(), "steps": 2, "batch": 8, "run": folder} | fit_options)
    assert not folder.exists()
    Run(folder).close()  # and it is not held

"""Mutable state of a loss, such as BatchNorm's: with every option, on several devices, after resuming."""

import json
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, load, supervised
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.directory import EVENTS, read_rows

CLOCK = toy.clock()
MOMENTUM = np.float32(0.75)
BATCH = {name: array[:16] for name, array in toy.data().items()}


def loss(params, extra, batch, key):
    """BatchNorm of x without scale; `seen` counts training steps."""
    mean, var = batch["x"].mean(0), batch["x"].var(0)
    if key is None:
        mean, var = extra["mean"], extra["var"]
    x = (batch["x"] - mean[None]) / jnp.sqrt(var + 1e-3)[None]
    error = jnp.square(x @ params["w"] - batch["y"])
    after = extra | {
        "mean": MOMENTUM * extra["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * extra["var"] + (1 - MOMENTUM) * var,
        "seen": extra["seen"] + 1,
    }
    return error.mean(), ({"worst": error.max()}, after)


def loss_with_key(params, extra, batch, key):
    found, (metrics, after) = loss(params, extra, batch, key)
    return found, (metrics, after | {"rng": jax.random.split(extra["rng"])[0]})


def extra(key):
    return {"mean": jnp.zeros(5), "var": jnp.ones(5), "seen": jnp.int32(0)}


def extra_with_key(key):
    return extra(key) | {"rng": key}


def recipe(optimizer=optax.sgd(0.1), loss=loss, extra=extra):  # noqa: B008
    return supervised(lambda key: {"w": jnp.ones(5), "v": jnp.ones(2)}, loss, optimizer, toy.splits, extra=extra)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "run"
    return folder, Trainer(devices=1).fit(recipe(), steps=4, batch=8, run=folder).state


@pytest.mark.parametrize("count", [1, 2])
def test_statistics_follow_each_micro_batch_and_no_option_touches_them(count):
    program = recipe().program(Options(accumulate=count, ema=0.9, freeze="v", clip=1.0, precision="bf16"))
    after, metrics = jax.jit(program.step)(program.init(jax.random.key(0)), BATCH, CLOCK)
    expected = np.zeros(5)
    for part in range(count):
        expected = MOMENTUM * expected + (1 - MOMENTUM) * BATCH["x"][part::count].mean(0)
    np.testing.assert_allclose(after.extra["mean"], expected, rtol=1e-5, atol=1e-7)
    assert after.extra["seen"] == count and after.extra["mean"].dtype == jnp.float32
    assert "worst" in metrics and after.ema["v"] is None
    x = (BATCH["x"] - np.asarray(after.extra["mean"])) / np.sqrt(np.asarray(after.extra["var"]) + 1e-3)
    half = np.asarray(after.ema["w"].astype(jnp.bfloat16), np.float32)
    evaluated = program.evaluate(after, BATCH)["loss"]
    np.testing.assert_allclose(evaluated, np.square(x @ half - BATCH["y"]).mean(), rtol=1e-5)


def test_statistics_of_several_devices_are_those_of_the_whole_batch(devices):
    compiled = compile_step(recipe(), Request(batch=16), devices)
    after, _ = compiled.step(compiled.init(jax.random.key(0)), BATCH, CLOCK)
    np.testing.assert_allclose(after.extra["var"], MOMENTUM + (1 - MOMENTUM) * BATCH["x"].var(0), rtol=1e-5)


def test_run_resumes_with_statistics_and_random_keys_in_its_state(tmp_path):
    made, trainer = recipe(optax.noisy_sgd(0.01), loss_with_key, extra_with_key), Trainer(devices=4)

    def fit(run):
        return trainer.fit(made, steps=6, batch=8, run=tmp_path / run)

    def numbers(state):
        return jax.tree.map(lambda x: jax.random.key_data(x) if "key" in str(x.dtype) else x, state)

    whole, loop = fit("whole"), trainer.steps(made, steps=6, batch=8, run=tmp_path / "parts")
    list(islice(loop, 3))
    loop.close()
    parts = fit("parts")
    assert_same(numbers(parts.state), numbers(whole.state))
    assert parts.state.extra["seen"] == 6
    again = fit("whole")
    assert again.step == 6
    assert_same(numbers(again.state), numbers(whole.state))
    assert load(tmp_path / "whole")["extra"]["rng"].dtype == np.uint32


def test_run_from_a_run_made_in_a_program_starts_from_its_statistics(parent, tmp_path):
    folder, state = parent

    def fit(made, run, parent):
        return Trainer(devices=1).fit(made, steps=1, batch=8, run=tmp_path / run, init_from=parent)

    made = recipe(optax.sgd(0.0))
    child = fit(made, "child", folder).state
    [log] = [event["message"] for event in read_rows(tmp_path / "child" / EVENTS) if event["event"] == "parameters"]
    assert "7 parameters and 10 running statistics; memory per device: 0.0 MiB parameters" in log
    assert_same(child.params, state.params)
    mean = made.data("train").rows(0, 8)["x"].mean(0)
    np.testing.assert_allclose(child.extra["mean"] - (1 - MOMENTUM) * mean, MOMENTUM * state.extra["mean"], atol=1e-6)
    assert child.extra["seen"] == 1
    plain = fit(toy.recipe(), "plain", None)
    assert load(plain.run).keys() == {"params", "opt"} and plain.state.extra is None
    tree = json.loads((plain.run / "checkpoints/00000001/state/_METADATA").read_text())["tree_metadata"]
    assert not [name for name in tree if "extra" in name]  # with an empty entry older runs would not resume
    with pytest.raises(InputError, match="the first extra/mean"):
        fit(recipe(), "other", plain.run)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda extra: ({}, extra | {"mean": extra["mean"].astype(jnp.bfloat16)}),
         r"was given float32\[5\] mean in extra, and returns bfloat16\[5\]: state keeps"),
        (lambda extra: ({}, {}), r"was given float32\[5\] mean in extra, and returns none"),
        (lambda extra: {}, r"mutable state returns \(loss, \(dict of metrics, extra\)\)"),
    ],
)  # fmt: skip
def test_loss_that_does_not_return_its_state_is_refused(returned, words):
    made = recipe(loss=lambda params, extra, batch, key: (params["w"].sum(), returned(extra)))
    program = made.program(Options())
    with pytest.raises(InputError, match=words):
        program.step(program.init(jax.random.key(0)), BATCH, CLOCK)


def test_batch_norm_of_equinox_is_followed_and_resumed(tmp_path):
    equinox = pytest.importorskip("equinox")

    def model(key):
        return equinox.nn.make_with_state(equinox.nn.BatchNorm)(5, axis_name="batch", mode="batch", momentum=0.75)

    shapes, _ = equinox.filter_eval_shape(model, jax.random.key(0))
    _, static = equinox.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def call(norm, rows, state):
        return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(rows, state)

    def loss(params, extra, batch, key):
        norm = equinox.combine(params, static)
        out, state = call(equinox.nn.inference_mode(norm) if key is None else norm, batch["x"], extra)
        return jnp.square(out.sum(-1) - batch["y"]).mean(), ({}, state)

    made = supervised(
        lambda key: equinox.filter(model(key)[0], equinox.is_array), loss, optax.sgd(0.1), toy.data(),
        extra=lambda key: model(key)[1],
    )  # fmt: skip
    next(Trainer().steps(made, steps=4, batch=toy.ROWS, run=tmp_path / "run"))
    resumed = Trainer().fit(made, steps=4, batch=toy.ROWS, run=tmp_path / "run")
    norm, expected = model(jax.random.key(0))
    for _ in range(4):
        _, expected = call(norm, toy.data()["x"], expected)
    for ours, theirs in zip(jax.tree.leaves(resumed.state.extra), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_batch_norm_of_flax_is_followed():
    nnx = pytest.importorskip("flax.nnx")

    def layer(key):
        return nnx.BatchNorm(5, momentum=0.75, rngs=nnx.Rngs(key))

    def split(key):
        return nnx.split(layer(key), nnx.Param, nnx.BatchStat)

    structure, *_ = nnx.eval_shape(lambda: split(0))

    def loss(params, extra, batch, key):
        model = nnx.merge(structure, params, extra)
        error = model(batch["x"], use_running_average=key is None).sum(-1) - batch["y"]
        return jnp.square(error).mean(), ({}, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))

    made = supervised(
        lambda key: nnx.to_pure_dict(split(key)[1]), loss, optax.sgd(0.1), toy.data(),
        extra=lambda key: nnx.to_pure_dict(split(key)[2]),
    )  # fmt: skip
    program = made.program(Options())
    state, step, expected = program.init(jax.random.key(0)), jax.jit(program.step), layer(0)
    for _ in range(3):
        state, _ = step(state, toy.data(), CLOCK)
        expected(toy.data()["x"], use_running_average=False)
    np.testing.assert_allclose(state.extra["mean"], expected.mean[...], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.extra["var"], expected.var[...], rtol=1e-5)

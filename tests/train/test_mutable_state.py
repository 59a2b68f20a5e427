"""Mutable state of a loss, such as BatchNorm's: beside the parameters, through every option, device and restart."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, load, supervised
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options

CLOCK = Clock(jax.random.key(0), np.int32(0), np.float32(0))
KEPT = np.float32(0.75)


def loss(params, extra, batch, key):
    """BatchNorm of x without scale; seen: how often it was called in training."""
    mean, var = batch["x"].mean(0), batch["x"].var(0)
    if key is None:
        mean, var = extra["mean"], extra["var"]
    x = (batch["x"] - mean[None]) / jnp.sqrt(var + 1e-3)[None]
    error = jnp.square(x @ params["w"] - batch["y"])
    after = {
        "mean": KEPT * extra["mean"] + (1 - KEPT) * mean,
        "var": KEPT * extra["var"] + (1 - KEPT) * var,
        "seen": extra["seen"] + 1,
    }
    return error.mean(), ({"worst": error.max()}, after)


def extra(key):
    return {"mean": jnp.zeros(5), "var": jnp.ones(5), "seen": jnp.int32(0)}


def recipe(rate=0.1, data=toy.splits, loss=loss):
    return supervised(lambda key: {"w": jnp.ones(5), "v": jnp.ones(2)}, loss, optax.sgd(rate), data, extra=extra)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_statistics_are_not_counted_as_parameters(tmp_path, capsys):
    Trainer(devices=1).fit(recipe(), steps=1, batch=8, run=tmp_path / "a")
    said = " ".join(capsys.readouterr().err.split())
    assert "7 parameters and 10 running statistics; memory per device: 0.0 MiB parameters" in said


@pytest.mark.parametrize("count", [1, 2])
def test_statistics_follow_each_micro_batch_and_options_leave_them_alone(count):
    program = recipe().program(Options(accumulate=count, ema=0.9, freeze="v", clip=1.0, precision="bf16"))
    batch = {name: array[:16] for name, array in toy.data().items()}
    state = program.init(jax.random.key(0))
    after, metrics = jax.jit(program.step)(state, batch, CLOCK)
    wanted = np.zeros(5)
    for part in range(count):
        wanted = KEPT * wanted + (1 - KEPT) * batch["x"][part::count].mean(0)
    np.testing.assert_allclose(after.extra["mean"], wanted, rtol=1e-5, atol=1e-7)
    assert after.extra["seen"] == count and after.extra["mean"].dtype == jnp.float32
    assert "worst" in metrics and after.ema["v"] is None
    found = program.evaluate(after, batch)
    x = (batch["x"] - np.asarray(after.extra["mean"])) / np.sqrt(np.asarray(after.extra["var"]) + 1e-3)
    half = np.asarray(after.ema["w"].astype(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(found["loss"], np.square(x @ half - batch["y"]).mean(), rtol=1e-5)


@pytest.mark.parametrize("shard", ["replicate", "fsdp"])
def test_statistics_are_those_of_the_whole_batch_on_any_number_of_devices(devices, shard):
    batch = {name: array[:16] for name, array in toy.data().items()}
    compiled = compile_step(recipe(), Request(batch=16, shard=shard), devices)
    after, _ = compiled.step(compiled.init(jax.random.key(0)), batch, CLOCK)
    np.testing.assert_allclose(after.extra["var"], KEPT + (1 - KEPT) * batch["x"].var(0), rtol=1e-5)


def test_a_run_resumes_with_its_statistics_and_another_starts_from_them(tmp_path):
    whole = Trainer(devices=1).fit(recipe(), steps=6, batch=8, run=tmp_path / "whole")
    loop = Trainer(devices=1).steps(recipe(), steps=6, batch=8, run=tmp_path / "parts")
    while next(loop).row["step"] < 3:
        pass
    loop.close()
    parts = Trainer(devices=1).fit(recipe(), steps=6, batch=8, run=tmp_path / "parts")
    same(parts.state, whole.state)
    assert parts.state.extra["seen"] == 6
    program = recipe().program(Options())
    shared = program.exchange().get(whole.state)
    begun = program.init(jax.random.key(1), shared)
    same(begun.extra["var"], whole.state.extra["var"])
    assert begun.extra["seen"] == 0  # a count is no average: it is not shared
    assert [each.path for each in program.parameters(begun) if each.statistic] == ["extra/mean", "extra/var"]


@pytest.mark.parametrize("count", [1, 4])
def test_a_run_resumes_with_the_keys_in_its_state(tmp_path, count):
    """In the state of the optimizer and in that of the loss."""

    def noisy(params, extra, batch, key):
        found, (metrics, after) = loss(params, extra, batch, key)
        return found, (metrics, after | {"rng": jax.random.split(extra["rng"])[0]})

    def made():
        return supervised(
            lambda key: {"w": jnp.ones(5)}, noisy, optax.noisy_sgd(0.01), toy.splits,
            extra=lambda key: extra(key) | {"rng": key},
        )  # fmt: skip

    def data(state):
        return jax.tree.map(lambda x: jax.random.key_data(x) if "key" in str(x.dtype) else x, state)

    whole = Trainer(devices=count).fit(made(), steps=6, batch=8, run=tmp_path / "whole")
    loop = Trainer(devices=count).steps(made(), steps=6, batch=8, run=tmp_path / "parts")
    while next(loop).row["step"] < 3:
        pass
    loop.close()
    parts = Trainer(devices=count).fit(made(), steps=6, batch=8, run=tmp_path / "parts")
    same(data(parts.state), data(whole.state))
    again = Trainer(devices=count).fit(made(), steps=6, batch=8, run=tmp_path / "whole")
    assert again.step == 6
    same(data(again.state), data(whole.state))
    assert load(tmp_path / "whole")["extra"]["rng"].dtype == np.uint32


def test_a_checkpoint_of_a_recipe_without_it_has_no_key_for_it(tmp_path):
    """Orbax takes an empty one for another tree: runs of before would not go on."""
    run = Trainer(devices=1).fit(toy.recipe(), steps=1, batch=8, run=tmp_path / "run")
    assert load(run.run).keys() == {"params", "opt"} and run.state.extra is None
    kept = json.loads((tmp_path / "run/checkpoints/00000001/state/_METADATA").read_text())["tree_metadata"]
    assert not [name for name in kept if "extra" in name]


def misshapen(params, extra, batch, key):
    return params["w"].sum(), ({}, extra | {"mean": extra["mean"].astype(jnp.bfloat16)})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (misshapen, r"was given float32\[5\] mean in extra, and returns bfloat16\[5\]: state keeps"),
        (lambda p, e, b, k: (p["w"].sum(), ({}, {})), r"was given float32\[5\] mean in extra, and returns none"),
        (lambda p, e, b, k: (p["w"].sum(), {}), r"mutable state returns \(loss, \(dict of metrics, extra\)\)"),
    ],
)
def test_a_loss_that_does_not_return_its_state_is_refused(loss, words):
    program = recipe(loss=loss).program(Options())
    batch = {name: array[:16] for name, array in toy.data().items()}
    with pytest.raises(InputError, match=words):
        program.step(program.init(jax.random.key(0)), batch, CLOCK)


def test_batch_norm_of_flax():
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
    state = program.init(jax.random.key(0))
    theirs = layer(0)
    for _ in range(3):
        state, _ = jax.jit(program.step)(state, toy.data(), CLOCK)
        theirs(toy.data()["x"], use_running_average=False)
    np.testing.assert_allclose(state.extra["mean"], theirs.mean[...], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.extra["var"], theirs.var[...], rtol=1e-5)


def test_equinox_batch_norm_is_resumed_and_is_equinoxs(tmp_path):
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
        lambda key: equinox.filter(model(key)[0], equinox.is_array), loss, optax.sgd(0.1), toy.splits,
        extra=lambda key: model(key)[1],
    )  # fmt: skip
    Trainer().fit(made, steps=2, batch=toy.ROWS, run=tmp_path / "a")
    resumed = Trainer().fit(made, steps=4, batch=toy.ROWS, run=tmp_path / "a")
    norm, theirs = model(jax.random.key(0))
    for _ in range(4):
        _, theirs = call(norm, toy.data()["x"], theirs)
    for ours, other in zip(jax.tree.leaves(resumed.state.extra), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-7)


def test_a_run_that_was_made_in_a_program_gives_its_statistics_too(tmp_path):
    def fit(made, steps, run, **options):
        return Trainer(devices=1).fit(made, steps=steps, batch=8, run=tmp_path / run, **options).state

    parent = fit(recipe(), 4, "parent")
    child, fresh = fit(recipe(0.0), 1, "child", init_from=tmp_path / "parent"), fit(recipe(0.0), 1, "fresh")
    same(child.params, parent.params)
    np.testing.assert_allclose(child.extra["mean"] - fresh.extra["mean"], KEPT * parent.extra["mean"], atol=1e-6)
    assert child.extra["seen"] == 1
    fit(toy.recipe(), 1, "plain")
    with pytest.raises(InputError, match="the first extra/mean"):
        fit(recipe(), 1, "other", init_from=tmp_path / "plain")

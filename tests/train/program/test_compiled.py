import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import supervised
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program import flops
from tpuswarm.train.program.compiled import Refused, TooLarge, compile_step, compile_traced, place, trace
from tpuswarm.train.program.mesh import bytes_per_device, make_mesh
from tpuswarm.train.program.request import REMATS, Choice, Request, attention_and_loop, choices
from tpuswarm.train.recipe import Clock, Options
from tpuswarm.train.settings import check_batch


def train(recipe, request, devices, steps=3):
    """The compiled step, the state after some steps on the same rows, and their losses."""
    compiled = compile_step(recipe, request, devices)
    state = compiled.init(jax.random.key(0))
    rows, losses = recipe.data("train").rows(0, request.batch), []
    for step in range(steps):
        state, metrics = compiled.step(state, rows, Clock(jax.random.key(1), np.int32(step), np.float32(0.1)))
        losses.append(float(metrics["loss"]))
    return compiled, state, losses


def two_layers():
    def init(key):
        return {"w": jax.random.normal(key, (512, 512)) / 25}

    def loss(params, batch, key):
        return jnp.square(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["w"])).mean()

    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    return supervised(init, loss, optax.adam(1e-3), {"x": x}, micro_batches=True)


def test_devices_sharding_and_micro_batches_do_not_change_the_losses(devices):
    recipe = two_layers()
    one_device, _, one = train(recipe, Request(batch=16), devices[:1])
    assert one[-1] < one[0]
    for request in (
        Request(batch=16, shard="replicate"),
        Request(batch=16, shard="fsdp", accumulate=2),
        Request(batch=16, shard="replicate", accumulate=2),
    ):
        compiled, state, losses = train(recipe, request, devices)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert held == bytes_per_device(compiled.state) and (held < 0.2 * whole) == (request.shard == "fsdp")
        assert compiled.flops.total == one_device.flops.total
        np.testing.assert_allclose(losses, one, rtol=1e-4 if request.accumulate else 1e-5)
    reductions = [line for line in compiled.step.as_text().splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    assert reductions and not any("/while/" in line for line in reductions), "a sum over devices in each micro-batch"


def test_compiler_options_of_a_recipe_reach_the_compiler_of_their_platform(devices):
    recipe = toy.recipe()
    recipe.compiling = {"tpu": {"no_such_option": 1}}
    compile_step(recipe, Request(batch=4), devices[:1])
    recipe.compiling = {"cpu": {"no_such_option": 1}}
    with pytest.raises(Refused, match="no_such_option"):
        compile_step(recipe, Request(batch=4), devices[:1])
    placed = place(recipe, Request(batch=4), devices[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        placed.evaluate(placed.init(jax.random.key(0)), recipe.data("train").rows(0, 4))


def test_memory_decides_how_a_program_runs(devices):
    recipe = two_layers()
    plain = compile_step(recipe, Request(batch=8192), devices)
    assert (plain.choice.shard, plain.choice.remat, plain.choice.accumulate) == ("replicate", "none", 1)
    tight = compile_step(recipe, Request(batch=8192), devices, memory_bytes=plain.memory.total - 1)
    assert tight.memory.total < plain.memory.total and tight.choice.shard == "fsdp"
    floor = compile_step(recipe, Request(batch=8192, shard="fsdp", accumulate=4), devices).memory.total
    small = compile_step(recipe, Request(batch=8192), devices, memory_bytes=floor)
    assert small.choice.shard == "fsdp" and 1 < small.choice.accumulate <= 4 and small.memory.total <= floor
    with pytest.raises(InputError, match=r"does not fit on 8 x cpu.*2 micro-batches.*GiB.*smaller batch"):
        compile_step(recipe, Request(batch=16), devices, memory_bytes=2**18)


def test_memory_includes_the_batches_before_and_after_that_of_the_step(devices):
    recipe, request = toy.recipe(), Request(batch=2**16)
    batch_bytes = 6 * 4 * 2**16
    compiled = compile_step(recipe, request, devices[:1])
    assert compiled.memory.arguments >= 4 * batch_bytes
    with pytest.raises(InputError, match=r"does not fit.* needs 0\.01 GiB"):
        compile_step(recipe, request, devices[:1], memory_bytes=compiled.memory.total - batch_bytes)


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_weight_products_and_the_kernel_are_not_recomputed(attention, monkeypatch):
    """Of plain attention the scores are recomputed: they would take most memory."""
    monkeypatch.setattr(flops, "RECOMPUTED", "nothing is left out")
    rows, tokens, width, layers = 8, 256, 64, 2
    recipe = GPT2(data="fake", layers=layers, heads=2, width=width, context=tokens, vocab=300)
    found = {}
    for remat in REMATS:
        program = recipe.program(Options(remat=remat, attention=attention))
        state = jax.eval_shape(program.init, jax.random.key(0))
        clock = Clock(jax.random.key(0), np.int32(0), np.float32(0))
        traced = jax.jit(program.step).trace(state, program.batch_spec(rows), clock)
        found[remat] = flops.model_flops(traced.jaxpr).total
    scores = 2 * rows * tokens**2 * width * layers
    assert found["dots"] - found["none"] == (scores if attention == "xla" else 0)
    qkv_and_fc = 2 * rows * tokens * (3 + 4) * width**2 * layers
    assert found["full"] - found["dots"] > qkv_and_fc


def test_least_recomputation_that_fits_is_chosen(devices):
    recipe, request, one = toy.Layers(), Request(batch=256, accumulate=1), make_mesh(devices[:1])
    needed = {}
    for remat in REMATS:
        traced = trace(recipe, request.options("cpu", "cpu"), Choice("replicate", remat, 1, ""), 256, one)
        needed[remat] = compile_traced(traced).memory.total
    assert needed["none"] > needed["dots"] > needed["full"]
    for remat, memory in needed.items():
        assert compile_step(recipe, request, devices[:1], memory).choice.remat == remat


@pytest.fixture
def tried(monkeypatch):
    """The numbers of micro-batches that would be compiled; a device needs its state and 512 bytes for each row."""
    counts = []

    def too_large(traced, memory):
        counts.append(traced.choice.accumulate)
        rows = traced.batch // traced.placed.mesh.size // min(traced.choice.accumulate, 4)
        return TooLarge(traced.choice, 100 + 512 * rows, 100)

    monkeypatch.setattr("tpuswarm.train.program.compiled.compile_traced", too_large)
    return counts


def test_batch_larger_than_the_memory_is_refused_before_compiling(devices, tried):
    words = r"batch 2147483640 does not fit on 8 x cpu.* needs 24\.00 GiB per device, of 16"
    with pytest.raises(InputError, match=words):
        compile_step(toy.recipe(), Request(batch=2**31 - 8), devices, memory_bytes=2**34)
    assert not tried


def test_hopeless_numbers_of_micro_batches_are_not_compiled(devices, tried):
    request = Request(batch=8 * 2**10, shard="replicate")
    with pytest.raises(InputError, match="does not fit"):
        compile_step(toy.recipe(micro_batches=True), request, devices, memory_bytes=2**18 - 1)
    assert tried[:2] == [1, 4] and tried[-1] == 2**10  # with 2 it would need 101 bytes too many


@pytest.mark.parametrize(
    ("accumulate", "micro_batches", "expected"), [(None, False, {1}), (None, True, {1, 2}), (2, False, {2})]
)
def test_micro_batches_are_chosen_only_for_losses_that_allow_them(devices, tried, accumulate, micro_batches, expected):
    """A contrastive loss, for example, has another value in micro-batches."""
    with pytest.raises(InputError, match="does not fit"):
        recipe, request = toy.recipe(micro_batches=micro_batches), Request(batch=16, accumulate=accumulate)
        compile_step(recipe, request, devices, memory_bytes=600)
    assert set(tried) == expected


NO_REMAT, ALL_REMATS = ["none"], ["none", "dots", "full"]


@pytest.mark.parametrize(
    ("request_", "forms", "kind", "shards", "remats", "accumulate"),
    [
        (Request(batch=64), [], "cpu", ["replicate", "fsdp"], NO_REMAT, 1),
        (Request(batch=64, shard="replicate", accumulate=2), ["remat"], "cpu", ["replicate"], ALL_REMATS, 2),
        # On a TPU without the kernel the scores of all layers would be kept.
        (Request(batch=64, shard="fsdp", accumulate=1), ["remat"], "TPU v3", ["fsdp"], ["dots", "full"], 1),
        (Request(batch=64, shard="fsdp", accumulate=1), ["remat"], "TPU v4", ["fsdp"], ALL_REMATS, 1),
    ],
)
def test_ways_to_run_follow_the_request_and_the_program(request_, forms, kind, shards, remats, accumulate):
    tried = choices(request_, forms, kind[:3].lower(), kind, 8, 2**40 if request_.shard != "auto" else 1, 2**30)
    ways = [(choice.shard, choice.remat, choice.accumulate) for choice in tried]
    assert ways == [(shard, remat, accumulate) for shard in shards for remat in remats]


@pytest.mark.parametrize(
    ("batch", "devices", "accumulate", "words"),
    [
        (12, 8, 1, "over devices (8) x micro-batches (1) = 8; use --batch 16 or --devices 6"),
        (12, 4, 2, "= 8; use --batch 16 or --accumulate 1"),
        (7, 1, 2, "= 2; use --batch 8 or --accumulate 1"),
        (3, 2, 2, "= 4; use --batch 4 or --devices 1 --accumulate 1"),
        (0, 1, 1, "batch must be 1 or more"),
        (8, 1, -1, "accumulate must be 1 or more"),
    ],
)
def test_batch_that_devices_do_not_divide_is_refused_with_two_ways_out(batch, devices, accumulate, words):
    with pytest.raises(InputError, match=re.escape(words)):
        check_batch(batch, devices, accumulate)


def test_attention_and_loop_follow_the_platform():
    assert attention_and_loop("cpu", "cpu") == ("xla", "unroll")
    assert attention_and_loop("gpu", "NVIDIA H200") == ("cudnn", "unroll")
    assert attention_and_loop("tpu", "TPU v3") == ("xla", "scan")
    assert attention_and_loop("tpu", "TPU v4") == ("splash", "scan")


def test_failing_evaluation_is_reported_before_the_step_is_compiled(devices, monkeypatch):
    def loss(params, batch, key):
        return jnp.mean(params["layer"]["w"] * jax.random.normal(key, (5,)))  # the planted line

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    recipe = supervised(toy.init, loss, optax.sgd(0.1), toy.data())
    words = rf"the evaluation of test_compiled fails \(its key is None\): TypeError: .* \({__file__}:\d+\)"
    with pytest.raises(InputError, match=words):
        compile_step(recipe, Request(batch=8), devices)


TOPOLOGY = """
from jax.experimental import topologies
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
recipe = GPT2(data="fake", context=128, layers=2)
devices = topologies.get_topology_desc("v5e:2x4", "tpu", chips_per_host_bounds=(2, 4, 1)).devices
compiled = compile_step(recipe, Request(batch=32, shard="fsdp"), devices)
text = compiled.step.as_text()
print(devices[0].device_kind, len(devices), compiled.options.precision, compiled.options.attention,
      compiled.options.loop, compiled.choice.remat, "splash" in text,
      "all-reduce" in text, compiled.memory.total > 0, sep="|")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the TPU compiler exists for Linux only")
def test_step_compiles_for_described_tpus():
    """For a v2, by the command: tests/plan."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", TOPOLOGY], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "TPU v5 lite|8|bf16|splash|scan|none|True|True|True\n"

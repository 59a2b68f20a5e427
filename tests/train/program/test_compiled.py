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
from tpuswarm.train.program.compiled import Refused, TooLarge, compile_step, place
from tpuswarm.train.program.mesh import bytes_per_device
from tpuswarm.train.program.request import Request, attention_and_loop, choices
from tpuswarm.train.recipe import Clock
from tpuswarm.train.settings import check_batch
from tpuswarm.train.supervised import SupervisedProgram


def gpt2(**options):
    return GPT2(data="fake", width=256, layers=1, vocab=512, context=32, **options)


def losses(recipe, request, devices, steps=4):
    compiled = compile_step(recipe, request, devices)
    state = compiled.init(jax.random.key(0))
    source, found = recipe.data("train"), []
    for step in range(steps):
        rows = source.rows(step * request.batch, request.batch)
        state, metrics = compiled.step(state, rows, Clock(jax.random.key(1), np.int32(step), np.float32(0.1)))
        found.append(float(metrics["loss"]))
    return compiled, state, found


def test_one_device_replicated_sharded_and_split_agree(devices):
    recipe = gpt2()
    _, _, one = losses(recipe, Request(batch=16), devices[:1])
    _, _, eight = losses(recipe, Request(batch=16, shard="replicate"), devices)
    compiled, state, sharded = losses(recipe, Request(batch=16, shard="fsdp"), devices)
    _, _, split = losses(recipe, Request(batch=16, shard="fsdp", accumulate=2), devices)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    np.testing.assert_allclose(sharded, one, rtol=1e-5)
    np.testing.assert_allclose(split, one, rtol=1e-4)
    replicated, _, once = losses(recipe, Request(batch=16, shard="replicate", accumulate=2), devices)
    np.testing.assert_allclose(once, one, rtol=1e-4)
    reductions = [line for line in replicated.step.as_text().splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    assert reductions and not any("/while/" in line for line in reductions), "a sum over devices in each micro-batch"
    assert one[-1] < one[0]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held == bytes_per_device(compiled.state)
    assert held < sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 0.6


def test_dropout_does_not_depend_on_the_number_of_devices(devices):
    recipe = gpt2(dropout=0.2)
    _, _, one = losses(recipe, Request(batch=8), devices[:1], steps=2)
    _, _, eight = losses(recipe, Request(batch=8), devices, steps=2)
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_a_recipes_options_reach_the_compiler_of_its_platform(devices):
    recipe = supervised(
        lambda key: {"w": jnp.ones((4, 4))},
        lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean(),
        optax.sgd(1e-3),
        {"x": np.ones((8, 4), np.float32)},
    )
    recipe.compiling = {"tpu": {"no_such_option": 1}}
    compile_step(recipe, Request(batch=4), devices[:1])
    recipe.compiling = {"cpu": {"no_such_option": 1}}
    with pytest.raises(Refused, match="no_such_option"):
        compile_step(recipe, Request(batch=4), devices[:1])
    placed = place(recipe, Request(batch=4), devices[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        placed.evaluate(placed.init(jax.random.key(0)), {"x": np.ones((4, 4), np.float32)})


def test_memory_decides_between_the_ways_to_run(devices):
    recipe = supervised(
        lambda key: {"w": jax.random.normal(key, (1024, 1024))},
        lambda params, batch, key: jnp.square(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["w"])).mean(),
        optax.adam(1e-3),
        {"x": np.ones((64, 1024), np.float32)},
        micro_batches=True,
    )
    plain = compile_step(recipe, Request(batch=16384), devices)
    assert (plain.choice.shard, plain.choice.remat, plain.choice.accumulate) == ("replicate", "none", 1)
    tight = compile_step(recipe, Request(batch=16384), devices, memory_bytes=plain.memory.total - 1)
    assert tight.memory.total < plain.memory.total and tight.choice.shard == "fsdp"
    floor = compile_step(recipe, Request(batch=16384, shard="fsdp", accumulate=4), devices).memory.total
    small = compile_step(recipe, Request(batch=16384), devices, memory_bytes=floor)
    assert small.choice.shard == "fsdp" and 1 < small.choice.accumulate <= 4 and small.memory.total <= floor
    with pytest.raises(InputError, match=r"does not fit on 8 x cpu.*2 micro-batches.*GiB.*smaller batch"):
        compile_step(recipe, Request(batch=16), devices, memory_bytes=2**20)


def test_every_batch_that_is_there_at_once_counts(devices):
    """Pictures: while a step runs, one is behind it and two are on their way."""
    recipe = supervised(
        lambda key: {"w": jnp.zeros(64)},
        lambda params, batch, key: jnp.square(batch["x"] @ params["w"] - 1).mean(),
        optax.sgd(0.1),
        {"x": np.zeros((1, 64), np.float32)},
    )
    compiled = compile_step(recipe, Request(batch=4096), devices[:1])
    assert compiled.memory.arguments >= 4 * 2**20
    with pytest.raises(InputError, match=r"does not fit.* needs 0\.00 GiB"):
        compile_step(recipe, Request(batch=4096), devices[:1], memory_bytes=compiled.memory.total - 2**20)


def test_rows_that_no_device_holds_are_refused_before_anything_is_compiled(devices, monkeypatch):
    def never(*_):
        raise AssertionError("it was compiled")

    monkeypatch.setattr("tpuswarm.train.program.compiled.trace", never)
    with pytest.raises(
        InputError, match=r"batch 2147483640 does not fit on 8 x cpu.* needs 24\.00 GiB per device, of 16"
    ):
        compile_step(toy.recipe(), Request(batch=2**31 - 8), devices, memory_bytes=2**34)


def test_micro_batches_that_cannot_be_small_enough_are_not_compiled(devices, monkeypatch):
    """As if a device needed its state and 512 bytes for each row of a micro-batch."""
    tried = []

    def too_large(traced, memory):
        _, placed, _, choice, batch = traced
        tried.append(choice.accumulate)
        return TooLarge(choice, 100 + 512 * batch // placed.mesh.size // min(choice.accumulate, 4), 100)

    monkeypatch.setattr("tpuswarm.train.program.compiled.compile_traced", too_large)
    made = toy.recipe(micro_batches=True)
    with pytest.raises(InputError, match="does not fit"):
        compile_step(made, Request(batch=8 * 2**20, shard="replicate"), devices, memory_bytes=2**28 - 1)
    assert tried[:2] == [1, 4] and tried[-1] == 2**20  # 2 would need 101 bytes more than there are


def test_what_a_program_does_not_do_is_not_tried():
    tried = list(choices(Request(batch=64), [], "cpu", "cpu", 8, 1, None))
    assert [(choice.shard, choice.remat, choice.accumulate) for choice in tried] == [
        ("replicate", "none", 1),
        ("fsdp", "none", 1),
    ]


def test_a_loss_is_split_unasked_only_where_supervised_says_so(devices, monkeypatch):
    """A contrastive loss, say, has another value in micro-batches."""
    tried = []

    def too_large(traced, memory):
        tried.append(traced.choice.accumulate)
        return TooLarge(traced.choice, 2**30, 100)

    monkeypatch.setattr("tpuswarm.train.program.compiled.compile_traced", too_large)
    for asked, opted, wanted in ((None, False, {1}), (None, True, {1, 2}), (2, False, {2})):
        tried.clear()
        with pytest.raises(InputError, match="does not fit"):
            compile_step(toy.recipe(micro_batches=opted), Request(batch=16, accumulate=asked), devices)
        assert set(tried) == wanted


def test_what_is_asked_is_not_changed():
    request = Request(batch=64, shard="replicate", accumulate=2)
    tried = list(choices(request, ["remat"], "cpu", "cpu", 8, 2**40, 2**30))
    assert {(choice.shard, choice.accumulate) for choice in tried} == {("replicate", 2)}
    assert [choice.remat for choice in tried] == ["none", "dots", "full"]


def test_a_metric_of_many_numbers_is_refused_before_the_first_step(devices, monkeypatch):
    step = SupervisedProgram.step

    def wide(self, state, batch, clock):
        state, metrics = step(self, state, batch, clock)
        return state, {**metrics, "each": jnp.zeros(3)}

    monkeypatch.setattr(SupervisedProgram, "step", wide)
    with pytest.raises(InputError, match=r"metric each of toy has shape \(3,\), it must be a scalar: give its mean"):
        compile_step(toy.recipe(), Request(batch=8), devices[:1])


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
)  # fmt: skip
def test_a_batch_that_does_not_divide_names_the_numbers_and_two_ways_out(batch, devices, accumulate, words):
    with pytest.raises(InputError) as error:
        check_batch(batch, devices, accumulate)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("platform", "kind", "wanted"),
    [
        ("cpu", "cpu", ("xla", "unroll")),
        ("gpu", "NVIDIA H200", ("cudnn", "unroll")),
        ("tpu", "TPU v2", ("xla", "scan")),
        ("tpu", "TPU v3", ("xla", "scan")),
        ("tpu", "TPU v4", ("splash", "scan")),
        ("tpu", "TPU v5 lite", ("splash", "scan")),
    ],
)
def test_forms_by_platform(platform, kind, wanted):
    assert attention_and_loop(platform, kind) == wanted


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(batch=8, shard="fdsp"), "shard is auto, replicate or fsdp, not 'fdsp'"),
        (Request(batch=8, precision="bf61"), "precision is bf16, f32 or highest, not 'bf61'"),
    ],
)
def test_unknown_choices(request_, words, devices):
    with pytest.raises(InputError, match=words):
        compile_step(toy.recipe(), request_, devices)


def test_an_evaluation_that_fails_is_told_before_the_first_step_is_compiled(devices, monkeypatch):
    def loss(params, batch, key):
        return jnp.mean(params["layer"]["w"] * jax.random.normal(key, (5,)))  # the planted line

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    made = supervised(toy.init, loss, optax.sgd(0.1), toy.data())
    words = rf"the evaluation of test_compiled fails \(its key is None\): TypeError: .* \({__file__}:\d+\)"
    with pytest.raises(InputError, match=words):
        compile_step(made, Request(batch=8), devices)


TOPOLOGY = """
import sys
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
def test_the_same_function_compiles_for_described_tpus():
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", TOPOLOGY], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "TPU v5 lite|8|bf16|splash|scan|none|True|True|True\n"  # v2, as a command: tests/plan

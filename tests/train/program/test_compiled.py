"""Compiled steps: devices, sharding, memory, micro-batches, recomputation, and attention kernels."""

import itertools
import math
import operator
import re
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tests.train import toy
from tests.train.program.test_flops import step_flops
from tpuswarm import supervised
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.data.placing import within_host_sharding
from tpuswarm.train.program import flops, mesh
from tpuswarm.train.program.attention import kernel, usable_form
from tpuswarm.train.program.compiled import (
    CompilerRefused,
    TooLarge,
    compile_step,
    compile_traced,
    lowest_capability,
    place_program,
    trace,
)
from tpuswarm.train.program.mesh import (
    MIN_PART_ROWS,
    MIN_SHARDED_BYTES,
    batch_sharding,
    bytes_per_device,
    gathered,
    leaf_sharding,
    make_mesh,
    select_devices,
)
from tpuswarm.train.program.request import REMATS, Choice, Request, attention_and_loop, capability_note, choices
from tpuswarm.train.settings import check_batch


def train(recipe, request, devices, steps=3):
    compiled = compile_step(recipe, request, devices)
    state = compiled.init(jax.random.key(0))
    rows, losses = recipe.data("train").rows(0, request.batch), []
    for step in range(steps):
        state, metrics = compiled.step(state, rows, toy.clock(step, 0.1, seed=1))
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


@pytest.mark.slow
def test_sharded_gpt2_with_dropout_has_the_losses_of_one_device(devices, monkeypatch):
    monkeypatch.setattr(mesh, "MIN_SHARDED_BYTES", 2**12)
    recipe = GPT2(data="fake", width=64, heads=2, layers=1, vocab=128, context=32, dropout=0.2)
    request = Request(batch=16, shard="fsdp")
    (*_, one), (_, state, eight) = (train(recipe, request, devices[:count]) for count in (1, 8))
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held < sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 0.6


def test_compiler_options_of_a_recipe_reach_the_compiler_of_their_platform(devices):
    recipe = toy.recipe()
    recipe.compiling = {"tpu": {"no_such_option": 1}}
    compile_step(recipe, Request(batch=4), devices[:1])
    recipe.compiling = {"cpu": {"no_such_option": 1}}
    with pytest.raises(CompilerRefused, match="no_such_option"):
        compile_step(recipe, Request(batch=4), devices[:1])
    placed = place_program(recipe, Request(batch=4), devices[:1])
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
    """Plain attention recomputes its scores, which need the most memory."""
    monkeypatch.setattr(flops, "RECOMPUTED", "nothing is left out")
    rows, tokens, width, layers = 8, 256, 64, 2
    recipe = GPT2(data="fake", layers=layers, heads=2, width=width, context=tokens, vocab=300)
    found = {}
    for remat in REMATS:
        found[remat] = step_flops(recipe, rows, remat=remat, attention=attention).total
    scores = 2 * rows * tokens**2 * width * layers
    assert found["dots"] - found["none"] == (scores if attention == "xla" else 0)
    qkv_and_fc = 2 * rows * tokens * (3 + 4) * width**2 * layers
    assert found["full"] - found["dots"] > qkv_and_fc


def test_least_recomputation_that_fits_is_chosen(devices):
    recipe, request, one = toy.Layers(), Request(batch=256, accumulate=1), make_mesh(devices[:1])
    needed = {}
    for remat in REMATS:
        choice = Choice("replicate", remat, 1, "")
        needed[remat] = compile_traced(trace(recipe, request.options("cpu", "cpu"), choice, 256, one)).memory.total
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


@pytest.mark.parametrize(
    ("request_", "micro_batches", "memory", "expected"),
    [
        (Request(batch=2**31 - 8), False, 2**34, []),
        (Request(batch=16, shard="replicate"), False, 600, [1]),  # a contrastive loss depends on them
        (Request(batch=16, shard="replicate"), True, 600, [1, 2]),
        (Request(batch=16, shard="replicate", accumulate=2), False, 600, [2]),
        (Request(batch=8 * 2**10, shard="replicate"), True, 2**18 - 1, [1, 4, 8]),  # 2: 101 bytes too many
    ],
)
def test_only_numbers_of_micro_batches_that_may_fit_are_compiled(
    devices, tried, request_, micro_batches, memory, expected
):
    with pytest.raises(InputError, match=f"batch {request_.batch} does not fit on 8 x cpu.* GiB"):
        compile_step(toy.recipe(micro_batches=micro_batches), request_, devices, memory_bytes=memory)
    assert tried[:3] == expected


@pytest.mark.parametrize(
    ("request_", "forms", "kind", "shards", "remats", "accumulate"),
    [
        (Request(batch=64), [], "cpu", ["replicate", "fsdp"], ["none"], 1),
        (Request(batch=64, shard="replicate", accumulate=2), ["remat"], "cpu", ["replicate"], REMATS, 2),
        # On a TPU without the kernel the scores of all layers would be kept.
        (Request(batch=64, shard="fsdp", accumulate=1), ["remat"], "TPU v3", ["fsdp"], ["dots", "full"], 1),
        (Request(batch=64, shard="fsdp", accumulate=1), ["remat"], "TPU v4", ["fsdp"], REMATS, 1),
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
    assert attention_and_loop("gpu", "NVIDIA A10", (8, 6)) == ("cudnn", "unroll")
    assert attention_and_loop("gpu", "Tesla T4", (7, 5)) == ("xla", "unroll")
    assert attention_and_loop("tpu", "TPU v3") == ("xla", "scan")
    assert attention_and_loop("tpu", "TPU v4") == ("splash", "scan")


def test_gpu_before_ampere_trains_in_float32_and_recomputes_attention():
    t4 = Request(batch=64).options("gpu", "Tesla T4", (7, 5))
    assert t4.precision == "f32" and Request(batch=64).options("gpu", "NVIDIA A10", (8, 6)).precision == "bf16"
    t4.require_only("clip", by="a program in float32")
    tried = choices(Request(batch=1), ["remat"], "gpu", "Tesla T4", 1, 1, 2**30, (7, 5))
    assert [choice.remat for choice in tried] == ["dots", "full"]
    [note] = capability_note((7, 5))
    assert "(compute capability 7.5) has no bfloat16 units and no attention kernel, which need 8.0" in note
    assert capability_note((8, 0)) == capability_note(None) == []


def test_capability_of_devices_is_the_lowest():
    gpus = [SimpleNamespace(compute_capability=text) for text in ("12.0", "7.5", "8.6")]
    assert lowest_capability(gpus) == (7, 5)
    assert lowest_capability([SimpleNamespace(compute_capability="gfx90a")]) is None, "AMD"
    assert lowest_capability(jax.devices()) is None


def test_failing_evaluation_is_reported_before_the_step_is_compiled(devices, monkeypatch):
    def loss(params, batch, key):
        return jnp.mean(params["layer"]["w"] * jax.random.normal(key, (5,)))  # the planted line

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    recipe = supervised(toy.init, loss, optax.sgd(0.1), toy.data())
    words = rf"the evaluation of test_compiled fails \(its key is None\): TypeError: .* \({__file__}:\d+\)"
    with pytest.raises(InputError, match=words):
        compile_step(recipe, Request(batch=8), devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "keys", "heads", "groups", "segmented"),
    [(True, 128, 1, 1, False), (False, 256, 2, 1, False), (True, 128, 2, 1, True)],
)
def test_splash_and_its_gradients_equal_plain_attention(causal, keys, heads, groups, segmented):
    random = np.random.default_rng(0)
    shapes = (1, 128, heads, 32), (1, keys, groups, 32), (1, keys, groups, 32)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)

    segments = jnp.asarray(np.arange(128) // 50)[None] if segmented else None
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]

    def splash(q, k, v):
        return jnp.sum(kernel(q, k, v, "splash", causal=causal, scale=0.3, segments_BxT=segments) ** 2)

    def plain(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, scale=0.3) ** 2)

    with pltpu.force_tpu_interpret_mode():
        found, grads = jax.value_and_grad(splash, (0, 1, 2))(q, k, v)
    expected, expected_grads = jax.value_and_grad(plain, (0, 1, 2))(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, other in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, other, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize(
    ("wanted", "sizes", "form"),
    [
        ("cudnn", {}, "cudnn"),
        ("cudnn", {"bf16": False}, "xla"),
        ("cudnn", {"head_width": 160}, "xla"),
        ("splash", {}, "splash"),
        ("splash", {"keys": 77}, "xla"),
        ("xla", {}, "xla"),
    ],
)
def test_kernel_is_used_only_for_sizes_it_supports(wanted, sizes, form):
    assert usable_form(wanted, **{"bf16": True, "head_width": 64, "queries": 256, "keys": 128} | sizes) == form


@pytest.mark.parametrize(
    ("which", "indices"),
    [("all", range(8)), ("8", range(8)), (3, range(3)), ("[5]", [5]), ([5], [5]), ("[0, 2]", [0, 2])],
)
def test_devices_are_selected_by_number_or_index(which, indices, devices):
    assert select_devices(which, devices) == [devices[index] for index in indices]


@pytest.mark.parametrize("which", ["9", 0, "-1", "[8]", [8], [], "some", "[1,1]", "[a]", "5.5"])
def test_missing_devices_are_refused(which, devices):
    with pytest.raises(InputError, match="device"):
        select_devices(which, devices)


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@given(st.lists(st.integers(1, 2048), min_size=0, max_size=3).map(tuple), st.integers(1, 12))
def test_fsdp_splits_large_leaves_evenly_along_one_or_several_axes(shape, count):
    mesh = make_mesh([*map(Device, range(count))])
    sharding = leaf_sharding(shape, 4, mesh, "fsdp")
    parts = [length // part for length, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    divisible = [length for length in shape if length % count == 0]
    if count == 1 or math.prod(shape) * 4 < MIN_SHARDED_BYTES:
        assert set(parts) <= {1}
    elif divisible:
        roomy = [length for length in shape[:-1] if length % count == 0 and length // count >= MIN_PART_ROWS]
        taken = max(roomy or divisible)
        assert parts[shape.index(taken)] == math.prod(parts) == count
    else:  # as many parts as possible
        splits = itertools.product(range(1, count + 1), repeat=len(shape))
        possible = [math.prod(split) for split in splits if not any(map(operator.mod, shape, split))]
        assert math.prod(parts) == max(number for number in possible if count % number == 0)
    assert leaf_sharding(shape, 4, mesh, "replicate").is_fully_replicated


@pytest.mark.parametrize(("hosts", "devices_of_host"), [(2, 4), (3, 2), (4, 3)])
def test_each_host_holds_all_parts_split_as_far_as_possible(hosts, devices_of_host):
    mesh = make_mesh([Device(number, number % hosts) for number in range(hosts * devices_of_host)])
    shape = (2**5 * 3 * 19, 2**4 * 9 * 19)
    divided = within_host_sharding(leaf_sharding(shape, 4, mesh, "fsdp"))
    parts = divided.devices_indices_map(shape)
    for host in range(hosts):
        mine = {str(index) for device, index in parts.items() if device.process_index == host}
        assert len(mine) == devices_of_host == math.prod(shape) // math.prod(divided.shard_shape(shape))


@pytest.mark.parametrize("count", [6, 8])
def test_leaf_split_along_several_axes_computes_the_same(count, devices):
    mesh = make_mesh(devices[:count])
    weights = np.random.default_rng(0).standard_normal((1026, 1028)).astype(np.float32)  # 2 · 3³ · 19 and 2² · 257
    sharding = leaf_sharding(weights.shape, 4, mesh, "fsdp")
    assert weights.size // math.prod(sharding.shard_shape(weights.shape)) == count
    rows = jax.device_put(np.ones((count, 1026), np.float32), batch_sharding(mesh))
    step = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ gathered(w)) ** 2)), out_shardings=sharding)
    with jax.set_mesh(mesh):
        found = step(jax.device_put(weights, sharding), rows)
    assert found.sharding == sharding
    np.testing.assert_allclose(found, 2 * count * np.tile(weights.sum(0), (1026, 1)), rtol=1e-4, atol=1e-3)

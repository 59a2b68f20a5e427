"""GPT-2's model, loss and sampling; test_pretrained.py compares their numbers with transformers'."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpuswarm.errors import InputError
from tpuswarm.recipes import find
from tpuswarm.recipes.gpt2 import attention, model, sample
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import loss
from tpuswarm.recipes.language.sampling import draw, make_sampling
from tpuswarm.train.program.compiled import trace
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.request import Choice, default_request
from tpuswarm.train.recipe import Clock, Options
from tpuswarm.train.user_code import find_maker

CONFIG = Config(layers=3, heads=2, width=32, context=16, vocab=70)
TOKENS = np.random.default_rng(0).integers(0, 70, (3, 17)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    """Random everywhere, biases and scales too, so that none can be left out unnoticed."""
    fresh = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)
    leaves, structure = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def loss_of(params, options=Options(), config=CONFIG, key=None):  # noqa: B008  # frozen
    x_BxTxD = model.hidden(params, TOKENS[:, :-1], config, options, key)
    return loss.mean_loss(x_BxTxD, params["wte"], TOKENS[:, 1:], config.vocab), x_BxTxD


def loss_and_gradients(params, options=Options()):  # noqa: B008  # frozen
    return jax.jit(jax.value_and_grad(lambda params: loss_of(params, options)[0]))(params)


@pytest.fixture(scope="module")
def plain(params):
    return loss_and_gradients(params)


def clock(step):
    return Clock(jax.random.fold_in(jax.random.key(0), step), np.int32(step), np.float32(0))


def kernel_calls(text: str, kernel: str) -> int:
    """Count the calls of a kernel in a program's text, from its main through the functions that it calls."""
    functions = {re.match(r"\w+ @([\w.]+)", part)[1]: part for part in text.split("func.func ")[1:]}

    def count(name: str) -> int:
        called = re.findall(r"(?<!custom_)call @([\w.]+)\(", functions[name])
        return functions[name].count(f"custom_call @{kernel}(") + sum(map(count, called))

    return count("main")


def test_124m_step_lowers_for_cuda_with_cudnn_attention_and_unrolled_layers(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91_300)  # asked of the GPU's library, which is not here
    recipe = GPT2(size="124m", data="fake")
    program = recipe.program(default_request(recipe).options("gpu", "NVIDIA H200"))
    state = jax.eval_shape(program.init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = jax.jit(program.step).trace(state, dict(program.batch_spec(64)), clock(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert kernel_calls(text, kernel) == recipe.config.layers
    assert "tensor<64x128x50304xf32>" in text, "8192 tokens a chunk"
    assert text.count("stablehlo.while") == 1, "only the chunks of the head are a loop"


def test_124m_step_for_a_gpu_before_ampere_has_no_bfloat16_and_smaller_chunks():
    recipe = GPT2(size="124m", data="fake")
    options = default_request(recipe).options("gpu", "Tesla T4", (7, 5))
    program = recipe.program(replace(options, memory=11 * 2**30))
    state = jax.eval_shape(program.init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = jax.jit(program.step).trace(state, dict(program.batch_spec(64)), clock(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "cudnn" not in text and "bf16" not in text
    assert "tensor<64x32x50304xf32>" in text, "a 24th of 11 GiB: 2048 tokens a chunk"


@pytest.mark.parametrize(
    ("change", "chunks"), [({"loop": "unroll"}, 1), ({"remat": "full"}, 4), ({"loop": "unroll", "remat": "dots"}, 1)]
)
def test_unrolled_layers_recomputed_layers_and_chunks_of_tokens_have_the_same_gradients(
    params, plain, change, chunks, monkeypatch
):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 3 * 16 // chunks * 128 * 4)
    assert loss.chunk_count(3, 16, 128) == chunks
    for a, b in zip(
        jax.tree.leaves(plain), jax.tree.leaves(loss_and_gradients(params, Options(**change))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("vocab", [97, 128])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.02, 0.2)])
def test_loss_and_its_gradients_are_those_of_the_formula(vocab, chunks, dtype, z_loss, smoothing):
    numbers = np.random.default_rng(0)
    config = replace(CONFIG, width=32, context=16, vocab=vocab)
    x_BxTxD = jnp.asarray(numbers.normal(size=(3, 16, 32)), dtype)
    wte_VxD = jnp.asarray(numbers.normal(size=(128, 32)), dtype).astype(jnp.float32)
    targets_BxT = numbers.integers(0, vocab, (3, 16))

    options = loss.LossOptions(3 * 16 // chunks * 128 * 4, z_loss, smoothing)

    def formula(x_BxTxD, wte_VxD):
        logits_BxTxV = jnp.einsum("btd,vd->btv", x_BxTxD.astype(jnp.float32), wte_VxD[:vocab])
        wanted_BxTxV = optax.smooth_labels(jax.nn.one_hot(targets_BxT, vocab), smoothing)
        z = jax.nn.logsumexp(logits_BxTxV, axis=-1) ** 2
        return (optax.softmax_cross_entropy(logits_BxTxV, wanted_BxTxV) + z_loss * z).mean()

    def ours(x_BxTxD, wte_VxD):
        return loss.mean_loss(x_BxTxD, wte_VxD, jnp.asarray(targets_BxT), config.vocab, options)

    by_both = partial(jax.value_and_grad, argnums=(0, 1))
    expected, expected_gradients = by_both(lambda *args: 3 * formula(*args))(x_BxTxD, wte_VxD)
    value, gradients = by_both(lambda *args: 3 * ours(*args))(x_BxTxD, wte_VxD)
    np.testing.assert_allclose([value, 3 * jax.jit(ours)(x_BxTxD, wte_VxD)], expected, rtol=1e-6)
    error = 1e-6 if dtype == jnp.float32 else 4e-3
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == right.dtype
        gradient, right = (np.asarray(each, np.float32) for each in (gradient, right))
        assert np.linalg.norm(gradient - right) < error * np.linalg.norm(right)
    assert not np.any(gradients[1][vocab:])


def test_chunks_add_no_rounding_to_the_gradient_of_the_head():
    """A sum of 64 chunks in bf16 had four times the error of one chunk."""
    numbers = np.random.default_rng(0)
    config = replace(CONFIG, width=64, context=64, vocab=256)
    x_BxTxD, targets_BxT = numbers.normal(size=(32, 64, 64)), numbers.integers(0, 256, (32, 64))
    wte_VxD = jnp.asarray(numbers.normal(size=(256, 64)) * 0.1, jnp.float32)

    def gradient(dtype, chunks):
        of_chunks = partial(loss.mean_loss, jnp.asarray(x_BxTxD, dtype), targets_BxT=targets_BxT, vocab=config.vocab)
        grad = jax.grad(lambda wte_VxD: of_chunks(wte_VxD, options=loss.LossOptions(32 * 64 // chunks * 256 * 4)))
        return np.asarray(jax.jit(grad)(wte_VxD), np.float64)

    exact = gradient(jnp.float32, 1)
    errors = [np.linalg.norm(gradient(jnp.bfloat16, chunks) - exact) for chunks in (1, 64)]
    assert errors[1] < 1.1 * errors[0] < 0.003 * np.linalg.norm(exact)


def test_embedding_is_gathered_in_bf16_for_both_uses(devices):
    """In float32 it was twice the bytes, under fsdp the largest thing that travels."""
    recipe = GPT2(data="fake", width=256, layers=1, heads=2, vocab=512, context=32)
    choice = Choice("fsdp", remat="none", accumulate=1, why="")
    traced = trace(recipe, Options(precision="bf16"), choice, 16, make_mesh(devices)).step
    lines = [line for line in traced.lower().as_text().splitlines() if "sharding_constraint" in line]
    found = [match[1] for line in lines if (match := re.search(r"tensor<512x256x(\w+)>", line))]
    assert sorted(found) == ["bf16", "bf16", "f32", "f32"], "two uses; their gradients are not rounded"


def test_compiled_step_never_holds_all_logits_in_float32():
    recipe = GPT2(data="fake", context=512, vocab=16384, layers=1, heads=1, width=32)
    program = recipe.program(Options(precision="bf16"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    compiled = jax.jit(program.step).lower(state, program.batch_spec(16), clock(0)).compile()
    everything = 16 * 512 * 16384 * 4
    arrays = [np.prod([int(n) for n in m.split(",")]) * 4 for m in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
    assert max(arrays) <= loss.CHUNK_BYTES < everything / 3


@pytest.mark.parametrize(
    ("size", "count"), [("124m", 124_439_808), ("355m", 354_823_168), ("774m", 774_030_080), ("1558m", 1_557_611_200)]
)
def test_sizes_have_the_parameters_of_the_released_models(size, count):
    """Counts of openai-community/gpt2, -medium, -large and -xl; our vocabulary's padding taken off."""
    recipe = GPT2(size=size, data="fake")
    params = jax.eval_shape(lambda key: model.init(key, recipe.config), jax.random.key(0))
    padding = (recipe.config.padded_vocab - 50257) * recipe.config.width
    assert recipe.config.padded_vocab == 50304
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) - padding == count


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_model_keeps_its_dtypes_under_strict_promotion(params, plain, precision):
    options = Options(precision=precision)
    with jax.numpy_dtype_promotion("strict"):
        config = replace(CONFIG, dropout=0.1)
        value, x_BxTxD = jax.eval_shape(lambda params: loss_of(params, options, config, jax.random.key(0)), params)
        jax.eval_shape(jax.grad(lambda params: loss_of(params, options, config, jax.random.key(0))[0]), params)
    assert value.dtype == jnp.float32 and x_BxTxD.dtype == (jnp.bfloat16 if precision == "bf16" else jnp.float32)
    assert float(jax.jit(loss_of, static_argnums=1)(params, options)[0]) == pytest.approx(float(plain[0]), rel=0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_drops_its_share_and_keeps_the_mean(dtype):
    dropped = np.float32(attention.dropout(jnp.ones((200, 200), dtype), 0.1, jax.random.key(0)))
    assert set(np.unique(dropped)) == {0.0, np.float32(dtype(1 / 0.9))}
    np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.02)
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 100_000), dtype)
    dropped = np.float64(attention.dropout(x, 0.1, jax.random.key(0)))
    assert 0.9 * dropped.sum() == pytest.approx(np.float64(x)[dropped != 0].sum(), rel=1e-4)  # not bfloat16's 0.8984
    assert (attention.dropout(jnp.ones(5), 0.25, None) == 1).all()


def test_dropout_is_used_in_training_and_not_in_evaluation():
    recipe = GPT2(data="fake", dropout=0.5, layers=1, heads=2, width=32, context=16)
    program = recipe.program(Options())
    state = jax.jit(program.init)(jax.random.key(0))
    state = replace(state, params=jax.tree.map(lambda p: p + 0.1, state.params))
    rows = recipe.data("train").rows(0, 4)
    step, evaluate = jax.jit(program.step), jax.jit(program.evaluate)
    assert step(state, rows, clock(0))[1]["loss"] != step(state, rows, clock(1))[1]["loss"]
    assert evaluate(state, rows)["loss"] == evaluate(state, rows)["loss"]


@pytest.mark.parametrize(
    ("wanted", "change", "precision", "form"),
    [
        ("cudnn", {}, "bf16", "cudnn"),
        ("cudnn", {}, "f32", "xla"),
        ("cudnn", {"dropout": 0.1}, "bf16", "xla"),
        ("splash", {"context": 256}, "bf16", "splash"),
        ("splash", {"context": 256, "dropout": 0.1}, "bf16", "xla"),
    ],
)
def test_attention_kernel_is_used_only_if_it_supports_the_model(wanted, change, precision, form):
    assert attention.form_of(replace(CONFIG, **change), Options(precision=precision, attention=wanted)) == form


def logits_of(params, tokens):
    """Logits of the whole context, without a cache."""
    x_BxTxD = model.hidden(params, tokens, CONFIG, Options(), None)
    return np.asarray(loss.logits(x_BxTxD, params["wte"], CONFIG.vocab))[..., : CONFIG.vocab]


@pytest.mark.parametrize("length", [1, 5, 15])
def test_cached_decoding_has_the_logits_of_the_whole_context(params, length):
    padded = np.zeros((1, 16), np.int32)
    padded[0, :length] = TOKENS[0, :length]
    cache, first = sample.prefill(params, padded, np.int32(length), CONFIG, Options())
    decode = jax.jit(sample.decode, static_argnums=(4, 5))
    found = [first[0]]
    for position in range(length, 16):
        cache, next_logits = decode(params, cache, TOKENS[:1, position], jnp.int32(position), CONFIG, Options())
        found.append(next_logits[0])
    wanted = logits_of(params, TOKENS[:1, :16])[0, length - 1 :]
    np.testing.assert_allclose(np.stack(found)[:, : CONFIG.vocab], wanted, rtol=1e-4, atol=1e-4)


def drawn(params, prompt, count, temperature, seed):
    chunks = sample.generate(params, prompt, count, make_sampling(temperature), seed, CONFIG, Options())
    return [token for chunk in chunks for token in chunk]


def test_greedy_sampling_goes_on_past_the_end_of_the_context(params):
    prompt = TOKENS[0, :3].tolist()
    window, expected = list(prompt), []
    for _ in range(20):
        if len(window) == 16:
            window = window[-8:]
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(window)] = window
        expected.append(int(logits_of(params, padded)[0, len(window) - 1].argmax()))
        window.append(expected[-1])
    assert drawn(params, prompt, 20, 0.0, 0) == expected


def test_samples_follow_temperature_and_seed(params):
    draws = [tuple(drawn(params, [1], 12, 1.0, seed)) for seed in (0, 0, 1, 2)]
    assert draws[0] == draws[1] and len(set(draws)) == 3
    assert all(0 <= token < CONFIG.vocab for draw in draws for token in draw)
    logits, keys = jnp.log(jnp.array([[0.7, 0.2, 0.1]])), jax.random.split(jax.random.key(0), 4000)
    tokens = jax.vmap(lambda key: draw(logits, make_sampling(1.0), TOKENS[:1], jnp.int32(1), key)[0])(keys)
    np.testing.assert_allclose(np.bincount(tokens) / 4000, [0.7, 0.2, 0.1], atol=0.03)


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt2-tiny", "tiny"), ("gpt2-117m", "124m"), ("GPT2-345M", "355m"), ("gpt2", "124m"), ("gpt2-xl", "1558m")],
)
def test_size_has_its_parameter_count_and_openais_label(name, size):
    target, preset = find(name)
    assert preset == {"size": size} and find_maker(target) is GPT2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 100, "heads": 3}, "width of 100 does not divide evenly over 3 heads"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"context": 1}, "context must be at least 2, not 1"),
        ({"lr": -1.0}, "lr must be above 0, not -1.0"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, not 1.0"),
        ({"size": "125m"}, "unknown size '125m'; did you mean 124m"),
    ],
)
def test_impossible_shape_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        GPT2(data="fake", **options)


def test_schedule_warms_up_and_decays_to_its_end():
    recipe = GPT2(data="fake", lr=1.0, lr_end=0.1, warmup=0.1)
    rates = [float(recipe.schedule(jnp.float32(progress))) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    np.testing.assert_allclose(rates, [0.01, 0.5, 1.0, 0.55, 0.1], rtol=1e-5)

"""Decoders beside transformers: logits, gradients, sampled tokens and exports of every family."""

import copy
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.recipes.decoder import adapter_config, architecture, export, lora, model, weights
from tpuswarm.recipes.decoder.config import Lora
from tpuswarm.recipes.decoder.sample import generate
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.sampling import keep_likely, make_sampling, penalize
from tpuswarm.train.paths import overlay
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": ("llama", {}),
    "llama of all heads": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0, "tie_word_embeddings": True}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen 2.5": ("qwen2", {"tie_word_embeddings": True}),
    "qwen 2.5 yarn": (
        "qwen2", {"rope_scaling": YARN, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen 3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma 2": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6}),
    "gemma 3": (
        "gemma3_text",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6, "sliding_window_pattern": 3},
    ),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo 2": ("olmo2", {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def theirs(request, tmp_path_factory):
    """A tiny model with random weights, and the folder that holds it."""
    family, changes = MODELS[request.param]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SHAPE | changes, attn_implementation="eager")
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms and biases start at 0 or 1
                parameter += 0.3 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, Published(f"hf:{folder}", folder)


def read(place):
    config = architecture.parse_config(architecture.facts_of(place), place.name)
    like = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like)
    return config, weights.load(place, config, like)


def greedy(made, prompt, count, **options):
    """What transformers draws with its own cache."""
    options |= {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        drawn = made.generate(torch.tensor([prompt]), **options)
    return drawn[0, len(prompt) :].tolist()


def test_sampled_tokens_are_those_of_transformers(theirs):
    made, place = theirs
    config, params = read(place)
    prompt = [5, 17, 3, 99, 42, 7, 8, 9, 10, 11, 12]
    for penalty, sampling in [(1.0, make_sampling(0.0)), (1.3, make_sampling(0.0, repetition_penalty=1.3))]:
        chunks = generate(params, prompt, 20, sampling, 0, config, Options(precision="highest"))
        assert [*itertools.chain(*chunks)] == greedy(made, prompt, 20, repetition_penalty=penalty)


def test_tokens_are_left_out_as_in_transformers():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32) * 3
    tokens = np.random.default_rng(1).integers(0, 50, (3, 12))
    for temperature, top_k, top_p, penalty in itertools.product(
        [0.7, 1.5], [None, 5, 80], [None, 0.3, 0.9], [None, 1.4]
    ):
        theirs = transformers.LogitsProcessorList()
        if penalty:
            theirs.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
        theirs.append(transformers.TemperatureLogitsWarper(temperature))
        if top_k:
            theirs.append(transformers.TopKLogitsWarper(top_k))
        if top_p:
            theirs.append(transformers.TopPLogitsWarper(top_p))
        wanted = theirs(torch.tensor(tokens[:, :9]), torch.tensor(logits)).numpy()
        sampling = make_sampling(temperature, top_k, top_p, penalty)
        found = keep_likely(penalize(jnp.asarray(logits), sampling, tokens, np.int32(9)), sampling)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_export_is_the_same_model_in_transformers(theirs, tmp_path):
    made, place = theirs
    config, params = read(place)
    export.write(params, config, architecture.facts_of(place), None, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = torch.arange(1, 33)[None]
    torch.testing.assert_close(again(tokens).logits, made(tokens).logits, rtol=0, atol=0)


def test_bfloat16_is_as_near_to_float32_as_in_transformers(theirs):
    made, place = theirs
    config, params = read(place)
    tokens = np.random.default_rng(1).integers(1, SHAPE["vocab_size"], (4, 32))
    exact = made(torch.tensor(tokens)).logits.detach().numpy()
    half = copy.deepcopy(made).to(torch.bfloat16)(torch.tensor(tokens)).logits.float().detach().numpy()
    x = model.hidden(params, jnp.asarray(tokens), config, Options(precision="bf16"))
    ours = np.asarray(model.logits(x, params, config))[..., : config.vocab]
    assert np.square(ours - exact).mean() < 1.5 * np.square(half - exact).mean()


def test_logits_and_gradients_are_those_of_transformers(theirs):
    made, place = theirs
    config, params = read(place)
    tokens = np.random.default_rng(0).integers(1, SHAPE["vocab_size"], (2, 33))
    options = Options(precision="highest")

    def loss(params):
        with jax.default_matmul_precision("highest"):
            x = model.hidden(params, jnp.asarray(tokens[:, :-1]), config, options)
            logits = model.logits(x, params, config)[..., : config.vocab]
            return model.mean_loss(x, params, jnp.asarray(tokens[:, 1:]), config), logits

    (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    out = made(torch.tensor(tokens[:, :-1])).logits
    expected = torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten())
    expected.backward()
    np.testing.assert_allclose(logits, out.detach().numpy(), rtol=1e-5, atol=1e-5 * float(out.abs().max()))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    flat = weights.by_path(gradients)
    named = dict(made.named_parameters())
    for tensor in weights.tensors(config):
        wanted = named[tensor.name].grad.numpy()
        ours = weights.on_host(flat, tensor)
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=tensor.name)


def test_text_part_of_a_model_that_reads_pictures_is_trained_and_exported_alone(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=SHAPE | MODELS["gemma 3"][1], mm_tokens_per_image=4, attn_implementation="eager",
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        image_token_index=150, boi_token_index=151, eoi_token_index=152,
    )  # fmt: skip
    made = transformers.Gemma3ForConditionalGeneration(config).eval()
    made.save_pretrained(tmp_path / "whole")
    place = Published("hf:whole", tmp_path / "whole")
    config, params = read(place)
    tokens = np.random.default_rng(0).integers(1, 150, (2, 32))
    wanted = made(input_ids=torch.tensor(tokens)).logits
    with jax.default_matmul_precision("highest"):
        x = model.hidden(params, jnp.asarray(tokens), config, Options(precision="highest"))
        found = model.logits(x, params, config)[..., : config.vocab]
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    (tmp_path / "text").mkdir()
    export.write(params, config, architecture.facts_of(place), None, tmp_path / "text")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert isinstance(text, transformers.Gemma3ForCausalLM)
    torch.testing.assert_close(text(torch.tensor(tokens)).logits, wanted, rtol=0, atol=0)


LORA = Lora(rank=4, alpha=6.0, base="f32")


@pytest.fixture
def adapted(theirs):
    """peft's model with random adapters on a copy of `theirs`, and ours with the same."""
    peft = pytest.importorskip("peft")
    made, place = theirs
    config = replace(read(place)[0], lora=LORA)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    form = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=modules, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(made), form).eval()
    params = lora.init(jax.random.key(0), read(place)[1], LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    named = dict(wrapped.named_parameters())

    def as_theirs(path, layer_count, kind):
        names = [f"base_model.model.model.layers.{layer}.{path}.{kind}.default.weight" for layer in range(layer_count)]
        return jnp.stack([named[name].detach().numpy().T for name in names])

    for tensor in weights.tensors(config):
        _, part, name = (*tensor.path.split("/"), "", "")[:3]
        if tensor.layer == 0 and tensor.path.endswith("/w"):
            path = tensor.name.removeprefix("model.layers.0.").removesuffix(".weight")
            params["blocks"][part][name] |= {
                ours: as_theirs(path, len(config.layers), kind)
                for ours, kind in (("lora_a", "lora_A"), ("lora_b", "lora_B"))
            }
    return wrapped, config, params


def test_adapters_give_the_logits_and_gradients_of_peft(adapted):
    wrapped, config, params = adapted
    tokens = np.random.default_rng(0).integers(1, SHAPE["vocab_size"], (2, 33))
    base, adapters = lora.split(params)

    def loss(adapters):
        with jax.default_matmul_precision("highest"):
            params = overlay(base, adapters)
            x = model.hidden(params, jnp.asarray(tokens[:, :-1]), config, Options(precision="highest"))
            logits = model.logits(x, params, config)[..., : config.vocab]
            return model.mean_loss(x, params, jnp.asarray(tokens[:, 1:]), config), logits

    (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(adapters)
    out = wrapped(torch.tensor(tokens[:, :-1])).logits
    expected = torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten())
    expected.backward()
    np.testing.assert_allclose(logits, out.detach().numpy(), rtol=1e-5, atol=1e-5 * float(out.abs().max()))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    theirs = {name: parameter.grad for name, parameter in wrapped.named_parameters() if "lora_" in name}
    ours = weights.by_path(gradients)
    for tensor in weights.tensors(config):
        prefix, module = tensor.path.removesuffix("/w"), tensor.name.removesuffix(".weight")
        for name, kind in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            if f"{prefix}/{name}" in ours:
                wanted = theirs.pop(f"base_model.model.{module}.{kind}.default.weight").numpy().T
                found = ours[f"{prefix}/{name}"][tensor.layer]
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=module)
    assert not theirs


def test_exported_adapter_and_merged_model_are_the_same_in_peft_and_transformers(theirs, adapted, tmp_path):
    peft = pytest.importorskip("peft")
    wrapped, config, params = adapted
    made, place = theirs
    tokens = torch.arange(1, 33)[None]
    expected = wrapped(tokens).logits
    lora.write(params, config, LORA, str(place.folder), tmp_path)
    about = peft.PeftConfig.from_pretrained(tmp_path)
    assert about.base_model_name_or_path == str(place.folder) and about.task_type == "CAUSAL_LM"
    again = peft.PeftModel.from_pretrained(copy.deepcopy(made), tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=0)
    (tmp_path / "merged").mkdir()
    export.write(params, config, architecture.facts_of(place), None, tmp_path / "merged")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    merged = copy.deepcopy(wrapped).merge_and_unload().state_dict()
    for name, tensor in whole.state_dict().items():  # not logits, in which the last bits of the sums grow
        limit = 1e-6 * float(merged[name].abs().max())
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=limit, msg=name)


def test_adapters_saved_by_peft_are_read(adapted, tmp_path):
    wrapped, config, params = adapted
    wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
    place = Published(f"hf:{tmp_path}", tmp_path)
    found = adapter_config.read_options(place)
    assert (found["lora"], found["lora_alpha"], found["lora_targets"]) == (4, 6.0, ",".join(LORA.targets))
    assert "lora_base" not in found  # theirs has no name
    adapters = lora.split(params)[1]
    read = weights.load_adapters(place, config, LORA, adapters)
    jax.tree.map(np.testing.assert_array_equal, read, adapters)


def test_dropout_and_rslora_are_those_of_peft_in_distribution():
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **SHAPE | {"num_hidden_layers": 1}, attn_implementation="eager")
    torch.manual_seed(0)
    form = peft.LoraConfig(
        r=4, lora_alpha=6.0, lora_dropout=0.3, use_rslora=True, target_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), form)
    layer = wrapped.base_model.model.model.layers[0].mlp.down_proj
    with torch.no_grad():
        layer.lora_B.default.weight.normal_()
    p = {
        "w": layer.base_layer.weight.detach().numpy().T, "lora_a": layer.lora_A.default.weight.detach().numpy().T,
        "lora_b": layer.lora_B.default.weight.detach().numpy().T,
    }  # fmt: skip
    inputs = np.random.default_rng(0).normal(size=(1, p["w"].shape[0])).astype(np.float32)
    ours_config = replace(
        architecture.parse_config(config.to_dict() | {"pad_token_id": 0}, "theirs"),
        lora=Lora(4, 6.0, ("down_proj",), "f32", 0.3, by_root=True),
    )
    options = Options(precision="highest")

    def ours(key):
        with jax.default_matmul_precision("highest"):
            return model.linear(
                jnp.asarray(inputs), p | ({"dropout_key": key} if key is not None else {}), ours_config, options
            )

    wrapped.eval()
    with torch.no_grad():
        np.testing.assert_allclose(ours(None), layer(torch.tensor(inputs)).numpy(), rtol=1e-5, atol=1e-5)
        wrapped.train()
        draws = 20_000
        theirs = layer(torch.tensor(np.repeat(inputs, draws, 0))).numpy()
    found = np.asarray(jax.vmap(ours)(jax.random.split(jax.random.key(0), draws)))[:, 0]
    error = theirs.std(0) / draws**0.5
    assert np.all(np.abs(found.mean(0) - theirs.mean(0)) < 6 * error)
    np.testing.assert_allclose(found.std(0), theirs.std(0), rtol=0.04)
    quantiles = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(
        np.quantile(found, quantiles, 0), np.quantile(theirs, quantiles, 0), atol=0.06 * theirs.std(0).max()
    )

"""Published weights are read as transformers wrote them; other or damaged ones are refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2 import model, pretrained
from tpuswarm.recipes.gpt2.export import tensors
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import loss
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.train.recipe import Options

GOLDEN = Path(__file__).with_name("golden")
SHAPE = {"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab": 300}
PLACE = f"hf:{GOLDEN / 'model'}"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "model", tmp_path / "model"))


@pytest.fixture
def recipe(text_file) -> GPT2:
    return recipe_with(text_file)


def recipe_with(text_file, **options) -> GPT2:
    return GPT2(**{**SHAPE, "data": str(text_file), "tokenizer": PLACE, **options})


def like(recipe: GPT2, spec=lambda *shape: PartitionSpec(), devices=1):
    """Shapes of the parameters, each with the sharding that `spec` gives for its shape."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    shapes = jax.eval_shape(partial(model.init, config=recipe.config), jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(*leaf.shape))),
        shapes,
    )


def load(recipe: GPT2, folder: Path):
    return recipe.load_shared(f"hf:{folder}", like(recipe))


def edit_config(copy: Path, **settings: object) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_weights(copy: Path, **arrays: np.ndarray | None) -> None:
    """Set tensors of model.safetensors; None removes one."""
    weights = load_file(copy / "model.safetensors") | arrays
    save_file({name: array for name, array in weights.items() if array is not None}, copy / "model.safetensors")


def test_logits_loss_and_gradients_are_transformers(recipe):
    check_results(recipe, GOLDEN)


def check_results(recipe: GPT2, folder: Path) -> None:
    """Compare our logits, loss and gradients of the weights in `folder`/model with transformers' beside it."""
    config = recipe.config
    params = load(recipe, folder / "model")
    golden = load_file(folder / "results.safetensors")
    inputs, targets = golden["tokens"][:, :-1], golden["tokens"][:, 1:]

    def loss_of(params):
        x_BxTxD = model.hidden(params, inputs, config, Options(), None)
        return loss.mean_loss(x_BxTxD, params["wte"], targets, config.vocab), x_BxTxD

    (value, x_BxTxD), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    logits = np.asarray(loss.logits(x_BxTxD, params["wte"], config.vocab))
    assert relative(logits[..., : config.vocab], golden["logits"]) < 1e-4
    assert (logits[..., config.vocab :] < -1e29).all(), "the padding is never likely"
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-4)
    ours = tensors(grads, config)
    theirs = {name.removeprefix("grad/"): grad for name, grad in golden.items() if name.startswith("grad/")}
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert relative(ours[name], grad) < 1e-4, name


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_shards_are_parts_of_the_whole_and_padding_is_zero(recipe):
    def first_that_divides(*shape):
        axis = next((axis for axis, size in enumerate(shape) if size % 4 == 0), None)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")

    one, four = (recipe.load_shared(PLACE, shapes) for shapes in (like(recipe), like(recipe, first_that_divides, 4)))
    assert four["wte"].sharding.shard_shape(four["wte"].shape) == (96, 16)  # the last is of padding alone
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(one["wte"])[300:].any() and np.asarray(one["wte"])[:300].all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_are_read_in_all_published_forms(copy, recipe, dtype):
    """Without prefix, in other floats, in several files, with masks."""
    stored = load_file(copy / "model.safetensors")
    other = {name.removeprefix("transformer."): array.astype(dtype) for name, array in stored.items()}
    other["h.0.attn.bias"] = np.ones((1, 1, 12, 12), np.float16)
    other["h.1.attn.masked_bias"] = np.full((), -1e4, np.float16)
    other["lm_head.weight"] = other["wte.weight"].copy()
    (copy / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(other)[:9], "b.safetensors": sorted(other)[9:]}
    for part, names in parts.items():
        save_file({name: other[name] for name in names}, copy / part)
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    expected, found = (jax.tree.leaves(load(recipe, folder)) for folder in (GOLDEN / "model", copy))
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))


def test_shorter_context_takes_the_first_positions(text_file):
    params = load(recipe_with(text_file, context=8), GOLDEN / "model")
    stored = load_file(GOLDEN / "model/model.safetensors")["transformer.wpe.weight"]
    np.testing.assert_array_equal(params["wpe"], stored[:8])


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("h.1.mlp.c_fc.bias", None, r"is missing h.1.mlp.c_fc.bias; its shape has 28"),
        ("h.2.ln_1.bias", np.zeros(16, np.float32), r"has an unknown tensor, h.2.ln_1.bias"),
        ("h.0.attn.c_attn.weight", np.zeros((48, 16), np.float32), r"c_attn.weight of .* is \(48, 16\), .* \(16, 48\)"),
        ("wpe.weight", np.zeros((13, 16), np.float32), r"wpe.weight of .* is \(13, 16\), .* says \(12, 16\)"),
        ("ln_f.weight", np.zeros(16, np.int32), r"ln_f.weight of .* is I32, not one of F64"),
    ],
)
def test_wrong_tensor_is_named(copy, recipe, name, array, words):
    edit_weights(copy, **{f"transformer.{name}": array})
    with pytest.raises(InputError, match=words):
        load(recipe, copy)


def test_untied_head_is_refused(copy, recipe):
    edit_weights(copy, **{"lm_head.weight": load_file(copy / "model.safetensors")["transformer.wte.weight"] + 1})
    with pytest.raises(InputError, match=r"lm_head.weight of .* differs from its wte.weight"):
        load(recipe, copy)


def test_digest_follows_the_weights_and_not_the_folder(copy, recipe):
    assert recipe.shared_digest(f"hf:{copy}") == recipe.shared_digest(PLACE)
    edit_weights(copy, **{"transformer.ln_f.bias": np.ones(16, np.float32)})
    assert recipe.shared_digest(f"hf:{copy}") != recipe.shared_digest(PLACE)
    (copy / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no model.safetensors, so no weights"):
        recipe.shared_digest(f"hf:{copy}")


def test_damaged_or_missing_files_are_reported(copy, recipe):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(InputError, match=r"model.safetensors is damaged or not a safetensors file"):
        load(recipe, copy)
    weights.rename(copy / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"has no model.safetensors, so no weights \(pickles are not read"):
        load(recipe, copy)
    (copy / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match=r"index.json does not say which files hold the weights"):
        load(recipe, copy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "llama"}, "has the architecture llama, not gpt2"),
        ({"activation_function": "relu"}, r"has activation_function relu, .* \(it uses gelu_new\)"),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx True"),
        ({"layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon 1e-06"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings False"),
        ({"n_inner": 48}, "has n_inner 48; this GPT-2 uses 4 x width, 64"),
        ({"n_layer": "two"}, "config.json of .* cannot be read"),
        ({"n_layer": 3, "n_positions": 8}, "has layers 3, context 8, .*; use --layers 3 --context 8"),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, "; train gpt2-124m with its own layers, "),
        ({"vocab_size": 299}, "has vocab 299, this one has vocab 300; use --vocab 299"),
    ],
)
def test_other_architecture_or_size_is_refused_with_a_remedy(copy, recipe, settings, words):
    edit_config(copy, **settings)
    with pytest.raises(InputError, match=words):
        load(recipe, copy)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokenizer_of_other_weights_is_refused(text_file, tokenizer):
    with pytest.raises(InputError, match=r"belong to another tokenizer .* leave out --tokenizer"):
        load(recipe_with(text_file, tokenizer=tokenizer), GOLDEN / "model")


def test_vocabulary_smaller_than_the_tokenizers_is_refused(copy, text_file):
    with pytest.raises(InputError, match=r"needs a vocabulary of \d+, not 260; use --vocab"):
        recipe_with(text_file, vocab=260).config
    edit_config(copy, vocab_size=299)
    with pytest.raises(InputError, match=r"does not match its weights: it has 300 tokens, they have 299; restore"):
        GPT2.options_at(f"hf:{copy}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gtp2", "neither a run nor a published model .* did you mean gpt2"),
        ("hf:no/such/folder/here", "there is no folder no/such/folder/here, and .* is not the ORG/NAME"),
        ("hf:./here", "there is no folder here, and './here' is not the ORG/NAME"),
        ("hf:", "cannot be read|has no config.json|not the ORG/NAME"),
    ],
)
def test_unknown_model_is_reported(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        pretrained.read_config(open_published(name))

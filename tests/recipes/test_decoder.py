"""Decoders: a run goes on from a published model, and what is not supported is refused by name."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tests.recipes.test_pretrained import GOLDEN
from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder import export, model
from tpuswarm.recipes.decoder.architecture import parse_config
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language import weight_files
from tpuswarm.recipes.language.tokenizer import read_bpe
from tpuswarm.train.run.loaded import load_run
from tpuswarm.train.run.trust import rebuild_recipe
from tpuswarm.train.trainer import Trainer

FACTS = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 12,
    "tie_word_embeddings": False,
}  # fmt: skip
REPLICATED = PartitionSpec()


@pytest.fixture
def published(tmp_path):
    """A folder with a model of random weights, and its parameters."""
    return publish(tmp_path / "published")


def publish(folder):
    """Write a model of random weights, with GPT-2's kind of tokenizer."""
    recipe = Decoder(architecture=json.dumps(FACTS), data="fake")
    params = model.init(jax.random.key(3), recipe.config)
    params |= {name: params[name].at[recipe.vocab :].set(0) for name in ("embed", "head")}  # padding is not exported
    folder.mkdir()
    export.write(params, recipe.config, FACTS, read_bpe(GOLDEN / "model" / "tokenizer.json"), folder)
    return folder, params


def like(recipe, spec=REPLICATED, devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    shapes = jax.eval_shape(partial(model.init, config=recipe.config), jax.random.key(0))
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


@pytest.mark.parametrize("shard_bytes", [None, 4000])
def test_weights_are_read_as_they_were_written_whole_or_in_shards(published, tmp_path, monkeypatch, shard_bytes):
    folder, params = published
    if shard_bytes:
        monkeypatch.setattr(weight_files, "SHARD_BYTES", shard_bytes)
        recipe = Decoder(architecture=f"hf:{folder}", data="fake")
        folder = tmp_path / "sharded"
        folder.mkdir()
        export.write(params, recipe.config, FACTS, None, folder)
        assert len(list(folder.glob("*.safetensors"))) > 3
    recipe = Decoder(architecture=f"hf:{folder}", data="fake")
    older = folder / "model.safetensors"
    if older.exists():  # files of 2023 hold a buffer too
        buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        save_file(load_file(older) | buffer, older)
    jax.tree.map(np.testing.assert_array_equal, recipe.load_shared(f"hf:{folder}", like(recipe)), params)
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.unlink()
    with pytest.raises(InputError, match=f"has no {file.name}, so no weights"):
        recipe.load_shared(f"hf:{folder}", like(recipe))


def test_text_part_of_a_model_that_reads_pictures_is_read(tmp_path):
    facts = FACTS | {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"}
    text = Decoder(architecture=json.dumps(facts), data="fake")
    params = model.init(jax.random.key(3), text.config)
    params |= {name: params[name].at[text.vocab :].set(0) for name in ("embed", "head")}
    export.write(params, text.config, facts, None, tmp_path)
    path, name = tmp_path / "model.safetensors", f"hf:{tmp_path}"
    pictures = {"vision_tower.encoder.weight": np.ones(3), "multi_modal_projector.norm.weight": np.ones(3)}
    save_file({f"language_model.{part}": tensor for part, tensor in load_file(path).items()} | pictures, path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": facts, "vision_config": {"hidden_size": 3}})
    )
    recipe = Decoder(architecture=name, data="fake")
    jax.tree.map(np.testing.assert_array_equal, recipe.load_shared(name, like(recipe)), params)
    adapted = Decoder(architecture=name, data="fake", lora=2, base="f32")
    run = tmp_path / "run"
    Trainer(devices=1).fit(adapted, steps=1, batch=2, run=run, init_from=name)
    loaded = load_run(run, jax.devices()[:1])
    with pytest.raises(InputError, match=r"peft cannot add adapters to the text part alone of hf:.*; use --merge"):
        loaded.recipe.export(loaded.state, tmp_path)
    (tmp_path / "whole").mkdir()
    loaded.recipe.export_merged(loaded.state, tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "gemma3_text"
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(InputError, match="has no text_config"):
        Decoder(architecture=name, data="fake")


def test_rows_of_the_vocabulary_are_read_by_the_devices_that_hold_them(published):
    folder, params = published
    recipe = Decoder(architecture=f"hf:{folder}", data="fake")
    wanted = like(recipe, PartitionSpec("data"), devices=2)
    loaded = recipe.load_shared(f"hf:{folder}", {"embed": wanted["embed"], **like(recipe), "head": wanted["head"]})
    assert loaded["head"].sharding == wanted["head"].sharding
    np.testing.assert_array_equal(loaded["head"], params["head"])


def test_run_goes_on_from_a_published_model_and_comes_back(published, text_file, tmp_path):
    folder, _ = published
    recipe = Decoder(architecture=f"hf:{folder}", data=str(text_file))
    run = tmp_path / "run"
    Trainer(devices=1).fit(recipe, steps=2, batch=2, run=run, init_from=f"hf:{folder}")
    assert rebuild_recipe(run).config == recipe.config
    again = Decoder(architecture=json.dumps(FACTS | {"num_hidden_layers": 1}), data="fake")
    with pytest.raises(InputError, match="is another model than this recipe's"):
        again.load_shared(f"hf:{folder}", like(again))


def test_file_that_names_a_published_model_goes_on_from_its_weights(published, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = f'[train]\nrecipe = "hf:{published[0]}"\ndata = "fake"\nsteps = 1\nbatch = 8\nrun = "run"\n'
    (tmp_path / "run.toml").write_text(table)
    code, _, err = typed("train", "run.toml")
    assert code == 0 and f"parameters from hf:{published[0]}" in err, err


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_type": "qwen4"}, "has the architecture qwen4, which is unknown; did you mean qwen"),
        ({"model_type": "mixtral"}, "is a mixture of experts .mixtral."),
        ({"model_type": None}, "has the architecture None"),
        ({"hidden_act": "relu"}, "has the activation relu, which is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "scales positions by longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "is damaged: KeyError..low_freq_factor"),
        ({"num_key_value_heads": 3}, "has 4 heads and keys for 3, which must divide them"),
        ({"hidden_size": "wide"}, "is damaged"),
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1, which is not supported"),
        ({"experts": 8}, "has experts 8, which is unknown in a model of qwen3"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config"),
        ({"layer_types": ["full_attention"]}, "not 2 of sliding_attention, full_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(facts, words):
    with pytest.raises(InputError, match=words):
        Decoder(architecture=json.dumps(FACTS | facts), data="fake")


@pytest.mark.parametrize(
    ("facts", "names", "values"),
    [
        ({"model_type": "mistral", "sliding_window": None}, ["layers"], [None]),
        ({"model_type": "mistral"}, ["layers"], [4096]),
        ({"model_type": "mistral", "sliding_window": 7}, ["layers"], [7]),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
            ["score_cap"],
            [None],
        ),
        ({"model_type": "gemma2"}, ["score_cap", "logit_cap"], [50.0, 30.0]),
        ({"use_mrope": False, "tied_to": None}, ["norm_heads"], ["each"]),
    ],
)
def test_null_means_none_and_a_missing_field_means_the_familys_default(facts, names, values):
    config = parse_config(FACTS | facts, "theirs")
    found = {name: getattr(config, name) for name in names if name != "layers"}
    found |= {"layers": config.layers[0].window} if "layers" in names else {}
    assert found == dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "{"}, "architecture is the content of a config.json, not '{'"),
        ({"architecture": "[]"}, "architecture is the content of a config.json"),
        ({"architecture": json.dumps(FACTS), "layers": 3}, "--layers shapes a model that is trained from scratch"),
        ({"architecture": json.dumps(FACTS), "context": 13}, "has a context of 12, not 13: lower --context"),
        ({"size": "7b"}, "unknown size '7b'"),
        ({"heads": 3}, "has 3 heads and keys for 2"),
        ({"width": 0}, "width"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        Decoder(data="fake", **options)


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_export_of_a_run_is_a_published_model(text_file, tmp_path, tokenizer):
    small = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 16, "context": 8}
    recipe = Decoder(
        data=str(text_file), tokenizer=tokenizer, vocab=None if tokenizer == "characters" else 300, **small
    )
    result = Trainer(devices=1).fit(recipe, steps=1, batch=2, run=tmp_path / "run")
    recipe.export(load_run(result.run, jax.devices()[:1]).state, tmp_path)
    options = Decoder.options_at(f"hf:{tmp_path}")
    again = Decoder(**options, data=str(text_file))
    assert again.tokenizer.key == recipe.tokenizer.key and again.config == recipe.config
    again.load_shared(f"hf:{tmp_path}", like(again))
    other = Decoder(**options | {"tokenizer": "bytes"}, vocab=256, data=str(text_file))
    with pytest.raises(InputError, match="this recipe of 256: leave out --tokenizer and --vocab"):
        other.load_shared(f"hf:{tmp_path}", like(other))


def test_model_with_a_missing_tensor_or_another_tokenizer_is_refused(published):
    """Other damage of weight files: test_pretrained.py."""
    folder, _ = published
    path, name = folder / "model.safetensors", "model.layers.1.self_attn.q_norm.weight"
    recipe, tensors = Decoder(**Decoder.options_at(f"hf:{folder}"), data="fake"), load_file(path)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
    with pytest.raises(InputError, match=f"is missing {name}"):
        recipe.load_shared(f"hf:{folder}", like(recipe))
    (folder / "config.json").write_text(json.dumps(FACTS | {"vocab_size": 200}))
    with pytest.raises(InputError, match=r"the tokenizer of .* has 300 tokens, they have 200"):
        Decoder.options_at(f"hf:{folder}")

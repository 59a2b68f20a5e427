"""LoRA: adapters alone are trained, and leave a run as peft's files or as a whole model."""

import hashlib
import json
import shutil
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from tests.recipes.test_decoder import FACTS, like, publish
from tpuswarm import load
from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder import lora, model
from tpuswarm.recipes.decoder.config import TARGETS, Lora
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.decoder.weights import ADAPTER_FILE
from tpuswarm.recipes.language.dropout import dropout
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.recipes.language.weight_files import digest
from tpuswarm.train.paths import by_path
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.loaded import load_run
from tpuswarm.train.trainer import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model of random weights, and its parameters."""
    return publish(tmp_path_factory.mktemp("base") / "model")


@contextmanager
def other_norm(folder):
    """Change a model's weights for a while."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, file, metadata={"format": "pt"})
    try:
        yield
    finally:
        save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of three steps with adapters on that model."""
    folder, _ = base
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    adapters = {"lora": 3, "lora_alpha": 6, "lora_targets": "v_proj,q_proj,down_proj"}
    recipe = Decoder(architecture=f"hf:{folder}", data=str(text), **adapters, lr=0.1)
    run = text.parent / "run"
    Trainer(devices=1, save_every=2, keep=5).fit(recipe, steps=3, batch=2, run=run)
    return load_run(run, jax.devices()[:1])


def test_only_adapters_are_trained_and_the_base_stays_as_it_was_read(base, trained):
    _, published_params = base
    params = by_path(trained.state.params)
    names = {path for path in params if lora.is_adapter(path)}
    layers = ("attention/q", "attention/v", "mlp/down")
    assert names == {f"blocks/{layer}/lora_{matrix}" for layer in layers for matrix in "ab"}
    for path, wanted in by_path(published_params).items():
        assert params[path].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params[path], np.asarray(wanted.astype(jnp.bfloat16)), err_msg=path)
    assert all(params[path].dtype == jnp.float32 and np.any(np.asarray(params[path])) for path in names)
    moments = [leaf for path, leaf in by_path(trained.state.opt).items() if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(params[path].size for path in names)
    rows = {row.path: row for row in trained.placed.program.parameters(trained.state)}
    assert {path for path, row in rows.items() if not row.frozen} == names
    assert {path for path, row in rows.items() if row.decayed} == names
    assert trained.recipe.options()["weight_decay"] == 0 and Decoder(data="fake").options()["weight_decay"] == 0.1


def test_fresh_adapters_change_nothing_and_begin_as_in_peft():
    config = Decoder(architecture=json.dumps(FACTS), data="fake", lora=4, base="f32").config
    params = model.init(jax.random.key(0), config)
    plain, adapters = lora.split(params)
    tokens = np.arange(12, dtype=np.int32)[None]
    expected = model.hidden(plain, tokens, Decoder(architecture=json.dumps(FACTS), data="fake").config, Options())
    np.testing.assert_array_equal(model.hidden(params, tokens, config, Options()), expected)
    a = np.concatenate([np.ravel(leaf) for path, leaf in by_path(adapters).items() if path.endswith("q/lora_a")])
    assert np.abs(a).max() <= FACTS["hidden_size"] ** -0.5 and abs(a.mean()) < 0.05 and len({*a}) == a.size


def test_checkpoints_hold_adapters_alone_and_a_resumed_run_ends_with_the_same_bits(base, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run)
    assert all(map(lora.is_adapter, by_path(load(run)["params"])))
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    fit = partial(Trainer(devices=1, save_every=2, keep=5).fit, trained.recipe, steps=3, batch=2, run=run)
    resumed = fit()
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trained.state)
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    with other_norm(base[0]), pytest.raises(InputError, match="have changed or differ on this machine: SHA-256"):
        fit()


def test_base_model_is_taken_from_where_the_adapters_belong_to(base, tmp_path):
    folder, _ = base
    recipe = Decoder(architecture=f"hf:{folder}", data="fake", lora=2)
    fit = partial(Trainer(devices=1).fit, recipe, steps=1, batch=2)
    other = publish(tmp_path / "other")[0]
    with pytest.raises(InputError, match=f"these are adapters of hf:{folder}: to adapt hf:{other}, train hf:{other}"):
        fit(run=tmp_path / "run", init_from=f"hf:{other}")
    found = fit(run=tmp_path / "run", init_from=f"hf:{folder}", init_only="lora_a").state.params
    read = recipe.load_shared(f"hf:{folder}", like(recipe))
    np.testing.assert_array_equal(found["embed"], read["embed"])


def test_base_model_is_held_once_when_training_begins(base, trained):
    shared = trained.recipe.load_shared(f"hf:{base[0]}", trained.placed.program.exchange().get(trained.placed.state))
    state = trained.placed.init(jax.random.key(0), shared)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(shared))
    assert jax.tree.structure(state.params) == jax.tree.structure(shared)


def test_export_is_an_adapter_for_peft_and_with_merge_a_whole_model(base, trained, typed, tmp_path):
    folder, _ = base
    assert typed("export", str(trained.folder), str(tmp_path))[0] == 0
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(folder) and (about["r"], about["lora_alpha"]) == (3, 6.0)
    assert about["target_modules"] == ["q_proj", "v_proj", "down_proj"] and about["task_type"] == "CAUSAL_LM"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    q = trained.state.params["blocks"]["attention"]["q"]
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert len(tensors) == 12
    np.testing.assert_array_equal(tensors[name], np.asarray(q["lora_a"][1]).T)
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "model.safetensors").exists()
    whole = tmp_path / "whole"
    assert typed("export", str(trained.folder), str(whole), "--merge")[0] == 0
    merged = Decoder(architecture=f"hf:{whole}", data="fake")
    params = merged.load_shared(f"hf:{whole}", like(merged))
    wanted = q["w"].astype(jnp.float32) + 2 * jnp.matmul(q["lora_a"], q["lora_b"], precision="highest")
    np.testing.assert_allclose(params["blocks"]["attention"]["q"]["w"], wanted, rtol=1e-6, atol=1e-6)
    tokens = np.arange(12, dtype=np.int32)[None]
    ours, theirs = (
        model.hidden(params, tokens, recipe.config, Options(precision="highest"))
        for params, recipe in ((trained.state.params, trained.recipe), (params, merged))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="has no adapters: leave --merge out"):
        merged.export_merged(None, whole)


def test_another_run_goes_on_with_adapters_of_the_same_form_and_base_alone(base, trained, tmp_path):
    folder, _ = base
    same = Decoder(**trained.recipe.options() | {"data": "fake"})
    assert same.config == trained.recipe.config
    options = {"architecture": f"hf:{folder}", "data": "fake", "lora": 3, "lora_targets": "q_proj,v_proj,down_proj"}
    with pytest.raises(InputError, match=r"do not fit this recipe: lora_alpha was 6\.0, now 3\.0"):
        Trainer(devices=1).fit(Decoder(**options), steps=1, batch=2, run=tmp_path / "run", init_from=trained.folder)
    trained.recipe.export(trained.state, tmp_path)
    place = f"hf:{tmp_path}"
    found = Decoder.options_at(place)
    assert (found["lora"], found["lora_alpha"], found["lora_targets"]) == (3, 6.0, "q_proj,v_proj,down_proj")
    again = Decoder(**found, data="fake")
    loaded = again.load_shared(place, like(again))
    jax.tree.map(np.testing.assert_array_equal, loaded, trained.state.params)
    assert again.shared_digest(place).endswith(again.shared_digest(f"hf:{folder}"))
    with pytest.raises(InputError, match=f"has adapters of hf:{folder}: train hf:{folder} --init-from {place}"):
        Decoder(architecture=place, data="fake")
    about = tmp_path / "adapter_config.json"
    for facts, words in (
        ({"r": 4}, "do not fit this recipe: lora was 4, now 3"),
        ({"base_model_name_or_path": "qwen/qwen"}, "do not fit this recipe: lora_base was hf:qwen/qwen, now hf:"),
        ({"use_dora": True}, "have use_dora True, which is not supported"),
        ({"use_rslora": True}, "do not fit this recipe: rslora was True, now False"),
        ({"use_rslora": "yes"}, "is damaged: use_rslora is yes"),
        ({"base_model_name_or_path": 7}, "is damaged: use_rslora is False, its base 7"),
        ({"alora_invocation_tokens": [1]}, "have alora_invocation_tokens .1., which is not supported"),
        ({"target_modules": ["fc1"]}, "have target_modules .'fc1'., which is not supported"),
        ({"lora_alpha": None}, "is damaged: TypeError"),
    ):
        about_now = about.read_text()
        about.write_text(json.dumps(json.loads(about_now) | facts))
        with pytest.raises(InputError, match=words):
            again.load_shared(place, like(again))
        about.write_text(about_now)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": 0}, "lora"),
        ({"lora": 4, "lora_alpha": 0}, "lora_alpha"),
        ({"lora": 4, "lora_targets": "q_proj,qv_proj"}, "lora_targets names 'qv_proj', which is not a linear layer"),
        ({"lora": 4, "lora_targets": ""}, "lora_targets names ''"),
        ({"lora_targets": "q_proj"}, "--lora-targets needs --lora"),
        ({"lora_dropout": 0.1}, "--lora-dropout needs --lora"),
        ({"lora": 4, "lora_dropout": 1.0}, "lora_dropout"),
        ({"rslora": True}, "--rslora needs --lora"),
        ({"base": "f32"}, "--base needs --lora"),
        ({"lora": 4, "base": "int4"}, "unknown base 'int4'; did you mean int8"),
        ({"lora": 4, "architecture": None}, "--lora adapts a published model"),
    ],
)
def test_impossible_adapters_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        Decoder(**{"architecture": json.dumps(FACTS), "data": "fake"} | options)


def test_base_in_int8_is_the_published_model_rounded_by_column(base, tmp_path):
    folder, published = base
    recipe = Decoder(architecture=f"hf:{folder}", data="fake", lora=2, base="int8")
    state = Trainer(devices=1).fit(recipe, steps=2, batch=2, run=tmp_path / "run").state
    flat, whole = by_path(state.params), {}
    for path, w in by_path(published).items():
        found = flat[path]
        if path.endswith("/w"):
            assert found.dtype == jnp.int8 and np.abs(found).max() == 127
            scale = np.asarray(flat[f"{path}_scale"])[:, None]
            whole[path] = np.float32(found) * scale
            assert np.all(np.abs(whole[path] - w) <= 0.5001 * scale)
        else:
            whole[path] = np.asarray(found, np.float32)
            np.testing.assert_array_equal(whole[path], np.float32(w.astype(jnp.bfloat16)))
    again = by_path(recipe.load_shared(f"hf:{folder}", like(recipe, PartitionSpec("data"), devices=2)))
    np.testing.assert_array_equal(again["blocks/mlp/up/w"], flat["blocks/mlp/up/w"])

    loaded = load_run(tmp_path / "run", jax.devices()[:1])
    plain = lora.init(jax.random.key(0), published, recipe.config.lora)
    plain = jax.tree.unflatten(jax.tree.structure(plain), [(flat | whole)[path] for path in by_path(plain)])
    tokens = np.arange(12, dtype=np.int32)[None]
    ours, theirs = (
        model.hidden(params, tokens, recipe.config, Options(precision="highest")) for params in (state.params, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    recipe.export_merged(loaded.state, tmp_path)
    q, tensors = loaded.state.params["blocks"]["attention"]["q"], load_file(tmp_path / "model.safetensors")
    merged = whole["blocks/attention/q/w"][1] + np.matmul(q["lora_a"][1], q["lora_b"][1])
    found = tensors["model.layers.1.self_attn.q_proj.weight"].T
    np.testing.assert_allclose(found, merged, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("base_name", [None, ""])
def test_adapters_that_do_not_name_their_model_go_onto_the_one_that_is_given(base_name, base, trained, tmp_path):
    trained.recipe.export(trained.state, tmp_path)
    about, place = tmp_path / "adapter_config.json", f"hf:{tmp_path}"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"base_model_name_or_path": base_name}))
    with pytest.raises(
        InputError, match=f"a model without a name: train hf:ORG/NAME or hf:DIR, .* --init-from {place}"
    ):
        Decoder(architecture=place, data="fake")
    recipe = Decoder(**Decoder.options_at(place) | {"architecture": f"hf:{base[0]}", "data": "fake"})
    loaded = recipe.load_shared(place, like(recipe))
    jax.tree.map(np.testing.assert_array_equal, loaded, trained.state.params)
    assert recipe.shared_digest(place) == f"{digest(open_published(place), [ADAPTER_FILE])} on " + recipe.shared_digest(
        f"hf:{base[0]}"
    )
    nameless = Decoder(**Decoder.options_at(place) | {"architecture": json.dumps(FACTS), "data": "fake"})
    with pytest.raises(InputError, match=f"do not name their model: train it with --init-from {place}"):
        nameless.load_shared(place, like(nameless))


def test_base_model_is_hashed_once(base, trained, monkeypatch, tmp_path):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path))
    read = []
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: read.append(1) or hashlib.sha256())
    assert trained.recipe.shared_digest(f"hf:{base[0]}") == trained.recipe.shared_digest(f"hf:{base[0]}")
    assert len(read) == 1


def loss_of(recipe, params, key, **options):
    """The loss of three rows, and its gradient by the adapters."""
    batch = {"tokens": np.random.default_rng(0).integers(1, 60, (4, recipe.context + 1)).astype(np.int32)}
    program = recipe.program(Options(**options))
    state = program.init(jax.random.key(0), params)
    gradient = lora.split(program.batch_gradient(state, batch, key))[1]
    return float(program.evaluate(state, batch)["loss"]), gradient


def test_dropout_of_adapters_is_off_in_evaluation_and_drawn_from_the_key_of_the_step():
    options = {"architecture": json.dumps(FACTS), "data": "fake", "lora": 4, "base": "f32"}
    plain, zero, half = (Decoder(**options, lora_dropout=rate) for rate in (None, 0.0, 0.5))
    params = model.init(jax.random.key(0), plain.config)
    for part, layer in TARGETS.values():
        params["blocks"][part][layer]["lora_b"] += 0.1
    one, two = jax.random.key(1), jax.random.key(2)
    expected = loss_of(plain, params, one)
    jax.tree.map(np.testing.assert_array_equal, loss_of(zero, params, two), expected)
    loss, first = loss_of(half, params, one)
    assert loss == expected[0] and zero.options() == plain.options() and half.options()["lora_dropout"] == 0.5
    jax.tree.map(np.testing.assert_array_equal, loss_of(half, params, one)[1], first)
    for remat in ("full", "dots"):  # the backward pass draws the same again
        again = loss_of(half, params, one, remat=remat)[1]
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), again, first)
    _, second = loss_of(half, params, two)
    for gradient in jax.tree.leaves(second):
        assert np.any(gradient)
    different = jax.tree.map(lambda a, b: np.any(a != b), first, second)
    assert all(jax.tree.leaves(different))


def test_each_adapter_drops_inputs_of_its_own_at_the_rate(monkeypatch):
    config = Decoder(architecture=json.dumps(FACTS), data="fake", lora=4, lora_dropout=0.25).config
    keys = lora.with_keys(model.init(jax.random.key(0), config), jax.random.key(3), config.lora)["blocks"]
    kept = [
        np.asarray(dropout(jnp.ones((2000,)), 0.25, key)) > 0
        for part, layer in TARGETS.values()
        for key in keys[part][layer]["dropout_key"]
    ]
    assert len(kept) == 7 * FACTS["num_hidden_layers"]
    correlations = np.corrcoef(np.float64(kept))
    assert np.abs(correlations - np.eye(len(kept))).max() < 0.12  # five standard deviations
    assert abs(np.mean(kept) - 0.75) < 5 * (0.75 * 0.25 / np.size(kept)) ** 0.5


def test_rslora_divides_alpha_by_the_root_of_the_rank_and_is_peft_s_field(base, trained, tmp_path):
    options = trained.recipe.options() | {"rslora": True, "lora_dropout": 0.1, "data": "fake"}
    recipe = Decoder(**options)
    assert recipe.config.lora.factor == pytest.approx(6 / 3**0.5) and recipe.options()["rslora"] is True
    recipe.export(trained.state, tmp_path)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["use_rslora"] is True and about["lora_dropout"] == 0.1
    found = Decoder.options_at(f"hf:{tmp_path}")
    assert Decoder(**found, data="fake").config.lora.by_root
    recipe.load_shared(f"hf:{tmp_path}", like(recipe))
    with pytest.raises(InputError, match="do not fit this recipe: rslora was True, now False"):
        trained.recipe.load_shared(f"hf:{tmp_path}", like(trained.recipe))


def test_learning_rate_of_adapters_is_that_of_the_papers():
    assert Decoder(architecture=json.dumps(FACTS), data="fake", lora=4).options()["lr"] == 2e-4
    assert Lora(rank=8, alpha=16.0).factor == 2.0

"""GPT-2 against torch and transformers themselves."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.recipes.test_pretrained import GOLDEN, check_results, relative

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.pretrained import SIZE_KEYS, read_config
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import loss
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.train.recipe import Options

pytest.importorskip("transformers")
NOISE = 1e-5
"""Relative; another machine's torch may add up in another order."""


def transformers(*words: object) -> None:
    words = (sys.executable, GOLDEN / "make.py", *words)
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_golden_files_are_what_their_script_makes(tmp_path):
    """Where they are not, they are replaced: look at the difference before you commit it."""
    transformers("make", tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    stored = {
        path.relative_to(GOLDEN) for path in GOLDEN.rglob("*.*") if path.suffix in (".json", ".safetensors", ".txt")
    }
    wrong = sorted(path for path in made | stored if not same(tmp_path / path, GOLDEN / path))
    for path in wrong:
        (GOLDEN / path).unlink(missing_ok=True)
        if path in made:
            shutil.copyfile(tmp_path / path, GOLDEN / path)
    assert not wrong, f"regenerated, because they were different: {[str(path) for path in wrong]}"


def same(made: Path, stored: Path) -> bool:
    if not (made.exists() and stored.exists()):
        return False
    if made.suffix == ".json":
        return json.loads(made.read_text()) == json.loads(stored.read_text())
    if made.suffix != ".safetensors":
        return made.read_bytes() == stored.read_bytes()
    ours, theirs = load_file(made), load_file(stored)
    return ours.keys() == theirs.keys() and all(
        ours[name].shape == theirs[name].shape and relative(ours[name], theirs[name]) < NOISE for name in ours
    )


@pytest.mark.long
def test_random_models_have_transformers_results(tmp_path):
    transformers("random", tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        config = read_config(open_published(f"hf:{folder / 'model'}"))
        check_results(GPT2(**{name: getattr(config, name) for name in SIZE_KEYS}, data="fake"), folder)


@pytest.mark.long
def test_transformers_loads_exports_with_the_same_results(tmp_path, text_file):
    """For each kind of tokenizer: logits, gradients and token numbers are those of the recipe."""
    texts = ["the quick brown fox", "line 7: jumps over\n\n 49  lazy dogs."]
    shape = {"layers": 2, "heads": 2, "width": 32, "context": 32, "data": str(text_file)}
    exported = {}
    for name, options in (("characters", {}), ("bytes", {}), ("bpe", {"vocab": 400})):
        folder, recipe = tmp_path / name, GPT2(**shape, tokenizer=name, **options)
        state = jax.jit(recipe.program(Options()).init)(jax.random.key(0))
        state = replace(state, params=jax.tree.map(lambda leaf: leaf + 0.01, state.params))  # biases begin at 0
        (folder / "model").mkdir(parents=True)
        recipe.export(state, folder / "model")
        exported[folder] = recipe, state.params
        save_file({"tokens": recipe.data("validation").rows(0, 2)["tokens"]}, folder / "tokens.safetensors")
        (folder / "texts.json").write_text(json.dumps(texts))
    transformers("read", *exported)
    for folder, (recipe, params) in exported.items():
        check_results(recipe if folder.name == "bpe" else GPT2(**{**recipe.options(), "data": "fake"}), folder)
        theirs = load_file(folder / "results.safetensors")
        x_BxTxD = model.hidden(params, theirs["tokens"][:, :-1], recipe.config, Options(), None)
        logits = np.asarray(loss.logits(x_BxTxD, params["wte"], recipe.config.vocab))[..., : recipe.config.vocab]
        assert relative(logits, theirs["logits"]) < 1e-4
        tokens = json.loads((folder / "tokens.json").read_text())
        assert tokens == {text: recipe.tokenizer.encode(text).tolist() for text in texts}

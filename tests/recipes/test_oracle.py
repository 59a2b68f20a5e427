"""Against torch and transformers themselves, which live in .venv-oracle; `make oracle`."""

import json
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import processes
from tests.recipes.test_pretrained import GOLDEN, check_results, like, relative, whole
from tpuswarm.recipes.gpt2 import loss, model
from tpuswarm.recipes.gpt2.hub import open_published
from tpuswarm.recipes.gpt2.pretrained import SHAPE, load, read_config
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.loaded import load_run

pytestmark = pytest.mark.oracle
ROOT = Path(__file__).resolve().parents[2]
NOISE = 1e-5
"""Relative; another machine's torch may add up in another order."""


def transformers(*words: object) -> None:
    python, script = ROOT / ".venv-oracle" / "bin" / "python", GOLDEN / "make.py"
    done = subprocess.run([python, script, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_golden_files_are_what_their_script_makes(tmp_path):
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


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_has_transformers_results(seed, tmp_path):
    transformers("random", seed, tmp_path)
    config = read_config(open_published(f"hf:{tmp_path / 'model'}"))
    shape = {name: getattr(config, name) for name in SHAPE}
    check_results(GPT2(**shape, data="fake"), tmp_path)


@pytest.mark.parametrize("options", ["--tokenizer characters", "--tokenizer bytes", "--tokenizer bpe --vocab 400"])
def test_transformers_loads_an_export_with_the_same_results(options, tmp_path, text_file):
    """A run of one kind of tokenizer: logits, gradients and numbers of what was exported are those of the run."""
    train = f"train gpt2-tiny --data {text_file} --layers 2 --steps 5 --run run {options}"
    processes.run(train.split(), tmp_path)
    processes.run(["export", "run", "model", "--format", "hf"], tmp_path)
    run = load_run(tmp_path / "run", jax.devices()[:1])
    config, params = run.recipe.config, run.state.params
    tokens = run.recipe.data("validation").rows(0, 2)["tokens"]
    texts = ["the quick brown fox", "line 7: jumps over\n\n 49  lazy dogs."]
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    transformers("read", tmp_path)
    check_results(run.recipe if "bpe" in options else GPT2(**{**run.recipe.options(), "data": "fake"}), tmp_path)
    theirs = load_file(tmp_path / "results.safetensors")
    x_BxTxD = model.hidden(params, tokens[:, :-1], config, Options(), None)
    logits = np.asarray(loss.logits(x_BxTxD, params["wte"], config.vocab))[..., : config.vocab]
    assert relative(logits, theirs["logits"]) < 1e-4
    ids = json.loads((tmp_path / "tokens.json").read_text())
    assert ids == {text: run.recipe.tokenizer.encode(text).tolist() for text in texts}
    again = load(open_published(f"hf:{tmp_path / 'model'}"), config, like(run.recipe, whole))
    np.testing.assert_array_equal(again["wpe"], params["wpe"])

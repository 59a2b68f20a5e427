"""From a hub on loopback to a fine-tuned model and out again, as commands in processes."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import processes
from tests.journeys.conftest import GOLDEN, SHAPE
from tests.recipes.hub import serving
from tests.recipes.test_decoder import publish
from tpuswarm.swarm.storage.founding import read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.run.loaded import load_run

pytestmark = pytest.mark.long


def test_published_model_is_fine_tuned_and_exported(tmp_path, text_file, monkeypatch):
    """Fetch it once; without the hub, resume, export, and read the same parameters from the export."""
    shutil.copytree(GOLDEN, tmp_path / "hub" / "org" / "small")
    for name, folder in (("HF_HUB_CACHE", "hub-cache"), ("TPUSWARM_CACHE", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    train = f"train gpt2-tiny --data {text_file} {SHAPE} --steps 60 --lr 1e-2 --json"
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        out, err = processes.run([*train.split(), "--init-from", "hf:org/small", "--run", "run"], tmp_path)
    assert "parameters from hf:org/small" in err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert json.loads(out)["metrics"]["eval_loss"] < rows[0]["loss"] - 0.2
    shutil.rmtree(tmp_path / "cache" / "tokens")  # the run's folder has copies
    _, err = processes.run([*train.split(), "--run", "run"], tmp_path)
    assert "nothing left to do" in err
    processes.run(["export", "run", "out/model", "--format", "hf"], tmp_path)
    files = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors")
    before = load_file(GOLDEN / "model.safetensors")
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: item.shape for name, item in before.items()
    }
    run = load_run(tmp_path / "run", jax.devices()[:1])
    again = run.recipe.load_shared(f"hf:{tmp_path / 'out' / 'model'}", run.placed.state.params)
    jax.tree.map(np.testing.assert_array_equal, again["blocks"], run.state.params["blocks"])
    np.testing.assert_array_equal(again["wte"][:300], run.state.params["wte"][:300])


def test_swarm_starts_from_a_published_model_keeps_its_tokenizer_and_starts_other_runs(
    watched_swarm, tmp_path, text_file
):
    """Its text is gone."""
    run = watched_swarm.run
    assert f"parameters from hf:{GOLDEN}".replace(" ", "") in "".join(watched_swarm.text.split())
    store = Store(run)
    layout, first = read_founding(store).layout, Ledger(store).record(0)
    began = layout.join([Objects(store).get_array(digest) for digest in first.state])
    published = load_file(GOLDEN / "model.safetensors")
    for path, name in {"wte": "wte.weight", "blocks/mlp/fc/w": "h.0.mlp.c_fc.weight"}.items():
        there = began[path] if path == "wte" else began[path][0]
        np.testing.assert_array_equal(there[: len(published[f"transformer.{name}"])], published[f"transformer.{name}"])
    out, _ = processes.run(["sample", str(run), "--prompt", "line", "--tokens", "5"], tmp_path)
    assert out.startswith("line")
    out, _ = processes.run(["export", str(run), "model", "--format", "hf", "--json"], tmp_path)
    assert json.loads(out)["step"] == 400 and load_file(tmp_path / "model" / "model.safetensors")
    words = f"train gpt2-tiny --data {text_file} {SHAPE} --steps 6 --init-from {run} --vocab 300 --run plain"
    _, err = processes.run(words.split(), tmp_path)
    assert f"parameters from {run}" in err


def test_swarm_trains_adapters_of_a_published_model(tmp_path, text_file):
    publish(tmp_path / "model")
    train = f"train hf:model --data {text_file} --lora 2 --batch 4 --steps 12 --members 2 --cycle 2 --run swarm"
    processes.run(train.split(), tmp_path)
    processes.run(["ledger", "verify", "swarm"], tmp_path)
    store = Store(tmp_path / "swarm")
    leaves = read_founding(store).layout.leaves
    assert len(leaves) == 14 and all("/lora_" in path for path in leaves)
    out, _ = processes.run(["sample", "swarm", "--prompt", "line", "--tokens", "5"], tmp_path)
    assert out.startswith("line")
    processes.run(["export", "swarm", "adapters"], tmp_path)
    first = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    more = "train hf:model --data fake --lora 2 --batch 4 --steps 1 --lr 1e-30 --init-from hf:adapters --run more"
    processes.run(more.split(), tmp_path)
    processes.run(["export", "more", "again"], tmp_path)
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert len(first) == 28 and any(np.any(first[name]) for name in first if "lora_B" in name)
    for name, tensor in first.items():
        np.testing.assert_array_equal(again[name], tensor)

"""Data of torch, torchdata, Hugging Face and Grain: every row once an epoch, and runs that resume exactly."""

import json
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpuswarm import IndexedSource, StreamSource, Trainer, supervised
from tpuswarm.train.run.directory import METRICS

datasets, grain, torch = (pytest.importorskip(name) for name in ("datasets", "grain", "torch"))
DataLoader = torch.utils.data.DataLoader
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

COUNT, BATCH, STEPS, STOP = 60, 8, 20, 9
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3])).astype(np.float32)
NAMES = ("x", "y")


def tensors():
    return torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))


def shuffled_loader():
    return DataLoader(tensors(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))


def stateful_loader():
    return StatefulDataLoader(tensors(), batch_size=7, shuffle=False)


def huggingface():
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("numpy")


def streamed():
    return huggingface().to_iterable_dataset(num_shards=3)


def grain_rows():
    return grain.MapDataset.source([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])


def grain_stream():
    return grain_rows().shuffle(seed=3).to_iter_dataset()


SOURCES = {
    "torch Dataset": lambda: IndexedSource(tensors(), names=NAMES, seed=0),
    "torch DataLoader": lambda: StreamSource(shuffled_loader, names=NAMES),
    "torchdata StatefulDataLoader": lambda: StreamSource(stateful_loader, names=NAMES),
    "Hugging Face Dataset": lambda: IndexedSource(huggingface(), seed=0),
    "Hugging Face IterableDataset": lambda: StreamSource(streamed, batched=False),
    "grain MapDataset": lambda: IndexedSource(grain_rows(), seed=0),
    "grain IterDataset": lambda: StreamSource(grain_stream, batched=False),
}
HAVE_POSITIONS = ("torchdata StatefulDataLoader", "Hugging Face IterableDataset", "grain IterDataset")


def recipe(source):
    def loss(params, batch, key):
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    return supervised(lambda key: {"w": jnp.zeros(3)}, loss, optax.sgd(0.05), source)


def losses(run):
    return [row["loss"] for row in map(json.loads, (run / METRICS).read_text().splitlines()) if "loss" in row]


@pytest.mark.parametrize("name", SOURCES)
def test_epoch_has_every_row_once(name):
    source = SOURCES[name]()
    batches = [source.rows(start, 6) for start in range(0, COUNT, 6)]
    order = np.lexsort(X.T)
    seen = np.concatenate([batch["x"] for batch in batches])
    np.testing.assert_array_equal(seen[np.lexsort(seen.T)], X[order])
    for batch in batches:
        np.testing.assert_allclose(batch["y"], batch["x"] @ np.float32([1, -2, 3]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SOURCES)
def test_stopped_run_resumes_exactly(tmp_path, name):
    Trainer().fit(recipe(SOURCES[name]()), steps=STEPS, batch=BATCH, run=tmp_path / "whole")
    with closing(Trainer().steps(recipe(SOURCES[name]()), steps=STEPS, batch=BATCH, run=tmp_path / "stopped")) as loop:
        next(step for step in loop if step.row["step"] == STOP)
    positions = list((tmp_path / "stopped" / "checkpoints").glob("*/position.json"))
    assert bool(positions) == (name in HAVE_POSITIONS)
    Trainer().fit(recipe(SOURCES[name]()), steps=STEPS, batch=BATCH, run=tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == STEPS

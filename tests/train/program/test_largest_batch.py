"""`--batch auto`: as many rows as the devices hold."""

import jax
import pytest

from tests.train import host
from tpuswarm import Trainer
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.loop import session
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program import largest_batch as finding
from tpuswarm.train.program.largest_batch import largest_batch, search
from tpuswarm.train.program.request import usual_request
from tpuswarm.train.run.directory import read_config


@pytest.fixture(scope="module")
def recipe():
    return GPT2(layers=2, width=64, heads=2, context=32, vocab=65, data="fake")


@pytest.fixture(scope="module")
def needed(recipe):
    """Bytes a device by batch, of the form that saves no memory: compiled one by one, without a search."""
    devices = jax.devices()[:2]
    found = {}
    for batch in (2, 4, 10, 22):
        compiled = compiling.compile_step(recipe, usual_request(recipe, batch=batch), devices)
        assert compiled.choice.remat == "none" and compiled.choice.accumulate == 1
        found[batch] = compiled.memory.total
    return found


def holds(monkeypatch, memory):
    """Devices that hold so many bytes."""
    for module in (compiling, finding):
        monkeypatch.setattr(module, "device_memory", lambda device: memory)


@pytest.mark.parametrize("batch", [2, 4, 10, 22])
def test_no_larger_size_would_fit(recipe, needed, batch, monkeypatch):
    holds(monkeypatch, needed[batch])
    told = []
    assert search(recipe, {}, jax.devices()[:2], told.append) == batch
    fit = [int(line.split()[0]) for line in told]
    assert fit[0] == 2 and fit[-1] == batch and fit == sorted(set(fit))


def test_what_the_smallest_needs_is_used_and_not_more(recipe, needed, monkeypatch):
    """Half the memory of one row a device: only smaller forms fit, and the search goes on with them."""
    holds(monkeypatch, needed[22])
    assert search(recipe, {"accumulate": 2}, jax.devices()[:2], lambda text: None) % 4 == 0
    holds(monkeypatch, 1000)
    with pytest.raises(InputError, match="with batch 2 does not fit on 2 x cpu"):
        search(recipe, {}, jax.devices()[:2], lambda text: None)


def test_a_cpu_is_not_filled(recipe):
    with pytest.raises(InputError, match="auto fills the memory of devices, and cpu shares the machine's: give a numb"):
        largest_batch(recipe, {}, jax.devices()[:1], lambda text: None)


def test_a_run_keeps_the_batch_that_was_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "largest_batch", lambda recipe, asked, devices, far: 16)
    Trainer(devices=1).fit(host.recipe(), steps=2, batch="auto", run=tmp_path / "run")
    assert read_config(tmp_path / "run")["train"]["batch"] == 16
    assert "batch 16: more rows do not fit without saving memory" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(session, "largest_batch", lambda *found: pytest.fail("a run that has begun has a batch"))
    again = Trainer(devices=1).fit(host.recipe(), steps=2, batch="auto", run=tmp_path / "run")
    assert again.steps == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train gpt2-tiny --batch auto --steps 1", "--batch auto fills the memory of devices"),
        ("train gpt2-tiny --batch auto --members 2", "--batch auto is for one process"),
        ("train gpt2-tiny --batch most --steps 1", "batch"),
    ],
)
def test_where_it_cannot_be_it_is_said(typed, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = typed(*words.split())
    assert code == 2 and said in " ".join(err.split())
    assert not (tmp_path / "runs").exists()

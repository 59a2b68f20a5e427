"""`--batch auto`: as many rows as the devices hold."""

import jax
import pytest

from tests.train import host, toy
from tpuswarm import Trainer
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.loop import session
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program.largest_batch import Sizes, largest_batch
from tpuswarm.train.program.request import default_batch, usual_request
from tpuswarm.train.run.directory import read_config


@pytest.fixture(scope="module")
def recipe():
    return GPT2(layers=2, width=64, heads=2, context=32, vocab=65, data="fake")


@pytest.fixture(scope="module")
def needed(recipe):
    """Bytes a device by rows a device, of the form that saves no memory: compiled one by one, without a search."""
    devices = jax.devices()[:2]
    found = {}
    for rows in (5, 6, 11, 12):
        compiled = compiling.compile_step(recipe, usual_request(recipe, batch=2 * rows), devices)
        assert compiled.choice.remat == "none" and compiled.choice.accumulate == 1
        found[rows] = compiled.memory.total
    return found


@pytest.mark.parametrize(("usual", "rows"), [(5, 5), (6, 11), (12, 6)])
def test_the_next_size_would_not_fit(recipe, needed, usual, rows):
    """In the form of the usual batch, which recomputes layers where it has to."""
    told, devices = [], jax.devices()[:2]
    found, above = Sizes(recipe, usual_request(recipe, batch=2 * usual), devices, needed[rows], told.append).largest()
    like = found.compiled
    for size, fits in ((found.rows, True), (above, False)):
        traced = compiling.trace(recipe, like.options, like.choice, 2 * size, like.mesh)
        assert isinstance(compiling.compile_traced(traced, needed[rows]), compiling.Compiled) == fits
        assert f"{size} rows per device {'fit' if fits else 'are too many'}" in told
    assert found.batch == 2 * found.rows
    assert found.rows == rows if like.choice.remat == "none" else found.rows >= usual


def test_micro_batches_are_those_of_the_request_or_the_recipe(recipe, needed):
    sizes = Sizes(recipe, usual_request(recipe, batch=8, accumulate=2), jax.devices()[:2], needed[6], lambda text: None)
    found, _ = sizes.largest()
    assert found.batch == 4 * found.rows and found.compiled.choice.accumulate == 2
    with pytest.raises(InputError, match="with batch 2 does not fit on 2 x cpu"):
        Sizes(recipe, usual_request(recipe, batch=2), jax.devices()[:2], 1000, lambda text: None).largest()
    assert default_batch(toy.recipe(defaults={"batch": 20, "accumulate": 4}), 8, None) == 32


def test_a_cpu_is_not_filled(recipe):
    with pytest.raises(InputError, match="auto fills the memory of devices, and cpu shares the machine's: give a numb"):
        largest_batch(recipe, {}, jax.devices()[:1], lambda text: None)


def test_a_run_keeps_the_batch_that_was_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "largest_batch", lambda recipe, asked, devices, far: 16)
    Trainer(devices=1).fit(host.recipe(), steps=2, batch="auto", run=tmp_path / "run")
    assert read_config(tmp_path / "run")["train"]["batch"] == 16
    assert "batch 16, the largest that fits" in " ".join(capsys.readouterr().err.split())
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

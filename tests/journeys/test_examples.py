"""Every program in examples/ is short, runs as its docstring says, learns, and honours the options it is given."""

import json
import re
import runpy
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.journeys.documents import ROOT
from tests.train.findings import complaints
from tpuswarm import Clock, Options, Trainer
from tpuswarm.cli import main
from tpuswarm.train.user_code import build_recipe

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_DROPOUT = ("flax_nnx", "equinox_module")

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)]


@pytest.fixture(autouse=True)
def libraries_broadcast():
    """Flax and Equinox need rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def commands(example: Path) -> list[list[str]]:
    """The command lines of its docstring, as words."""
    lines = re.findall(r"^(?:python|tpuswarm) .*$", example.read_text(), flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_example_is_one_page_with_its_commands(example):
    assert len(example.read_text().splitlines()) <= 60
    program, command = commands(example)
    assert program == ["python", f"examples/{example.name}"]
    assert command[:3] == ["tpuswarm", "train", f"examples/{example.name}:recipe"]


@pytest.mark.long
def test_command_in_the_docstring_learns(example, tmp_path, monkeypatch):
    _, command = commands(example)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small = "--devices 1" if example.stem == "digits" else "--steps 30 --lr 1e-2 --width 16 --layers 1 --devices 2"
    monkeypatch.setattr(sys, "argv", [*command, *small.split(), "--run", "run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert complaints(Path("run")) == set()
    if example.stem == "digits":  # quick enough to be seen to the end; how good the others get is in their docstrings
        assert rows[-1]["eval_accuracy"] > 0.97


def test_program_prints_its_accuracy(example, monkeypatch, capsys):
    trained = []

    def fit(trainer, recipe):
        trained.append(recipe.name)
        return SimpleNamespace(metrics={"eval_right": 0.25, "eval_accuracy": 0.25})

    monkeypatch.setattr(Trainer, "fit", fit)
    runpy.run_path(str(example), run_name="__main__")
    assert len(trained) == 1 and "25.0% of the held-out" in capsys.readouterr().out


def test_bf16_reaches_the_matrix_products(example):
    program = build_recipe(f"{example}:recipe", {}).program(Options(precision="bf16"))
    key = jax.eval_shape(jax.random.key, 0)
    state = jax.eval_shape(program.init, key)
    step = jax.jit(program.step).lower(state, program.batch_spec(16), Clock(key, np.int32(0), np.float32(0)))
    found = Counter(re.findall(r"(?:dot_general|convolution).*-> tensor<[\dx]*x(\w+)>", step.as_text()))
    assert found["bf16"] > 0 and found["bf16"] >= 5 * found["f32"], found


def test_dropout_is_off_in_evaluation(example):
    recipe = build_recipe(f"{example}:recipe", {})
    program, batch = recipe.program(Options()), recipe.data("train").rows(0, 8)
    params = jax.eval_shape(program.init, jax.eval_shape(jax.random.key, 0)).params
    training = jax.make_jaxpr(lambda params, key: program._loss(params, batch, key))(params, jax.random.key(0))
    evaluation = jax.make_jaxpr(lambda params: program._loss(params, batch, None))(params)
    assert ("random_bits" in str(training)) == (example.stem in WITH_DROPOUT)
    assert "random_bits" not in str(evaluation)

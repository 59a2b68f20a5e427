"""`tpuswarm plan` of published models; a stand-in replaces the compiler, except in one test."""

import json

import pytest
from benchmarks import models

from tests.journeys.documents import ROOT
from tests.plan.test_command import GIB, program
from tpuswarm.catalog import public_models
from tpuswarm.plan.compile.pool import CompilePool
from tpuswarm.plan.compile.request import CompileResult

asked = []


class StandIn:
    """A compiler for which models of less than 5 billion parameters fit."""

    def __init__(self, cache, report):
        asked.clear()

    def results(self, requests):
        for request in reversed(requests):
            asked.append(request)
            is_small = json.loads(request.options.options["architecture"])["hidden_size"] < 3000
            problem = "" if is_small else "too large"
            made = program(batch=8, micro_batch=1, sharding="fsdp", tokens_per_row=2048) if is_small else None
            yield request, CompileResult(is_small, made, GIB, GIB, GIB, problem=problem)


@pytest.fixture
def plan(monkeypatch, typed, tmp_path):
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tpuswarm.cli.plan.models.CompilePool", StandIn)
    return lambda line: typed("plan", *line.split())


def test_without_a_recipe_all_published_models_are_listed_by_size(plan):
    code, out, err = plan("--lora 16 --on v5e-8 --tokens 10M")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in public_models()] == [*public_models()]
    assert next(line for line in lines if line[:1] == ["qwen3-0.6b"])[1:3] == ["yes", "fsdp"]
    assert next(line for line in lines if line[:1] == ["qwen3-8b"])[1] == "no"
    assert "time" in out and "$ spot" in out and "published models on v5e-8" in out
    for request in asked:
        options = request.options.options
        assert (options["lora"], options["data"], request.options.batch) == ("16", "fake", 8)


def test_model_whose_state_is_too_large_is_not_compiled(plan):
    code, out, _ = plan("--on v5e-1 --json")
    assert code == 0
    rows = {row["model"]: row for row in json.loads(out)["rows"]}
    assert rows.keys() == public_models().keys()
    assert rows["llama-2-7b"]["fits"] is False
    assert rows["llama-2-7b"]["problem"].startswith(
        "does not fit: its state alone takes 75.3 GiB of a device, which has"
    )
    compiled = {json.dumps(json.loads(request.options.options["architecture"])) for request in asked}
    assert json.dumps(public_models()["llama-2-7b"].config) not in compiled
    assert json.dumps(public_models()["smollm2-135m"].config) in compiled


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the recipe comes first: tpuswarm plan RECIPE …; without one, --on and options such as --lora 16 list"),
        ("--lora 16", "the recipe comes first"),
        ("--lora 16 --mine", "the recipe comes first"),
        ("--lora 0 --on v5e-1", "lora"),
        ("--lorra 16 --on v5e-1", "has no option lorra"),
        ("--on v5e-1 --context 2048 qwen3-0.6b", "unexpected argument 'qwen3-0.6b'"),
        ("qwen3-0.6bb --on v5e-1", "unknown recipe 'qwen3-0.6bb'; did you mean qwen3-0.6b"),
    ],
)
def test_wrong_input_is_one_sentence(plan, line, words):
    code, _, err = plan(line)
    assert code == 2 and words in " ".join(err.split()), err


def test_training_a_model_of_the_catalog_takes_it_from_the_hub(typed, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its import has read the environment
    code, _, err = typed("train", "qwen3-0.6b", "--data", "fake", "--lora", "16", "--dry-run")
    assert code == 2 and "Qwen/Qwen3-0.6B" in err


def test_table_of_the_page_is_filled_cell_by_cell(monkeypatch, tmp_path):
    page = tmp_path / "models.md"
    page.write_text((ROOT / "docs/models.md").read_text())
    monkeypatch.setattr(models, "PAGE", page)
    monkeypatch.setattr(models, "_compile", lambda name, form, context, slices: [f"on {place}" for place in slices])
    before = page.read_text().splitlines()
    row = models._fill("qwen3-0.6b", "LoRA 16", 2048)
    assert row[1] == "on v2-8" and row[6].startswith("replicate, 1 x 1: 7.76")
    assert models._fill("olmo-2-7b", "full", 8192) == (
        "olmo-2-7b, full, 8,192",
        *[f"on {place}" for place in models.SLICES],
    )
    after = page.read_text().splitlines()
    assert after[: len(before) - 1] == before[:-1] and len(after) == len(before) + 1
    assert after[-1].startswith("| olmo-2-7b, full, 8,192 | on v2-8 |")


@pytest.mark.tpu_compiler
def test_adapters_of_a_small_published_model_fit_on_one_chip(plan, monkeypatch):
    """With the real compiler."""
    monkeypatch.setattr("tpuswarm.cli.plan.plan.CompilePool", CompilePool)
    code, out, err = plan("smollm2-135m --lora 16 --on v5e-1 --batch 4 --context 512 --json")
    assert code == 0, err
    [row] = json.loads(out)["rows"]
    assert row["fits"] is True and row["hbm_used_bytes"] < row["hbm_bytes"]
    assert row["state_bytes"] < 3 * public_models()["smollm2-135m"].parameters

"""Small programs fit or do not, by the real TPU compiler; one process compiles all."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.runs import made_once
from tpuswarm import catalog, recipes
from tpuswarm.plan.compile.fit import check_fit
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, describe_target
from tpuswarm.plan.row import Row

SMALL = Path(__file__).with_name("small_recipes.py")
GPT2 = {"data": "fake", "layers": "1", "width": "128", "heads": "2", "context": "128"}
pytestmark = pytest.mark.slow
MIB_USED = {"v2-8": 9.71, "v6e-8": 12.17}
"""Per device; real sizes: test_sizes.py."""


def request(recipe: str, on: str, options: dict[str, str] | None = None, **choices) -> CompileRequest:
    target, preset = recipes.find(recipe) if recipe.startswith("gpt2") else (f"{SMALL}:{recipe}", {})
    return CompileRequest(
        PlanOptions(target, {**preset, **(options or {})}, **choices), describe_target(catalog.find_hardware(on))
    )


REQUESTS = {
    "gpt2 v2-8": request("gpt2-tiny", "v2-8", GPT2, batch=64),
    "sharded": request("gpt2-tiny", "v5e-8", GPT2, batch=8, shard="fsdp"),
    "largest": request("wide", "v5e-1"),
    "refused": request("refused", "v5e-1", batch=128),
    "large evaluation": request("evaluated", "v5e-1", batch=1024),
    "refused evaluation": request("evaluated", "v5e-1", {"refused": "true"}, batch=128),
    "too large": request("gpt2-tiny", "v2-8", {**GPT2, "layers": "60000"}, batch=8),
    "bad trace": request("bad_trace", "v5e-1"),
    "frozen": request("two_layers", "v5e-1", batch=8, freeze="first"),
    "indivisible": request("two_layers", "v5e-8", batch=8),
}


def compile_all(requests: dict[str, CompileRequest]) -> dict[str, dict]:
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env |= {"XLA_FLAGS": "", "JAX_TRACEBACK_FILTERING": "off"}
    env.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in requests.values())
    done = subprocess.run([sys.executable, SMALL], input=lines, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    return dict(zip(requests, map(json.loads, answers), strict=True))


@pytest.fixture(scope="module")
def answers():
    return made_once("fit", lambda _: compile_all(REQUESTS))[1]


@pytest.fixture
def result(answers):
    return lambda name: CompileResult.from_json(answers[name]["result"])


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(SMALL.read_text().splitlines(), 1) if words in line)


def hazard_of(result: CompileResult, kind: str) -> dict:
    [hazard] = [hazard for hazard in result.hazards if hazard["kind"] == kind]
    return hazard


def check_gpt2(results: dict[str, CompileResult]) -> None:
    """The oldest generations recompute layers; the newer ones do not."""
    for name, result in results.items():
        tpu = catalog.find(name)
        assert result.fits and result.used == result.arguments + result.temporaries + result.code
        assert result.used <= 1.05 * MIB_USED.get(name, float("inf")) * 2**20, "it needs more than before"
        assert result.program.batch == 64 == result.program.micro_batch * tpu.devices
        assert (result.program.precision, result.program.sharding) == ("bf16", "replicate")
        assert {hazard["kind"] for hazard in result.hazards} <= {"matrix unit"}, "its matrices are small"
    recomputing = {name for name, result in results.items() if result.program.remat != "none"}
    assert recomputing == results.keys() & {"v2-8", "v3-8"}
    flops = [result.program.model_flops for result in results.values()]
    assert max(flops) < 1.001 * min(flops), "in whatever form the attention is computed"


def test_gpt2_recomputes_its_layers_on_an_old_generation(result):
    """All generations: test_sizes.py."""
    check_gpt2({"v2-8": result("gpt2 v2-8")})


def test_gpt2_is_sharded_with_splash_attention_and_recomputes_nothing(result):
    made = result("sharded").program
    assert (made.sharding, made.attention, made.remat) == ("fsdp", "splash", "none")


def test_largest_micro_batch_fits_and_the_next_one_was_refused(result, answers):
    found, hbm_bytes = result("largest"), catalog.find("v5e-1").generation.compiler_hbm_bytes
    bytes_per_row = 4 * 16384 * 4  # four batches are on a device while training
    assert found.fits and 0.8 < found.program.micro_batch * bytes_per_row / hbm_bytes <= 1
    assert hbm_bytes < found.too_large * bytes_per_row * 1.02
    assert found.program.micro_batch < found.too_large <= found.program.micro_batch * 1.125
    assert f"{found.too_large} rows per device are too many" in " ".join(answers["largest"]["steps"])


def test_refused_step_is_a_hazard_with_its_line(result):
    found = result("refused")
    assert found.fits is False and "the compiler refuses small_recipes for TPU v5" in found.problem
    hazard = hazard_of(found, "refused")
    assert hazard["file"] == str(SMALL) and hazard["line"] == line_of("eigvals")


def test_evaluation_that_does_not_fit_or_is_refused_is_a_hazard(result):
    """The step fits: only a compilation of the evaluation can tell."""
    found = result("large evaluation")
    assert found.fits and found.compilations == 2
    sentence = hazard_of(found, "evaluation")["sentence"]
    assert "its evaluation of 1024 rows per device needs " in sentence and sentence.endswith("use --eval-batch")
    found = result("refused evaluation")
    hazard = hazard_of(found, "refused")
    assert found.fits and hazard["line"] == line_of("eigvals")
    assert hazard["sentence"].startswith("in its evaluation the compiler refuses it: ")


def test_model_that_fits_nowhere_is_explained(result, answers):
    found = result("too large")
    assert found.fits is False and found.used is None and "needs" in found.problem
    assert answers["too large"]["steps"][0].startswith("too large: sharded: ")
    sentence = Row(catalog.find("v2-8"), found).sentence
    assert re.search(r"form \(sharded: .*, layers recomputed\) needs .* more than the 7.48 available", sentence)
    assert "its state takes" in sentence and "(v4, v5p, v6e, tpu7x; estimate): no v2 slice" in sentence


def test_error_of_a_recipe_names_its_line(answers):
    refusal = rf"loss of small_recipes fails: TypeError: .*\.py:{line_of('ones((7, 7')}\)"
    assert re.search(refusal, answers["bad trace"]["refused"])


def test_micro_batches_are_the_recipes_and_frozen_parameters_are_only_read(result):
    assert result("indivisible").problem.endswith("micro-batches (2) = 16; use --batch 16 or --accumulate 1")
    found, tpu = result("frozen"), catalog.find("v5e-1")
    assert found.fits and found.program.micro_batches == 2
    speed = Row(tpu, found).speed
    moved_bytes = 4 * (1024**2 + 2 * 1024)
    assert speed.bound == "memory"
    assert speed.floor_seconds == pytest.approx(moved_bytes / tpu.generation.bandwidth, rel=1e-3)


def test_program_is_lowered_without_a_compiler(devices):
    lowered = request("gpt2-tiny", "v5e-8", GPT2, accumulate=3)
    found = check_fit(CompileRequest(lowered.options, lowered.target, "there is no compiler"), print)
    assert found.fits is None and found.used is None and found.problem == "there is no compiler"
    assert found.program.model_flops > 0 and found.program.sharding == "replicate"
    assert found.program.micro_batches == 3 and found.program.batch == 3 * found.program.micro_batch * 8

"""Small programs on described GPUs, by XLA's real GPU compiler; needs JAX's CUDA plugin and no GPU."""

import pytest

from tests.plan.test_fit import GPT2, hazard_of, request
from tpuswarm import catalog
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool
from tpuswarm.plan.compile.request import CompileResult
from tpuswarm.plan.row import Row

pytest.importorskip("jax_cuda13_plugin", reason="the cuda extra is not installed")
pytestmark = pytest.mark.slow
REQUESTS = {
    "gpt2": request("gpt2-tiny", "h100", GPT2, batch=64),
    "largest": request("wide", "rtx-3090"),
    "too large": request("gpt2-tiny", "l4", {**GPT2, "width": "16384"}, batch=1),
    "large evaluation": request("evaluated", "t4", batch=1024),
    "prints": request("prints", "a100-40gb", batch=4096),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, CompileResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        pool = CompilePool(PlanCache(tmp_path_factory.mktemp("cache")), lambda request, text: None)
        names = {id(made): name for name, made in REQUESTS.items()}
        return {names[id(made)]: result for made, result in pool.results(list(REQUESTS.values()))}


def test_gpt2_uses_cudnns_attention_and_unrolled_layers(results):
    found = results["gpt2"]
    assert found.fits and found.used == found.arguments + found.temporaries + found.code
    assert (found.program.attention, found.program.precision, found.program.remat) == ("cudnn", "bf16", "none")
    assert {hazard["kind"] for hazard in found.hazards} <= {"matrix unit"}, "unrolled layers are meant"


def test_floor_is_that_of_the_kernels(results):
    """At least that of the model's FLOPs and of reading and writing the state."""
    gpu, program = catalog.find_hardware("h100"), results["gpt2"].program
    speed = Row(gpu, results["gpt2"]).speed
    assert speed.floor_seconds == program.compute_seconds + program.memory_seconds
    assert speed.floor_seconds > max(program.least_flops / gpu.peak_bf16, program.moved_bytes / gpu.bandwidth)


def test_largest_micro_batch_fills_what_jax_takes_of_the_memory(results):
    found, memory = results["largest"], catalog.find_hardware("rtx-3090").program_bytes
    bytes_per_row = 4 * 16384 * 4  # four batches are on a device while training
    assert found.fits and 0.8 < found.program.micro_batch * bytes_per_row / memory <= 1
    assert memory < found.too_large * bytes_per_row * 1.02


def test_model_that_fits_no_gpu_is_explained(results):
    sentence = Row(catalog.find_hardware("l4"), results["too large"]).sentence
    assert "does not fit: even its smallest form" in sentence and "more than the 16.63 available" in sentence


def test_evaluation_that_does_not_fit_is_a_hazard(results):
    assert "use --eval-batch" in hazard_of(results["large evaluation"], "evaluation")["sentence"]


def test_callback_that_needs_a_gpu_is_named(results):
    found = results["prints"]
    assert found.fits is None and "only where there is one: leave it out to plan" in found.problem

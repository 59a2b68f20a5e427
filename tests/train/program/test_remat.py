"""What the backward pass computes again: how much, and that the least of it is chosen."""

import jax
import numpy as np
import pytest

from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program import flops
from tpuswarm.train.program.compiled import compile_step, compile_traced, trace
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.request import REMATS, Choice, Request, choices
from tpuswarm.train.recipe import Clock, Options

ROWS, TOKENS, WIDTH, LAYERS = 8, 256, 64, 2


@pytest.fixture(scope="module")
def recipe():
    return GPT2(data="fake", layers=LAYERS, heads=2, width=WIDTH, context=TOKENS, vocab=300)


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_products_with_weights_and_the_kernel_are_not_computed_again(recipe, attention, monkeypatch):
    """Of plain attention the scores are computed again: they would be the most to keep."""
    monkeypatch.setattr(flops, "RECOMPUTED", "nothing is left out")
    found = {}
    for remat in REMATS:
        program = recipe.program(Options(remat=remat, attention=attention))
        state = jax.eval_shape(program.init, jax.random.key(0))
        clock = Clock(jax.random.key(0), np.int32(0), np.float32(0))
        traced = jax.jit(program.step).trace(state, program.batch_spec(ROWS), clock)
        found[remat] = flops.model_flops(traced.jaxpr).total
    scores = 2 * ROWS * TOKENS**2 * WIDTH * LAYERS
    assert found["dots"] - found["none"] == (scores if attention == "xla" else 0)
    qkv_and_fc = 2 * ROWS * TOKENS * (3 + 4) * WIDTH**2 * LAYERS
    assert found["full"] - found["dots"] > qkv_and_fc


def test_the_least_recomputation_that_fits_is_chosen(devices, monkeypatch):
    """In a loop, as on TPU: XLA's compiler for CPU undoes the recomputation of unrolled layers."""
    monkeypatch.setattr("tpuswarm.train.program.request.attention_and_loop", lambda *_: ("xla", "scan"))
    recipe = GPT2(data="fake", layers=8, heads=2, width=WIDTH, context=TOKENS, vocab=300)
    request, mesh = Request(batch=ROWS, accumulate=1), make_mesh(devices[:1])
    needed = {}
    for remat in REMATS:
        choice = Choice("replicate", remat, 1, "")
        traced = trace(recipe, request.options("cpu", "cpu"), choice, ROWS, mesh)
        needed[remat] = compile_traced(traced).memory.total
    assert needed["none"] > needed["dots"] > needed["full"]
    for remat, memory in needed.items():
        assert compile_step(recipe, request, devices[:1], memory).choice.remat == remat


def test_scores_are_never_kept_on_a_tpu_without_the_kernel():
    for kind, wanted in (("TPU v3", ["dots", "full"]), ("TPU v4", ["none", "dots", "full"])):
        tried = choices(Request(batch=8, accumulate=1), ["remat"], "tpu", kind, 1, 1, None)
        assert [choice.remat for choice in tried] == wanted

import jax
import numpy as np
import pytest

from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program import mesh
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock

pytestmark = pytest.mark.slow


def test_sharded_gpt2_with_dropout_has_the_losses_of_one_device(devices, monkeypatch):
    monkeypatch.setattr(mesh, "MIN_SHARDED_BYTES", 2**12)
    recipe = GPT2(data="fake", width=64, heads=2, layers=1, vocab=128, context=32, dropout=0.2)
    rows, losses = recipe.data("train").rows(0, 16), {}
    for count in (1, 8):
        compiled = compile_step(recipe, Request(batch=16, shard="fsdp"), devices[:count])
        state, losses[count] = compiled.init(jax.random.key(0)), []
        for step in range(3):
            state, metrics = compiled.step(state, rows, Clock(jax.random.key(1), np.int32(step), np.float32(0.1)))
            losses[count].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held < sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 0.6

import jax
import numpy as np
import pytest

from tests.train.program.test_compiled import train
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program import mesh
from tpuswarm.train.program.request import Request

pytestmark = pytest.mark.slow


def test_sharded_gpt2_with_dropout_has_the_losses_of_one_device(devices, monkeypatch):
    monkeypatch.setattr(mesh, "MIN_SHARDED_BYTES", 2**12)
    recipe = GPT2(data="fake", width=64, heads=2, layers=1, vocab=128, context=32, dropout=0.2)
    request = Request(batch=16, shard="fsdp")
    (*_, one), (_, state, eight) = (train(recipe, request, devices[:count]) for count in (1, 8))
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held < sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 0.6

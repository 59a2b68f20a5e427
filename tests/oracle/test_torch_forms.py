"""Exported modules with fused attention, in bf16, with recomputed layers, and without weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.oracle.zoo import LLAMA_LAYERS, ROWS, build, functional, mean_square, nn, step_in_torch, torch, trace

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.export import export
from tpuswarm.torch.graph import write
from tpuswarm.torch.interpreter import run_graph
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import default_request
from tpuswarm.train.recipe import Options

CAUSAL, FULL = (None, True), (None, False)


def attention_of(exported):
    """Return (mask, is causal) of each attention."""
    nodes = [node for node in exported.train.nodes if node.op == "tpuswarm.attention"]
    return [(node.args[3], node.args[5]) for node in nodes]


@pytest.mark.long
@pytest.mark.parametrize(
    ("traced", "expected"),
    [("llama", CAUSAL), ("gpt2", CAUSAL), ("bert", FULL), ("vit", FULL), ("t5", None)],
    indirect=["traced"],
)
def test_attention_stays_one_operation_with_its_mask_recognized(traced, expected):
    """transformers computes masks from positions; T5 adds a trained bias."""
    found = attention_of(traced.exported)
    assert found and (expected is None or set(found) == {expected})


class Padded(nn.Module):
    """Attention with a padding mask from the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, sequence, ids):
        x = self.linear(sequence)[:, None]
        mask = (ids[:, None, None, :6] > 20).expand(-1, 1, 6, 6)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask | torch.eye(6, dtype=torch.bool))


def test_mask_from_the_data_is_kept():
    module, rows = Padded(), {"sequence": ROWS["sequence"], "ids": ROWS["ids"]}
    exported = export(module, mean_square, rows)
    [(mask, _)] = attention_of(exported)
    assert mask is not None
    arrays, batch = jax.tree.map(jnp.asarray, (dict(exported.arrays), rows))
    found = run_graph(exported.train, arrays, batch, None)[0]
    np.testing.assert_allclose(found, step_in_torch(module, mean_square, rows)[0], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("traced", ["llama", "gpt2", "cnn"], indirect=True)  # torch has no LSTM in 16 bits on every CPU
def test_bf16_follows_autocast(traced, tmp_path):
    """Products are bfloat16, sums float32, whatever dtype the module's constants have."""
    module, loss, rows, exported = traced
    write(tmp_path / "module.safetensors", exported)
    module_recipe = recipe(tmp_path / "module.safetensors", data=rows, optimizer=optax.sgd(0.05))
    program = module_recipe.program(Options(precision="bf16"))
    state, batch = program.init(jax.random.key(0)), jax.tree.map(jnp.asarray, rows)
    found = jax.jit(program.evaluate)(state, batch)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        expected, _, _ = step_in_torch(module.eval(), loss, rows)
    assert found == pytest.approx(expected, rel=1e-2)
    products = model_flops(jax.make_jaxpr(program.evaluate)(state, batch)).products
    assert products and {str(dtype) for product in products for dtype in product.dtypes} == {"bfloat16"}


@pytest.mark.parametrize("traced", ["llama"], indirect=True)
def test_recomputed_layers_have_the_same_gradients(traced):
    def slope(remat):
        return lambda arrays: (
            run_graph(traced.exported.train, arrays, batch, jax.random.key(0), Options(remat=remat)).gradients
        )

    arrays, batch = traced.arrays, jax.tree.map(jnp.asarray, traced.rows)
    plain = jax.jit(slope("none"))(arrays)
    largest = max(np.abs(grad).max() for grad in plain.values())
    for remat in ("dots", "full"):
        assert str(jax.make_jaxpr(slope(remat))(arrays)).count("optimization_barrier") >= LLAMA_LAYERS
        for path, grad in jax.jit(slope(remat))(arrays).items():
            np.testing.assert_allclose(grad, plain[path], rtol=0, atol=1e-5 * largest, err_msg=path)


@pytest.mark.long
def test_module_without_weights_can_be_planned_and_not_trained(tmp_path):
    """Its shapes and masks equal those of the module with weights."""
    with torch.device("meta"):
        module, loss, rows = build("llama")
    save(module, loss, rows, tmp_path / "shapes.safetensors")
    module_recipe = recipe(tmp_path / "shapes.safetensors", data=rows, optimizer=optax.sgd(0.05))
    shapes, expected = (
        {name: (array.shape, array.dtype) for name, array in exported.arrays["params"].items()}
        for exported in (module_recipe.exported, trace("llama").exported)
    )
    assert shapes == expected
    assert attention_of(module_recipe.exported) == [CAUSAL] * LLAMA_LAYERS
    assert compile_step(module_recipe, default_request(module_recipe, batch=4), jax.devices("cpu")[:1]).flops.total > 0
    with pytest.raises(InputError, match="was exported from the meta device without weights and can only be planned"):
        Trainer(devices=1).fit(module_recipe, steps=1, batch=4, run=tmp_path / "run")

"""Forms of an exported module, against torch: attention kept whole, 16 bits, recomputed layers, shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.oracle.zoo import LAYERS, ROWS, build, functional, in_torch, nn, squared, torch, trace

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.export import export
from tpuswarm.torch.graph import write
from tpuswarm.torch.run import run
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import usual_request
from tpuswarm.train.recipe import Options

CAUSAL, FULL = (None, True), (None, False)


def attention_of(exported):
    """The mask of each attention, and whether it is causal."""
    nodes = [node for node in exported.train.nodes if node.op == "tpuswarm.attention"]
    return [(node.args[3], node.args[5]) for node in nodes]


@pytest.mark.parametrize(
    ("traced", "expected"),
    [("llama", CAUSAL), ("gpt2", CAUSAL), ("bert", FULL), ("vit", FULL), ("t5", None)],
    indirect=["traced"],
)
def test_attention_stays_one_operation_with_its_mask_recognized(traced, expected):
    """transformers compares positions; a kernel calls that causal. T5's mask is what the model makes of places."""
    found = attention_of(traced.exported)
    assert found and (expected is None or set(found) == {expected})


class Padded(nn.Module):
    """Attention to what is no padding, as the batch says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, sequence, ids):
        x = self.linear(sequence)[:, None]
        mask = (ids[:, None, None, :6] > 20).expand(-1, 1, 6, 6)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask | torch.eye(6, dtype=torch.bool))


def test_mask_of_the_data_stays():
    module, rows = Padded(), {"sequence": ROWS["sequence"], "ids": ROWS["ids"]}
    exported = export(module, squared, rows)
    [(mask, _)] = attention_of(exported)
    assert mask is not None
    arrays, batch = jax.tree.map(jnp.asarray, (dict(exported.arrays), rows))
    found = run(exported.train, arrays, batch, None)[0]
    np.testing.assert_allclose(found, in_torch(module, squared, rows)[0], rtol=1e-5)


@pytest.mark.parametrize("traced", ["llama", "gpt2", "cnn"], indirect=True)  # torch has no LSTM in 16 bits on every CPU
def test_bf16_follows_autocast(traced, tmp_path):
    """Products in 16 bits, whatever the module's constants are; sums in 32."""
    module, loss, rows, exported = traced
    write(tmp_path / "module.safetensors", exported)
    made = recipe(tmp_path / "module.safetensors", data=rows, optimizer=optax.sgd(0.05))
    program = made.program(Options(precision="bf16"))
    state, batch = program.init(jax.random.key(0)), jax.tree.map(jnp.asarray, rows)
    found = jax.jit(program.evaluate)(state, batch)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        expected, _, _ = in_torch(module.eval(), loss, rows)
    assert found == pytest.approx(expected, rel=1e-2)
    products = model_flops(jax.make_jaxpr(program.evaluate)(state, batch)).products
    assert products and {str(dtype) for product in products for dtype in product.dtypes} == {"bfloat16"}


@pytest.mark.parametrize("traced", ["llama"], indirect=True)
def test_recomputed_layers_have_the_same_gradients(traced):
    def slope(remat):
        return lambda arrays: (
            run(traced.exported.train, arrays, batch, jax.random.key(0), Options(remat=remat)).gradients
        )

    arrays, batch = traced.arrays, jax.tree.map(jnp.asarray, traced.rows)
    plain = jax.jit(slope("none"))(arrays)
    largest = max(np.abs(grad).max() for grad in plain.values())
    for remat in ("dots", "full"):
        assert str(jax.make_jaxpr(slope(remat))(arrays)).count("optimization_barrier") >= LAYERS
        for path, grad in jax.jit(slope(remat))(arrays).items():
            np.testing.assert_allclose(grad, plain[path], rtol=0, atol=1e-5 * largest, err_msg=path)


def test_module_without_weights_can_be_planned_and_not_trained(tmp_path):
    """Shapes and masks are those of the module with weights."""
    with torch.device("meta"):
        module, loss, rows = build("llama")
    save(module, loss, rows, tmp_path / "shapes.safetensors")
    made = recipe(tmp_path / "shapes.safetensors", data=rows, optimizer=optax.sgd(0.05))
    shapes, expected = (
        {name: (array.shape, array.dtype) for name, array in exported.arrays["params"].items()}
        for exported in (made.exported, trace("llama").exported)
    )
    assert shapes == expected
    assert attention_of(made.exported) == [CAUSAL] * LAYERS
    assert compile_step(made, usual_request(made, batch=4), jax.devices("cpu")[:1]).flops.total > 0
    with pytest.raises(InputError, match="was exported from the meta device, without weights: it can be planned"):
        Trainer(devices=1).fit(made, steps=1, batch=4, run=tmp_path / "run")

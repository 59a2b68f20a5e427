"""Forms of an exported module, against torch: attention kept whole, 16 bits, recomputed layers, shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.oracle.zoo import MODELS, ROWS, SMALL, first_argument, functional, in_torch, nn, squared, torch

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.export import export
from tpuswarm.torch.run import run
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import usual_request
from tpuswarm.train.recipe import Options


@pytest.mark.parametrize(
    ("name", "where"),
    [("llama", "is causal"), ("gpt2", "is causal"), ("bert", "hides nothing"), ("vit", "hides nothing"),
     ("t5", "is what the model makes of places")],
)  # fmt: skip
def test_attention_stays_one_operation_and_its_mask_is_known(name, where):
    """What transformers says with comparisons of positions is what a kernel calls causal."""
    make, loss, names = MODELS[name]
    graph = export(make(), loss, first_argument(make(), names)).train
    found = [each for each in graph.nodes if each.op == "scaled_dot_product_attention"]
    assert found
    for each in found:
        mask, causal = (*each.args, None, 0.0, False)[3], bool((*each.args, *[None] * 3)[5:6] == (True,))
        expected = {"is causal": (True, True), "hides nothing": (True, False)}.get(where)
        assert expected is None or (mask is None, causal) == expected


class Padded(nn.Module):
    """Attention to what is no padding, as the batch says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, sequence, ids):
        x = self.linear(sequence)[:, None]
        seen = (ids[:, None, None, :6] > 20).expand(-1, 1, 6, 6)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=seen | torch.eye(6, dtype=torch.bool))


def test_a_mask_of_the_data_stays():
    torch.manual_seed(0)
    module, rows = Padded(), {"sequence": ROWS["sequence"], "ids": ROWS["ids"]}
    graph = export(module, squared, rows).train
    (found,) = [each for each in graph.nodes if each.op == "scaled_dot_product_attention"]
    assert (*found.args, None)[3] is not None or found.kwargs.get("attn_mask")
    made = {"params": {name: each.detach().numpy() for name, each in module.named_parameters()}, "buffers": {}}
    arrays = jax.tree.map(jnp.asarray, made | {"constants": export(module, squared, rows).arrays["constants"]})
    batch = {name: jnp.asarray(each) for name, each in rows.items()}
    np.testing.assert_allclose(run(graph, arrays, batch, None)[0], in_torch(module, squared, rows)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "cnn"])  # torch has no LSTM in 16 bits on every CPU
def test_bf16_is_what_autocast_makes_of_it(name):
    """Products in 16 bits, whatever the module's constants are; sums in 32."""
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module, rows = make(), first_argument(make(), names)
    made = recipe(module, loss, rows, optax.sgd(0.05))
    program = made.program(Options(precision="bf16"))
    state = program.init(jax.random.key(0))
    batch = {each: jnp.asarray(array) for each, array in rows.items()}
    found = program.evaluate(state, batch)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        expected, _, _ = in_torch(module.eval(), loss, rows)
    assert found == pytest.approx(expected, rel=1e-2)
    products = model_flops(jax.make_jaxpr(program.evaluate)(state, batch)).products
    assert products and {str(each) for product in products for each in product.dtypes} == {"bfloat16"}


@pytest.mark.parametrize("kept", ["dots", "full"])
def test_recomputed_layers_have_the_same_gradients(kept):
    make, loss, names = MODELS["llama"]
    torch.manual_seed(0)
    exported = export(make(), loss, first_argument(make(), names))
    arrays = jax.tree.map(jnp.asarray, dict(exported.arrays))
    batch = {each: jnp.asarray(ROWS[each]) for each in names.split()}

    def slope(options):
        def objective(params):
            return run(exported.train, {**arrays, "params": params}, batch, jax.random.key(0), options)[0]

        return jax.grad(objective)

    plain, recomputed = (slope(Options(remat=remat)) for remat in ("none", kept))
    text = str(jax.make_jaxpr(recomputed)(arrays["params"]))
    assert text.count("checkpoint[") + text.count("remat2[") >= SMALL["num_hidden_layers"]
    mine, theirs = (jax.jit(each)(arrays["params"]) for each in (recomputed, plain))
    largest = max(np.abs(each).max() for each in theirs.values())
    for path, grad in theirs.items():
        np.testing.assert_allclose(mine[path], grad, rtol=0, atol=1e-5 * largest, err_msg=path)


def test_a_module_without_weights_can_be_planned_and_not_trained(tmp_path):
    """Shapes and masks are those of the module with weights; the file is small, whatever the module's size."""
    make, loss, names = MODELS["llama"]
    rows = first_argument(make(), names)
    with torch.device("meta"):
        module = make()
    save(module, loss, rows, tmp_path / "shapes.safetensors")
    whole = export(make(), loss, rows)
    made = recipe(tmp_path / "shapes.safetensors", data=rows, optimizer=optax.sgd(0.05))
    params = made.exported.arrays["params"]
    assert {name: (each.shape, each.dtype) for name, each in params.items()} == {
        name: (each.shape, each.dtype) for name, each in whole.arrays["params"].items()
    }
    asked = [
        [each.args[3:] for each in one.train.nodes if each.op == "scaled_dot_product_attention"]
        for one in (made.exported, whole)
    ]
    assert asked[0] == asked[1] == [(None, 0.0, True)] * SMALL["num_hidden_layers"]
    assert compile_step(made, usual_request(made, batch=4), jax.devices("cpu")[:1]).flops.total > 0
    with pytest.raises(InputError, match="was exported from the meta device, without weights: it can be planned"):
        Trainer(devices=1).fit(made, steps=1, batch=4, run=tmp_path / "run")

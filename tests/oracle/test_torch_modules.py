"""Exported modules have the losses, gradients and buffers of torch, and train as in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.oracle.zoo import MODELS, ROWS, build, label_loss, loss_in_torch, mean_square, nn, step_in_torch, torch

from tpuswarm import ArraySource, Trainer, to_torch
from tpuswarm.torch import recipe, state_dict
from tpuswarm.torch.export import export
from tpuswarm.torch.graph import write
from tpuswarm.torch.interpreter import run_graph
from tpuswarm.torch.ops import OPS, RANDOM

TRAINING_STEPS = 200
TAKE_LONG = ("t5", "bert", "vit", "convnext", "unet")


@pytest.mark.parametrize(
    "traced",
    [pytest.param(name, marks=pytest.mark.long) if name in TAKE_LONG else name for name in MODELS],
    indirect=True,
)
def test_loss_gradients_and_buffers_are_torchs(traced):
    """Evaluation uses fewer rows than training."""
    module, loss, rows, exported = traced
    arrays = traced.arrays

    def step(arrays, batch):
        return run_graph(exported.train, arrays, batch, jax.random.key(0))

    def evaluate(arrays, batch):
        return run_graph(exported.evaluate, arrays, batch, None)[:2]

    expected, grads, after = step_in_torch(module.train(), loss, rows)
    found, _, buffers, gradient = jax.jit(step)(arrays, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(np.abs(grad).max() for grad in grads.values())
    assert grads.keys() <= gradient.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(gradient[path], grad, rtol=0, atol=1e-5 * largest, err_msg=path)
    for path, buffer in buffers.items():
        np.testing.assert_allclose(buffer, after[path], rtol=1e-5, atol=1e-5, err_msg=path)

    fewer = {name: array[:2] for name, array in rows.items()}
    found, metrics = jax.jit(evaluate)(arrays, fewer)
    np.testing.assert_allclose(found, step_in_torch(module.eval(), loss, fewer)[0], rtol=1e-5)
    assert set(metrics) == ({"right"} if loss is label_loss else set())


@pytest.mark.long
@pytest.mark.parametrize("traced", ["mlp", "cnn", "gpt2"], indirect=True)
def test_module_trains_as_in_torch_and_goes_back(traced, tmp_path, request):
    """Take the same steps with the same data, then load the trained parameters."""
    _, loss, rows, exported = traced
    module, trained = (build(request.node.callspec.params["traced"])[0] for _ in range(2))
    random = np.random.default_rng(1)

    def noisy(array):
        return array + (0.1 * random.normal(size=array.shape).astype(array.dtype) if array.dtype == np.float32 else 0)

    data = {name: np.concatenate([noisy(array) for _ in range(8)]) for name, array in rows.items()}
    write(tmp_path / "module.safetensors", exported)
    module_recipe = recipe(tmp_path / "module.safetensors", data=data, optimizer=optax.sgd(0.05), defaults={"batch": 8})
    result = Trainer(devices=2, seed=0).fit(module_recipe, steps=TRAINING_STEPS, batch=8, run=tmp_path / "run")

    optimizer = torch.optim.SGD(module.train().parameters(), 0.05)
    losses, source = [], ArraySource(data, seed=0)
    for step in range(TRAINING_STEPS):
        found = loss_in_torch(module, loss, source.rows(step * 8, 8))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert result.metrics["loss"] == pytest.approx(losses[-1], rel=0.01) and losses[-1] < 0.9 * losses[0]
    trained.load_state_dict(state_dict(tmp_path / "run", trained))
    ours, theirs = (step_in_torch(model.eval(), loss, rows)[0] for model in (trained, module))
    assert ours == pytest.approx(theirs, rel=0.01)


class SixteenBits(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        self.inner = nn.Sequential(*layers).to(torch.bfloat16)

    def forward(self, input):
        return self.inner(input.to(torch.bfloat16))


def test_module_in_16_bits_trains_in_float32_and_gets_16_bits_back(tmp_path):
    def loss(outputs, batch):
        return (outputs.float() - batch["x"].float()[:, :2]).square().mean()

    module, rows, count = SixteenBits(), {"input": ROWS["x"], "x": ROWS["x"]}, len(ROWS["x"])
    module_recipe = recipe(module, loss, rows, optax.sgd(0.05))
    first = Trainer(devices=1).fit(module_recipe, steps=1, batch=count, run=tmp_path / "a").metrics["loss"]
    assert first == pytest.approx(float(loss_in_torch(module.train(), loss, rows).detach()), rel=2e-2)
    Trainer(devices=1).fit(module_recipe, steps=30, batch=count, run=tmp_path / "b")
    module.load_state_dict(state_dict(tmp_path / "b", module))
    assert module.inner[0].weight.dtype == torch.bfloat16
    assert float(loss_in_torch(module.train(), loss, rows).detach()) < 0.8 * first


def test_dropout_is_drawn_anew_at_each_step_and_not_in_evaluation():
    module, rows = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), {"input": ROWS["x"]}
    exported = export(module, mean_square, rows)
    arrays, batch = jax.tree.map(jnp.asarray, (dict(exported.arrays), rows))
    assert len({float(run_graph(exported.train, arrays, batch, jax.random.key(key))[0]) for key in (0, 0, 1)}) == 2
    first, second = (float(run_graph(exported.evaluate, arrays, batch, None)[0]) for _ in range(2))
    assert first == second == pytest.approx(step_in_torch(module.eval(), mean_square, rows)[0], rel=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_and_its_gradient_have_torchs_scale_in_every_precision(dtype, p):
    """In bfloat16, 1 - p and 1 / (1 - p) would be 0.17% off."""
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 4096), dtype)
    y, keep = RANDOM["native_dropout"](jax.random.key(0), x, p, True)
    scale = 1 / (1 - p) if p < 1 else 0.0
    gradient = OPS["native_dropout_backward"](x, keep, scale)
    theirs = to_torch(x) * torch.from_numpy(np.array(keep)) * scale
    for ours in (y, gradient):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(np.float32(ours), theirs.float().numpy())

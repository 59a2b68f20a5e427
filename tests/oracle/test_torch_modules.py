"""Modules of PyTorch, exported and run in JAX, against torch itself: losses, gradients, buffers, what is trained."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.oracle.zoo import MODELS, ROWS, classes, first_argument, in_torch, nn, squared, torch

from tpuswarm import ArraySource, Trainer
from tpuswarm.torch import recipe, save, state_dict
from tpuswarm.torch.export import export
from tpuswarm.torch.run import run


@pytest.mark.parametrize("name", list(MODELS))
def test_a_module_has_torchs_loss_gradients_and_buffers(name):
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    rows = first_argument(module, names)
    exported = export(module, loss, rows)
    params = {name: jnp.asarray(each) for name, each in exported.arrays["params"].items()}
    rest = {group: {n: jnp.asarray(a) for n, a in exported.arrays[group].items()} for group in ("buffers", "constants")}
    batch = {name: jnp.asarray(each) for name, each in rows.items()}

    def objective(params):
        found, _, buffers = run(exported.train, {"params": params, **rest}, batch, jax.random.key(0))
        return found, buffers

    expected, grads, after = in_torch(module.train(), loss, rows)
    (found, buffers), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(np.abs(each).max() for each in grads.values())
    assert grads.keys() <= gradient.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(gradient[path], grad, rtol=0, atol=1e-5 * largest, err_msg=path)
    for path, buffer in buffers.items():
        np.testing.assert_allclose(buffer, after[path], rtol=1e-5, atol=1e-5, err_msg=path)

    expected, _, _ = in_torch(module.eval(), loss, rows)
    found, metrics, _ = jax.jit(lambda p: run(exported.evaluate, {"params": p, **rest}, batch, None))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert set(metrics) == ({"right"} if loss is classes else set())


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "gpt2"])
def test_the_number_of_rows_is_free(name):
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    rows = first_argument(module, names)
    exported = export(module, loss, rows)
    arrays = {group: {n: jnp.asarray(a) for n, a in found.items()} for group, found in exported.arrays.items()}
    for count in (1, 3):
        some = {each: array[:count] for each, array in rows.items()}
        batch = {each: jnp.asarray(array) for each, array in some.items()}
        found = jax.jit(lambda arrays, batch: run(exported.evaluate, arrays, batch, None)[0])(arrays, batch)
        np.testing.assert_allclose(found, in_torch(module.eval(), loss, some)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2"])
def test_it_trains_as_torch_does_and_goes_back(tmp_path, name):
    """200 steps with the same data; the file is what hosts without torch read; the module takes what was trained."""
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    random = np.random.default_rng(1)
    rows = {each: np.concatenate([array + random.normal(size=array.shape).astype(array.dtype) * 0.1 if
            array.dtype == np.float32 else array for _ in range(8)]) for each, array in
            first_argument(module, names).items()}  # fmt: skip
    save(module, loss, rows, tmp_path / "module.safetensors")
    made = recipe(tmp_path / "module.safetensors", data=rows, optimizer=optax.sgd(0.05), defaults={"batch": 8})
    result = Trainer(devices=2, seed=0).fit(made, steps=200, batch=8, run=tmp_path / "run")

    optimizer = torch.optim.SGD(module.train().parameters(), 0.05)
    losses, source = [], ArraySource(rows, seed=0)
    for step in range(200):
        batch = {each: torch.from_numpy(np.array(array)) for each, array in source.rows(step * 8, 8).items()}
        batch = {each: one.long() if one.dtype == torch.int32 else one for each, one in batch.items()}
        inputs = {each: one for each, one in batch.items() if each in inspect.signature(module.forward).parameters}
        found = loss(module(**inputs), batch)
        found = found[0] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert result.metrics["loss"] == pytest.approx(losses[-1], rel=0.01) and losses[-1] < 0.9 * losses[0]
    trained = make()
    trained.load_state_dict(state_dict(tmp_path / "run", trained))
    mine, theirs = (in_torch(each.eval(), loss, {n: a[:8] for n, a in rows.items()})[0] for each in (trained, module))
    assert mine == pytest.approx(theirs, rel=0.01)


def test_a_module_in_16_bits_trains_in_float32_and_gets_16_back(tmp_path):
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(torch.bfloat16)
    rows = {"input": ROWS["x"], "x": ROWS["x"]}

    def loss(outputs, batch):
        return (outputs.float() - batch["x"].float()[:, :2]).square().mean()

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, input):
            return self.inner(input.to(torch.bfloat16))

    made = recipe(Takes(), loss, rows, optax.sgd(0.05))
    first = Trainer(devices=1).fit(made, steps=1, batch=len(ROWS["x"]), run=tmp_path / "a").metrics["loss"]
    theirs = loss(Takes().train()(torch.from_numpy(ROWS["x"])), {"x": torch.from_numpy(ROWS["x"])})
    assert first == pytest.approx(float(theirs.detach()), rel=2e-2)
    Trainer(devices=1).fit(made, steps=30, batch=len(ROWS["x"]), run=tmp_path / "b")
    back = Takes()
    back.load_state_dict(state_dict(tmp_path / "b", back))
    assert back.inner[0].weight.dtype == torch.bfloat16
    after = loss(back.train()(torch.from_numpy(ROWS["x"])), {"x": torch.from_numpy(ROWS["x"])})
    assert float(after.detach()) < 0.8 * first


def test_dropout_is_drawn_anew_at_each_step_and_not_in_evaluation():
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    exported = export(module, squared, {"input": ROWS["x"]})
    arrays = {group: {n: jnp.asarray(a) for n, a in exported.arrays[group].items()} for group in exported.arrays}
    batch = {"input": jnp.asarray(ROWS["x"])}
    losses = {float(run(exported.train, arrays, batch, jax.random.key(each))[0]) for each in (0, 0, 1)}
    assert len(losses) == 2
    found = [float(run(exported.evaluate, arrays, batch, None)[0]) for _ in range(2)]
    assert found[0] == found[1] == pytest.approx(in_torch(module.eval(), squared, {"input": ROWS["x"]})[0], rel=1e-5)

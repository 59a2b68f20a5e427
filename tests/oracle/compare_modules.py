"""Compare the training of a module with torch: loss, gradients and buffers at several batch sizes."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tests.oracle.zoo import nn, step_in_torch, torch

from tpuswarm.torch.check import QUICK_COMPILE
from tpuswarm.torch.export import export, export_by_rows
from tpuswarm.torch.interpreter import run_graph

BATCH_SIZES = 2, 3, 4, 7, 64
ROUNDING_FACTOR = 4
ROUNDING_DRAWS = 4


class Net(nn.Module):
    """Two linear layers and further attributes; forward is a function of the module and the input."""

    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 1), function
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def mse_loss(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean()


def make_batch(rows):
    random = np.random.default_rng(rows)
    x, y = (random.normal(size=(rows, width)).astype(np.float32) for width in (8, 1))
    return {"x": x, "y": y, "t": random.integers(0, 5, rows).astype(np.int32)}


def assert_trains_as_in_torch(
    module, loss=mse_loss, batch_sizes=BATCH_SIZES, make_batch=make_batch, is_file=True, allow_rounding=False,
):  # fmt: skip
    """Compare loss, gradients and buffers in training, and the loss in evaluation.

    is_file: export the module once for any number of rows, as for a file; else for each number of rows.
    allow_rounding: accept gradients that are as far from torch's as those are from torch's in float64, such as one that
    is 0 and that a BatchNorm of two rows computes as a difference of large numbers.
    """
    if is_file:
        exported = export(module, loss, make_batch(8))
    else:
        exported, graph_of_rows = export_by_rows(module, loss, make_batch(8), 4)
    arrays = {group: {name: jnp.asarray(x) for name, x in named.items()} for group, named in exported.arrays.items()}

    def step(is_train, arrays, batch):
        graph = exported.train if is_train else exported.evaluate
        if not is_file:
            graph, constants = graph_of_rows(is_train, len(batch["y"]))
            arrays = {**arrays, "constants": constants}
        return run_graph(graph, arrays, batch, jax.random.key(0) if is_train else None)

    train, evaluate = (jax.jit(partial(step, is_train), compiler_options=QUICK_COMPILE) for is_train in (True, False))
    trained = {name for name, param in module.named_parameters() if param.requires_grad}
    for rows in batch_sizes:
        batch = make_batch(rows)
        before = {name: array.clone() for name, array in module.state_dict().items()}
        expected, gradients, buffers = step_in_torch(module.train(), loss, batch)
        module.load_state_dict(before)
        ours = train(arrays, batch)
        np.testing.assert_allclose(ours.loss, expected, rtol=1e-5, atol=1e-6, err_msg=f"{rows} rows")
        assert set(ours.gradients) <= trained
        largest = max([1e-3, *(np.abs(grad[np.isfinite(grad)]).max(initial=0) for grad in gradients.values())])
        rounding = rounding_in_torch(module, loss, batch, gradients) if allow_rounding else {}
        for name in trained:
            found = ours.gradients.get(name, np.zeros(module.get_parameter(name).shape))
            wanted = gradients.get(name, np.zeros(found.shape))
            atol = 1e-5 * largest + ROUNDING_FACTOR * rounding.get(name, 0)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=atol, err_msg=f"{name}, {rows} rows")
        for name, buffer in ours.buffers.items():
            np.testing.assert_allclose(buffer, buffers[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {rows} rows")
        expected, _, _ = step_in_torch(module.eval(), loss, batch)
        np.testing.assert_allclose(evaluate(arrays, batch).loss, expected, rtol=1e-5, atol=1e-6, err_msg="evaluation")


def rounding_in_torch(module, loss, batch, gradients):
    """Return the largest difference of each gradient from the one in float64.

    A single difference may be 0 by luck, so some more are taken after changing the last bits of the inputs.
    """

    def float_arrays(convert):
        return {name: convert(x) if x.dtype == np.float32 else x for name, x in batch.items()}

    _, exact, _ = step_in_torch(copy.deepcopy(module).double(), loss, float_arrays(lambda x: x.astype(np.float64)))
    found, random = [gradients], np.random.default_rng(0)
    for _ in range(ROUNDING_DRAWS):
        changed = float_arrays(lambda x: np.nextafter(x, random.choice(np.float32([-np.inf, np.inf]), x.shape)))
        found.append(step_in_torch(copy.deepcopy(module), loss, changed)[1])
    return {name: max(np.abs(other[name] - exact[name]).max(initial=0) for other in found) for name in gradients}


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.round()

    @staticmethod
    def backward(context, gradient):
        return gradient

"""Modules trained beside torch itself: what several files of the oracle compare with."""

import jax
import jax.numpy as jnp
import numpy as np
from tests.oracle.zoo import in_torch, nn, torch

from tpuswarm.torch.export import export
from tpuswarm.torch.run import run

ROWS = 2, 3, 4, 7, 64


class Of(nn.Module):
    """Two layers, and whatever else is given, with a function of these and of the input as forward."""

    def __init__(self, function, **others):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 1), function
        for name, each in others.items():
            if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter):
                self.register_buffer(name, each)
            else:
                setattr(self, name, each)

    def forward(self, x):
        return self.function(self, x)


def squared(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean()


def batch_of(rows):
    random = np.random.default_rng(rows)
    x, y = (random.normal(size=(rows, width)).astype(np.float32) for width in (8, 1))
    return {"x": x, "y": y, "t": random.integers(0, 5, rows).astype(np.int32)}


def same_as_torch(module, loss=squared, rows=ROWS, batch=batch_of):
    """Loss, gradients and buffers of a module in training, and its loss in evaluation, beside torch's."""
    exported = export(module, loss, batch(8))
    arrays = {group: {name: jnp.asarray(each) for name, each in of.items()} for group, of in exported.arrays.items()}
    train = jax.jit(lambda arrays, batch: run(exported.train, arrays, batch, jax.random.key(0)))
    evaluate = jax.jit(lambda arrays, batch: run(exported.evaluate, arrays, batch, None))
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    for count in rows:
        given = batch(count)
        before = {name: each.clone() for name, each in module.state_dict().items()}
        theirs, gradients, buffers = in_torch(module.train(), loss, given)
        module.load_state_dict(before)
        ours = train(arrays, given)
        np.testing.assert_allclose(ours.loss, theirs, rtol=1e-5, atol=1e-6, err_msg=f"{count} rows")
        assert set(ours.gradients) <= trained
        largest = max([1e-3, *(np.abs(each[np.isfinite(each)]).max(initial=0) for each in gradients.values())])
        for name in trained:
            found = ours.gradients.get(name, np.zeros(module.get_parameter(name).shape))
            wanted = gradients.get(name, np.zeros(found.shape))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * largest, err_msg=f"{name}, {count} rows")
        for name, each in ours.buffers.items():
            np.testing.assert_allclose(each, buffers[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {count} rows")
        theirs, _, _ = in_torch(module.eval(), loss, given)
        np.testing.assert_allclose(evaluate(arrays, given).loss, theirs, rtol=1e-5, atol=1e-6, err_msg="evaluation")


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.round()

    @staticmethod
    def backward(context, gradient):
        return gradient

"""Random modules train as in torch: layers, stopped and custom gradients, checkpoints."""

import copy

import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.oracle.compare_modules import (
    ROUNDING_FACTOR,
    StraightThrough,
    assert_trains_as_in_torch,
    rounding_in_torch,
)
from tests.oracle.zoo import functional, nn, step_in_torch, torch
from tests.train.toy import clock

from tpuswarm.torch import recipe
from tpuswarm.torch.check import QUICK_COMPILE
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.recipe import Options

NET_WIDTH, NUM_STEPS = 8, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        places = x.view(-1, 2, 4)
        return self.inner(places, places, places, need_weights=False)[0].reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(4, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x.view(-1, 2, 4))[0].reshape(x.shape)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return functional.max_pool1d(self.inner(x[:, None]), 2).reshape(x.shape)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, NET_WIDTH, padding_idx=3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, NET_WIDTH))

    def forward(self, x):
        return x + self.rows((x[:, :2] > 0).sum(1)) * self.scale


class WithLinear(nn.Module):
    """A function of a linear layer and the input."""

    def __init__(self, function, frozen=False):
        super().__init__()
        self.inner, self.function = nn.Linear(NET_WIDTH, NET_WIDTH), function
        self.inner.weight.requires_grad_(not frozen)

    def forward(self, x):
        return self.function(self.inner, x)


def without_gradient(inner, x):
    with torch.no_grad():
        gate = torch.sigmoid(inner(x))
    return x * gate


def in_place(inner, x):
    x = inner(x)
    x[:, :4] += 1
    x[:, 2:6].mul_(2)
    return x


PARTS = {
    "linear": lambda: nn.Linear(NET_WIDTH, NET_WIDTH),
    "layer norm": lambda: nn.LayerNorm(NET_WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(NET_WIDTH),
    "group norm": lambda: nn.GroupNorm(2, NET_WIDTH),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "convolution": Convolution,
    "embedding": Table,
    "frozen": lambda: WithLinear(lambda inner, x: torch.tanh(inner(x)), frozen=True),
    "detach": lambda: WithLinear(lambda inner, x: x * inner(x).detach() + inner(x)),
    "no_grad": lambda: WithLinear(without_gradient),
    "straight through": lambda: WithLinear(lambda inner, x: StraightThrough.apply(inner(x))),
    "checkpoint": lambda: WithLinear(
        lambda inner, x: torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(inner(x)), x, use_reentrant=False)
    ),
    "number of rows": lambda: WithLinear(lambda inner, x: inner(x) * (1 / len(x)) + x.sum(0) / x.shape[0]),
    "views": lambda: WithLinear(
        lambda inner, x: torch.cat(inner(x).chunk(2, 1)[::-1], 1).view(len(x), 2, 4).flatten(1)
    ),
    "in place": lambda: WithLinear(in_place),
    "residual": lambda: WithLinear(lambda inner, x: x + functional.silu(inner(x))),
    "softmax": lambda: WithLinear(lambda inner, x: inner(x).softmax(-1) * 3),
    "normalized": lambda: WithLinear(lambda inner, x: functional.normalize(inner(x), dim=-1)),
    "clamped": lambda: WithLinear(lambda inner, x: inner(x).clamp(-1, 1)),
    "sorted": lambda: WithLinear(lambda inner, x: inner(x).sort(-1)[0]),
}
LOSSES = {
    "squared": lambda o, batch: ((o.mean(1, keepdim=True) - batch["y"]) ** 2).mean(),
    "classes": lambda o, batch: functional.cross_entropy(o, batch["t"], label_smoothing=0.1),
    "logits": lambda o, batch: functional.binary_cross_entropy_with_logits(o, (batch["y"] > 0).float().expand_as(o)),
    "by the rows": lambda o, batch: (o**2).sum() / len(o),
}
OPTIMIZERS = {
    "sgd": (lambda: optax.sgd(0.05, momentum=0.9), lambda params: torch.optim.SGD(params, 0.05, momentum=0.9)),
    "adam": (lambda: optax.adam(1e-2, eps=1e-5), lambda params: torch.optim.Adam(params, 1e-2, eps=1e-5)),
    "adamw": (
        lambda: optax.adamw(1e-2, eps=1e-5, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-5, weight_decay=0.1),
    ),
}


def make_batch(rows):
    random = np.random.default_rng(rows)
    x, y = (random.normal(size=(rows, width)).astype(np.float32) for width in (NET_WIDTH, 1))
    return {"input": x, "y": y, "t": random.integers(0, NET_WIDTH, rows).astype(np.int32)}


def build(names, seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(NET_WIDTH, NET_WIDTH), *(PARTS[name]() for name in names), nn.Linear(NET_WIDTH, NET_WIDTH)
    )


EXAMPLES = st.tuples(
    st.lists(st.sampled_from(list(PARTS)), min_size=1, max_size=5), st.sampled_from(list(LOSSES)), st.integers(0, 99)
)


@pytest.mark.parametrize("rows", [3, *(pytest.param(rows, marks=pytest.mark.long) for rows in (2, 4, 7, 64))])
@settings(max_examples=7)
@example((["batch norm"], "squared", 0))
@given(EXAMPLES)
def test_gradients_of_random_modules(rows, parts):
    names, loss, seed = parts
    assert_trains_as_in_torch(build(names, seed), LOSSES[loss], (rows,), make_batch, allow_rounding=True)


def parameters_with_rounding_for_gradient(module, loss, batch):
    """Return parameters whose gradient is 0 but for rounding, which Adam makes large: biases before a BatchNorm."""
    _, gradients, _ = step_in_torch(copy.deepcopy(module).train(), loss, batch)
    rounding = rounding_in_torch(module, loss, batch, gradients)
    return {name for name, grad in gradients.items() if np.abs(grad).max() <= ROUNDING_FACTOR * rounding[name]}


@pytest.mark.parametrize(
    ("devices", "accumulate"),
    [(4, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1), (1, 2), (4, 1)))],
)
@settings(max_examples=4)
@example((["batch norm"], "squared", 0), "adam")
@given(EXAMPLES, st.sampled_from(list(OPTIMIZERS)))
def test_five_steps_of_random_modules(devices, accumulate, parts, optimizer):
    names, loss, seed = parts
    if accumulate > 1:  # these depend on the size of the micro-batch
        names = [name for name in names if name not in ("batch norm", "number of rows")]
        loss = "squared" if loss == "by the rows" else loss
    module, batch = build(names, seed), make_batch(8)
    rounded = parameters_with_rounding_for_gradient(module, LOSSES[loss], batch)
    ours, theirs = OPTIMIZERS[optimizer]
    program = recipe(module, LOSSES[loss], batch, ours(), check=False).program(Options(accumulate=accumulate))
    mesh = make_mesh(jax.devices()[:devices])
    state = jax.device_put(program.init(jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    given_batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    step = jax.jit(program.step, compiler_options=QUICK_COMPILE)
    other = copy.deepcopy(module).train()
    updates = theirs([param for param in other.parameters() if param.requires_grad])
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    tensors["t"] = tensors["t"].long()
    for index in range(NUM_STEPS):
        state, metrics = step(state, given_batch, clock(index, index / NUM_STEPS))
        updates.zero_grad()
        found = LOSSES[loss](other(tensors["input"]), tensors)
        found.backward()
        updates.step()
        assert float(metrics["loss"]) == pytest.approx(float(found.detach()), rel=1e-3, abs=1e-5)
    for name, param in other.named_parameters():
        if name in rounded:
            continue
        np.testing.assert_allclose(state.params[name], param.detach().numpy(), rtol=2e-3, atol=2e-4, err_msg=name)

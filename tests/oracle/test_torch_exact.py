"""What torch's autograd decides is what trains: at ties, behind what stops a gradient, and for any number of rows."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.oracle.zoo import functional, in_torch, nn, torch

from tpuswarm import InputError
from tpuswarm.torch.export import export
from tpuswarm.torch.run import run

RANDOM = np.random.default_rng(0)
INF, NAN = math.inf, math.nan
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


def total(outputs, batch):
    return outputs if outputs.dim() == 0 else (outputs * torch.arange(1.0, 1 + outputs.numel()).view_as(outputs)).sum()


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


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return -gradient


def without_gradient(module, x):
    with torch.no_grad():
        hidden = module.first(x)
    return module.last(hidden)


def switched_off(module, x):
    with torch.set_grad_enabled(False):
        hidden = module.first(x)
    return module.last(hidden)


@torch.no_grad()
def decorated(module, x):
    return module.first(x)


def checkpointed(module, x):
    return module.last(torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(module.first(x)), x, use_reentrant=False))


def distilled(outputs, batch):
    target = (outputs * 2).detach()
    return functional.kl_div(functional.logsigmoid(outputs), functional.logsigmoid(target), log_target=True)


STOPS = {
    "detach": Of(lambda m, x: m.last(m.first(x) * m.first(x).detach())),
    "no_grad": Of(without_gradient),
    "no_grad as a decorator": Of(lambda m, x: m.last(decorated(m, x) + m.first(x))),
    "set_grad_enabled": Of(switched_off),
    "straight through": Of(lambda m, x: m.last(StraightThrough.apply(m.first(x)))),
    "gradient reversal": Of(lambda m, x: m.last(Reversed.apply(m.first(x)))),
    "checkpoint": Of(checkpointed),
    "in place": Of(lambda m, x: m.last(torch.tanh(m.first(x).add_(1).mul_(2)) + torch.relu_(m.first(x) * 2))),
    "hook": Of(lambda m, x: m.last(hooked(m.first(x)))),
}


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    return x


@pytest.mark.parametrize("case", STOPS)
def test_gradients_stop_where_torch_stops_them(case):
    same_as_torch(STOPS[case])


def test_detached_target_of_a_loss():
    same_as_torch(Of(lambda m, x: m.last(m.first(x))), distilled)


NUMBERS = {
    "len": (lambda m, x: m.last(m.first(x)) / len(x), lambda o, batch: (o**2).sum() / len(o)),
    "int": (lambda m, x: m.last(m.first(x)) * int(x.shape[0]), squared),
    "sqrt": (lambda m, x: m.last(m.first(x)) / math.sqrt(x.shape[0]), squared),
    "inverse": (lambda m, x: m.last(m.first(x)) * (1 / x.size(0)), squared),
    "reshape": (lambda m, x: m.last(m.first(x.reshape(len(x) * 2, 4).reshape(-1, 8))), squared),
    "ones": (lambda m, x: m.last(m.first(x) + torch.ones(len(x), 1) * torch.arange(len(x))[:, None]), squared),
    "pairs": (
        lambda m, x: m.last(m.first(x)),
        lambda o, batch: (o @ o.T).masked_fill(torch.eye(len(o)).bool(), 0).mean(),
    ),
    "pairs of others": (
        lambda m, x: m.last(m.first(x)),
        lambda o, batch: (o @ o.T).triu(1).sum() * 2 / (len(o) * (len(o) - 1)),
    ),
    "sizes of rows": (lambda m, x: m.last(m.first(x).cumsum(0).flip(0)), squared),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_number_of_rows_may_be_taken_for_a_number(case):
    function, loss = NUMBERS[case]
    same_as_torch(Of(function), loss)


@pytest.mark.parametrize(
    ("function", "loss"),
    [
        (lambda m, x: torch.stack([m.last(m.first(row)) for row in x]), squared),
        (lambda m, x: m.last(m.first(x)), lambda o, batch: sum(o[n].sum() for n in range(len(o)))),
        (lambda m, x: m.last(m.first(x)) * math.log(len(x)), squared),
    ],
)
def test_what_another_number_of_rows_changes_is_refused_with_the_line(function, loss):
    with pytest.raises(
        InputError, match=r"^test_torch_exact\.py:\d+: .* a program of any number of rows cannot do that"
    ):
        export(Of(function), loss, batch_of(8))


def test_halves_of_a_batch():
    """SimCLR's loss; an odd number of rows has none."""
    module = Of(lambda m, x: m.first(x))

    def pairs(outputs, batch):
        one, other = outputs.chunk(2)
        return (one - other).square().mean() + (outputs[: len(outputs) // 2] * other).mean()

    same_as_torch(module, pairs, (2, 4, 8, 64))
    exported = export(module, pairs, batch_of(8))
    with pytest.raises(InputError, match=r"a size of the module is 3\.5 for 7 rows: give it another number of rows"):
        run(exported.train, exported.arrays, batch_of(7), None)


POINTS = [0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, 100.0, -100.0, 2.5, 1e-8, -2.0, 2.0]
F = functional
SMOOTH = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "abs": torch.abs,
    "sign": lambda w: w.sign() * w,
    "clamp": lambda w: w.clamp(-1, 1),
    "clamp below": lambda w: w.clamp(min=0),
    "softplus": F.softplus,
    "clamp by tensors": lambda w: w.clamp(torch.tensor(-1.0), torch.tensor(1.0)),
    "mish": F.mish,
    "celu": F.celu,
    "elu": F.elu,
    "selu": F.selu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu tanh": lambda w: F.gelu(w, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "sinc": torch.sinc,
    "leaky": F.leaky_relu,
    "threshold": lambda w: F.threshold(w, 1, 2),
    "hardshrink": lambda w: F.hardshrink(w, 0.5),
    "softshrink": lambda w: F.softshrink(w, 0.5),
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "square root": lambda w: (w * w).sqrt(),
    "l1": lambda w: F.l1_loss(w, w.detach().round()),
    "smooth l1": lambda w: F.smooth_l1_loss(w, w.detach() - 1),
    "huber": lambda w: F.huber_loss(w, w.detach() + 1),
    "maximum": lambda w: torch.maximum(w, torch.ones_like(w)),
    "minimum": lambda w: torch.minimum(w, w * 1.0),
    "max": lambda w: w.round().max(),
    "amax": lambda w: w.round().amax(),
    "min": lambda w: w.round().min(0)[0],
    "median": lambda w: w.median(),
    "atan2": lambda w: torch.atan2(w * 0, w * 0),
    "bce": lambda w: F.binary_cross_entropy_with_logits(w, (w > 0).float()),
    "bce weighted": lambda w: F.binary_cross_entropy_with_logits(w, (w > 0).float(), pos_weight=torch.tensor(3.0)),
    "std of equal": lambda w: (w * 0 + 1).std(),
    "var of equal": lambda w: (w * 0 + 1).var(),
    **{f"norm {p}": lambda w, p=p: (w * 0).norm(p) for p in (0, 1, 2, 3, 1.5, 0.5, INF)},
    **{f"norm of points {p}": lambda w, p=p: w.norm(p) for p in (0, 1, 2, 3, INF, -INF)},
    "normalize": lambda w: F.normalize(w * 0, dim=0),
    "cosine": lambda w: F.cosine_similarity(w, w * 0, dim=0),
    "prod": lambda w: (w / 4).prod(),
    "prod with zeros": lambda w: (w.round() * 0.1).prod(),
    "cumprod": lambda w: (w / 4).cumprod(0),
    "power": lambda w: w.abs() ** 1.5,
    "power 0": lambda w: w**0,
    "power tensor": lambda w: (w.abs() + 0.0) ** torch.full_like(w, 2.0),
    "logsumexp": lambda w: w.logsumexp(0),
    "logsumexp of nothing": lambda w: (w * 0 - INF).nan_to_num(0, 0, 0).logsumexp(0),
    "fmod": lambda w: torch.fmod(w, 1.5),
    "remainder": lambda w: torch.remainder(w, 1.5),
    "round": lambda w: w.round() * w,
    "floor": lambda w: w.floor() * w,
    "where nan": lambda w: torch.where(w > 0, w, w.detach() * 0),
    "xlogy": lambda w: torch.xlogy(w.abs(), w.abs()),
    "erfinv": lambda w: torch.erfinv(w / 101),
    "erfc": torch.erfc,
    "lgamma": lambda w: torch.lgamma(w.abs() + 0.5),
    "digamma": lambda w: torch.digamma(w.abs() + 0.5),
    "logit": lambda w: torch.logit(w / 256 + 0.5),
    "expm1": lambda w: torch.expm1(w / 10),
    "log1p": lambda w: torch.log1p(w.abs()),
    "cummax": lambda w: w.round().cummax(0)[0],
    "logcumsumexp": lambda w: w.logcumsumexp(0),
    "sort": lambda w: w.round().sort()[0] * w.detach(),
    "topk": lambda w: w.round().topk(5)[0],
    "lerp": lambda w: torch.lerp(w, w * w, 0.3),
    "addcmul": lambda w: torch.addcmul(w, w, w, value=2),
    "addcdiv": lambda w: torch.addcdiv(w, w, w * w + 1),
}
"""Functions whose derivative somewhere is torch's decision."""


@pytest.mark.parametrize("case", SMOOTH)
def test_derivative_at_ties_bounds_and_far_away_is_torchs(case):
    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(POINTS))

        def forward(self, x):
            return SMOOTH[case](self.w)

    same_as_torch(Forward(), total, (4,))


def attends(mask):
    def forward(module, x):
        q = module.first(x)[:, None, None].expand(-1, 1, 4, 8)
        y = functional.scaled_dot_product_attention(q, q * 2, q * 3, mask(len(x)))
        return module.last(y[:, 0].sum(1))

    return forward


def a_row_of(value, rows):
    found = torch.ones(4, 4, dtype=torch.bool).tril()
    found[1] = False
    return found if value is None else torch.zeros(4, 4).masked_fill(~found, value)


class Padded(nn.Module):
    """A layer of a transformer, and one sequence of nothing but padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        sequence = torch.stack([self.first(x), x], 1)
        padding = (x[:, :2] > 10) | (torch.arange(len(x))[:, None] == 0)
        return self.last(self.layer(sequence, src_key_padding_mask=padding).nan_to_num(0).sum(1))


SEES_NOTHING = {
    "booleans": Of(attends(lambda rows: a_row_of(None, rows))),
    "-inf": Of(attends(lambda rows: a_row_of(-INF, rows))),
    "layer": Padded(),
}


@pytest.mark.parametrize("case", SEES_NOTHING)
def test_attention_of_a_place_that_sees_nothing(case):
    same_as_torch(SEES_NOTHING[case])


def rows_of(table):
    """Looks up what the batch names, in a table that is not trained."""
    return lambda m, x: m.last(m.first(x) * table(m, x.abs().long().clamp(0, 4).sum(1) % 5))


WIDE = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
ARGUMENTS = {
    "scatter reduce": Of(
        lambda m, x: m.last(m.first(x) * x.scatter(1, torch.zeros(len(x), 3, dtype=torch.long), x, reduce="add"))
    ),
    "scatter_reduce mean": Of(
        lambda m, x: m.last(x.scatter_reduce(1, (x > 0).long(), m.first(x), "mean", include_self=False))
    ),
    "scatter_reduce amax": Of(lambda m, x: m.last(x.scatter_reduce(1, (x > 0).long(), m.first(x), "amax"))),
    "index_reduce": Of(
        lambda m, x: m.last(m.first(x).index_reduce(1, torch.tensor([0, 1, 1]), m.first(x)[:, :3] * 2, "amax"))
    ),
    "scale_grad_by_freq": Of(
        lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, scale_grad_by_freq=True)
    ),
    "padding_idx": Of(lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, padding_idx=1)),
    "sparse": Of(lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, sparse=True)),
    "uint8": Of(lambda m, x: m.last(m.first(x) * (m.scale * 2).float()), scale=torch.tensor([200], dtype=torch.uint8)),
    "16 and 32 bits": Of(
        lambda m, x: m.last(m.first(x) * (m.narrow + m.whole)),
        narrow=torch.full((8,), 0.1, dtype=torch.bfloat16),
        whole=torch.full((8,), 1.001),
    ),
    "schedule of the batch": Of(rows_of(lambda m, t: m.betas[t][:, None]), betas=torch.linspace(0.1, 1, 5)),
    "embedding of a buffer": Of(rows_of(lambda m, t: functional.embedding(t, m.rows)), rows=torch.randn(5, 8)),
    "gather of a buffer": Of(rows_of(lambda m, t: m.rows.gather(0, t[:, None].expand(-1, 8))), rows=torch.randn(5, 8)),
    "scatter into a buffer": Of(
        rows_of(lambda m, t: m.rows.index_add(0, t, m.first(t[:, None].float().expand(-1, 8)))[t]),
        rows=torch.randn(5, 8),
    ),
    "float64": Of(lambda m, x: m.last(m.first(x) * m.wide.sum().float()), wide=WIDE),
    "beta 0": Of(
        lambda m, x: m.last(torch.addmm(m.nothing, m.first(x), m.first.weight, beta=0)), nothing=torch.full((8,), NAN)
    ),
    "interpolate": Of(
        lambda m, x: m.last(
            functional.interpolate(m.first(x)[:, None], scale_factor=0.6, mode="nearest").sum(-1).expand(-1, 8)
        )
    ),
    "spectral norm": Of(
        lambda m, x: m.last(m.layer(x)), layer=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "old spectral norm": Of(lambda m, x: m.last(m.layer(x)), layer=nn.utils.spectral_norm(nn.Linear(8, 8))),
    "batch norm without momentum": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, momentum=None)),
    "momentum": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, momentum=0.3)),
    "no running statistics": Of(
        lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, track_running_stats=False)
    ),
    "group norm": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.GroupNorm(2, 8)),
    "instance norm": Of(lambda m, x: m.last(m.norm(m.first(x)[:, None])[:, 0]), norm=nn.InstanceNorm1d(1, affine=True)),
    "rms norm": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.RMSNorm(8)),
    "layer norm without bias": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.LayerNorm(8, bias=False)),
    "unused parameter": Of(lambda m, x: m.last(m.first(x)), unused=nn.Linear(3, 3)),
    "complex buffer": Of(lambda m, x: m.last(m.first(x)), turns=torch.ones(3, dtype=torch.complex64)),
    "tied": Of(lambda m, x: m.last(m.other(torch.tanh(m.first(x))))),
    "lstm": Of(
        lambda m, x: m.last(m.cells(x[:, None].expand(-1, 3, -1))[0][:, -1]), cells=nn.LSTM(8, 8, 2, batch_first=True)
    ),
    "lstm with a projection": Of(
        lambda m, x: m.last(m.cells(x[:, None].expand(-1, 3, -1))[0][:, -1]),
        cells=nn.LSTM(8, 12, 2, batch_first=True, proj_size=8),
    ),
    "gru with a state": Of(
        lambda m, x: m.last(m.cells(x[None].expand(3, -1, -1), m.first(x)[None])[0][-1]), cells=nn.GRU(8, 8)
    ),
    "cells": Of(lambda m, x: m.last(m.cell(x, (m.first(x), x))[0]), cell=nn.LSTMCell(8, 8)),
    "wide values": Of(
        lambda m, x: m.last(
            functional.scaled_dot_product_attention(
                m.first(x)[:, None, :, None], x[:, None, :, None], m.first(x)[:, None, :, None].expand(-1, -1, -1, 3)
            )[:, 0, :, 2]
        )
    ),
    "max pool with places": Of(
        lambda m, x: m.last(
            functional.max_unpool1d(*functional.max_pool1d(m.first(x)[:, None], 2, return_indices=True), 2)[:, 0]
        )
    ),
    "dilated max pool": Of(
        lambda m, x: m.last(
            functional.max_pool2d(m.first(x)[:, None, None].expand(-1, 1, 3, -1), (1, 2), 1, (0, 1), (1, 2)).sum(2)[
                :, 0
            ]
        )
    ),
    "adaptive max pool": Of(lambda m, x: m.last(functional.adaptive_max_pool1d(m.first(x)[:, None], 8)[:, 0])),
    "adaptive max pool 2d": Of(
        lambda m, x: m.last(functional.adaptive_max_pool2d(m.first(x).view(-1, 1, 2, 4), (2, 4)).flatten(1))
    ),
    "lp pool": Of(lambda m, x: m.last(functional.lp_pool1d(m.first(x)[:, None], 2, 1)[:, 0])),
    "bilinear": Of(lambda m, x: m.last(m.both(m.first(x), x)), both=nn.Bilinear(8, 8, 8)),
    "embedding bag": Of(lambda m, x: m.last(m.bag((x > 0).long())), bag=nn.EmbeddingBag(5, 8)),
    "embedding bag of a maximum": Of(
        lambda m, x: m.last(m.bag((x > 0).long() + (x > 1).long(), None)),
        bag=nn.EmbeddingBag(5, 8, mode="max", padding_idx=0),
    ),
    "weighted embedding bag": Of(
        lambda m, x: m.last(m.bag((x > 0).long(), per_sample_weights=m.first(x))), bag=nn.EmbeddingBag(5, 8, mode="sum")
    ),
    "gaussian likelihood": Of(
        lambda m, x: m.last(m.first(x)) + functional.gaussian_nll_loss(m.first(x), x, m.first(x).relu())
    ),
    "ctc": Of(
        lambda m, x: (
            m.last(x)
            + functional.ctc_loss(
                m.first(torch.stack([x, x * 2, x * 3, x - 1, -x])).log_softmax(-1),
                (x[:, :2] > 0).long() + 1,
                (x[:, 0] > 0).long() + 4,
                (x[:, 1] > 0).long() + 1,
            )
        )
    ),
    "impossible ctc": Of(
        lambda m, x: (
            m.last(x)
            + functional.ctc_loss(
                m.first(torch.stack([x, x * 2])).log_softmax(-1),
                torch.ones(len(x), 2, dtype=torch.long),
                torch.full((len(x),), 2),
                torch.full((len(x),), 2),
                zero_infinity=True,
            )
        )
    ),
    "grid sample": Of(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 4), (m.first(x)[:, :6] * 2).view(-1, 3, 1, 2), align_corners=False
            )
            .view(len(x), 3)
            .repeat(1, 4)[:, :8]
        )
    ),
    "grid sample on the border": Of(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 4),
                m.first(x)[:, :2].view(-1, 1, 1, 2) * 0 + 1,
                padding_mode="border",
                align_corners=True,
            )
            .view(len(x), 1)
            .repeat(1, 8)
        )
    ),
    "grid sample in volumes": Of(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 2, 2),
                torch.tanh(m.first(x)[:, :6]).view(-1, 2, 1, 1, 3),
                align_corners=True,
                padding_mode="reflection",
            )
            .view(len(x), 2)
            .repeat(1, 4)
        )
    ),
    "antialiased": Of(
        lambda m, x: m.last(
            functional.interpolate(m.first(x).view(-1, 1, 2, 4), (1, 3), mode="bilinear", antialias=True)
            .flatten(1)
            .repeat(1, 3)[:, :8]
        )
    ),
    "antialiased bicubic": Of(
        lambda m, x: m.last(
            functional.interpolate(m.first(x).view(-1, 1, 2, 4), (1, 3), mode="bicubic", antialias=True)
            .flatten(1)
            .repeat(1, 3)[:, :8]
        )
    ),
    "short-time transform": Of(
        lambda m, x: m.last(
            torch.stft(m.first(x), 8, return_complex=True, window=torch.ones(8)).abs().sum(-1).repeat(1, 2)[:, :8]
        )
    ),
    "logarithm of a determinant": Of(
        lambda m, x: m.last(x) + torch.linalg.slogdet(m.first.weight @ m.first.weight.T + torch.eye(8))[1]
    ),
    "classes": Of(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(
                m.first(x), (x > 0).long().sum(1) % 8, torch.arange(8.0), ignore_index=3, label_smoothing=0.2
            )
        )
    ),
    "classes without a mean": Of(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(m.first(x), (x > 0).long().sum(1) % 8, ignore_index=3, reduction="none")[:, None]
        )
    ),
    "classes of pixels": Of(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(
                m.first(x).view(-1, 2, 2, 2), (x[:, :4] > 0).long().view(-1, 2, 2), torch.tensor([1.0, 3.0])
            )
        )
    ),
    "eigenvalues": Of(lambda m, x: m.last(x) + torch.linalg.eigvalsh(m.first.weight + m.first.weight.T).square().sum()),
    "qr": Of(lambda m, x: m.last(x @ torch.linalg.qr(m.first.weight)[1])),
    "cdist": Of(lambda m, x: m.last(torch.cdist(m.first(x), m.first.weight))),
    "pdist": Of(lambda m, x: m.last(torch.cdist(m.first(x), m.first.weight, p=1.0))),
    "prelu": Of(lambda m, x: m.last(m.slope(m.first(x))), slope=nn.PReLU(8)),
    "glu": Of(lambda m, x: m.last(functional.glu(torch.cat([m.first(x), x], 1)))),
    "fold": Of(lambda m, x: m.last(functional.unfold(m.first(x).view(-1, 1, 2, 4), (1, 1)).flatten(1))),
    "einsum": Of(lambda m, x: m.last(torch.einsum("bi,bj,ji->bi", m.first(x), x, m.first.weight))),
    "pixel shuffle": Of(lambda m, x: m.last(functional.pixel_shuffle(m.first(x).view(-1, 4, 1, 2), 2).flatten(1))),
    "roll": Of(lambda m, x: m.last(m.first(x).roll(2, 1))),
    "cross": Of(lambda m, x: m.last(torch.cat([torch.linalg.cross(m.first(x)[:, :3], x[:, :3]), x[:, :5]], 1))),
    "masked_scatter": Of(lambda m, x: m.last(m.first(x).masked_scatter(x > 0, x * 2))),
    "diagonal_scatter": Of(lambda m, x: m.last(m.first(x) @ m.first.weight.diagonal_scatter(torch.ones(8)))),
    "repeat_interleave": Of(lambda m, x: m.last(m.first(x)[:, :4].repeat_interleave(2, 1))),
    "searchsorted": Of(
        rows_of(lambda m, t: torch.searchsorted(m.bounds, t.float())[:, None]), bounds=torch.arange(4.0)
    ),
    "bucketize": Of(
        rows_of(lambda m, t: torch.bucketize(t.float(), m.bounds, right=True)[:, None]), bounds=torch.arange(4.0)
    ),
    "bincount": Of(rows_of(lambda m, t: torch.bincount(t, minlength=5)[t][:, None])),
    "one_hot": Of(rows_of(lambda m, t: functional.one_hot(t, 8))),
    "tensor_split": Of(lambda m, x: m.last(torch.cat(m.first(x).tensor_split(3, 1)[::-1], 1))),
    "unfold of a tensor": Of(lambda m, x: m.last(m.first(x).unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, :8])),
    "as_strided": Of(lambda m, x: m.last(m.first(x).as_strided((len(x), 8), (8, 1)))),
    "triangular": Of(lambda m, x: m.last(m.first(x) @ m.first.weight.tril())),
    "nan_to_num": Of(lambda m, x: m.last(torch.nan_to_num(m.first(x) / (x > 0).float(), 0.0, 1.0, -1.0))),
    "clip of norm": Of(lambda m, x: m.last(m.first(x).renorm(2, 0, 1.0))),
    "cholesky": Of(lambda m, x: m.last(x @ torch.linalg.cholesky(m.first.weight @ m.first.weight.T + torch.eye(8)))),
    "solve": Of(lambda m, x: m.last(torch.linalg.solve(m.first.weight + 3 * torch.eye(8), x.T).T)),
    "inverse": Of(lambda m, x: m.last(x @ torch.linalg.inv(m.first.weight + 3 * torch.eye(8)))),
    "determinant": Of(lambda m, x: m.last(x) * torch.linalg.det(m.first.weight + 2 * torch.eye(8))),
    "fft": Of(lambda m, x: m.last(torch.fft.irfft(torch.fft.rfft(m.first(x)) * 2, n=8))),
    "fft size": Of(lambda m, x: m.last(torch.fft.fft(m.first(x)).abs())),
}
ARGUMENTS["tied"].other = nn.Linear(8, 8)
ARGUMENTS["tied"].other.weight = ARGUMENTS["tied"].first.weight


@pytest.mark.parametrize("case", ARGUMENTS)
def test_operators_and_layers_train_as_in_torch(case):
    same_as_torch(ARGUMENTS[case], rows=(4, 7))


def test_what_a_module_says_is_shown_once(capfd):
    def forward(module, x):
        print("forward")
        print("deprecated", file=sys.stderr)
        return module.last(module.first(x))

    export(Of(forward), squared, batch_of(8))
    out, err = capfd.readouterr()
    assert (out.count("forward"), err.count("deprecated")) == (1, 1)

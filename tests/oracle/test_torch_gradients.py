"""What torch's autograd decides is what trains: at ties, behind what stops a gradient, and for any number of rows."""

import math
import sys

import pytest
from tests.oracle.beside_torch import Of, StraightThrough, batch_of, same_as_torch, squared
from tests.oracle.zoo import functional, nn, torch

from tpuswarm import InputError
from tpuswarm.torch.export import export
from tpuswarm.torch.run import run

INF = math.inf


def total(outputs, batch):
    return outputs if outputs.dim() == 0 else (outputs * torch.arange(1.0, 1 + outputs.numel()).view_as(outputs)).sum()


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
    with pytest.raises(InputError, match=r"^test_torch_gradients\.py:\d+: .* use operations on the whole batch"):
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


def test_what_a_module_says_is_shown_once(capfd):
    def forward(module, x):
        print("forward")
        print("deprecated", file=sys.stderr)
        return module.last(module.first(x))

    export(Of(forward), squared, batch_of(8))
    out, err = capfd.readouterr()
    assert (out.count("forward"), err.count("deprecated")) == (1, 1)

"""Gradients equal those of torch: at ties, where gradients stop, and for any number of rows."""

import math
import sys

import pytest
from tests.oracle.compare_modules import (
    Net,
    StraightThrough,
    assert_trains_as_in_torch,
    make_batch,
    mse_loss,
)
from tests.oracle.zoo import functional, nn, torch

from tpuswarm import InputError
from tpuswarm.torch.export import export, export_by_rows
from tpuswarm.torch.interpreter import run_graph

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


def in_inference(module, x):
    with torch.inference_mode():
        gate = torch.sigmoid(module.first(x))
    return module.last(x * gate.clone())  # torch saves no tensor of inference


@torch.no_grad()
def decorated(module, x):
    return module.first(x)


def checkpointed(module, x):
    return module.last(torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(module.first(x)), x, use_reentrant=False))


def distilled(outputs, batch):
    target = (outputs * 2).detach()
    return functional.kl_div(functional.logsigmoid(outputs), functional.logsigmoid(target), log_target=True)


def follows_itself(outputs, batch):
    with torch.set_grad_enabled(False):
        target = outputs * 2
    return (outputs - target).square().mean()


def online_and_target(module, x):
    """BYOL: the target network is frozen."""
    with torch.no_grad():
        target = module.target(x)
    return functional.cosine_similarity(module.first(x), target).mean() + module.last(x)


STOPS = {
    "detach": Net(lambda m, x: m.last(m.first(x) * m.first(x).detach())),
    "no_grad": Net(without_gradient),
    "no_grad as a decorator": Net(lambda m, x: m.last(decorated(m, x) + m.first(x))),
    "set_grad_enabled": Net(switched_off),
    "inference_mode": Net(in_inference),
    "target network": Net(online_and_target, target=nn.Linear(8, 8).requires_grad_(False)),
    "straight through": Net(lambda m, x: m.last(StraightThrough.apply(m.first(x)))),
    "gradient reversal": Net(lambda m, x: m.last(Reversed.apply(m.first(x)))),
    "checkpoint": Net(checkpointed),
    "in place": Net(lambda m, x: m.last(torch.tanh(m.first(x).add_(1).mul_(2)) + torch.relu_(m.first(x) * 2))),
    "hook": Net(lambda m, x: m.last(hooked(m.first(x)))),
}


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    return x


@pytest.mark.parametrize("case", STOPS)
def test_gradients_stop_where_torch_stops_them(case):
    assert_trains_as_in_torch(STOPS[case])


@pytest.mark.parametrize("loss", [distilled, follows_itself])
def test_target_that_the_loss_detaches(loss):
    assert_trains_as_in_torch(Net(lambda m, x: m.last(m.first(x))), loss)


ROW_NUMBERS = {
    "len": (lambda m, x: m.last(m.first(x)) / len(x), lambda o, batch: (o**2).sum() / len(o)),
    "int": (lambda m, x: m.last(m.first(x)) * int(x.shape[0]), mse_loss),
    "sqrt": (lambda m, x: m.last(m.first(x)) / math.sqrt(x.shape[0]), mse_loss),
    "inverse": (lambda m, x: m.last(m.first(x)) * (1 / x.size(0)), mse_loss),
    "reshape": (lambda m, x: m.last(m.first(x.reshape(len(x) * 2, 4).reshape(-1, 8))), mse_loss),
    "ones": (
        lambda m, x: m.last(m.first(x) + torch.ones(len(x), 1) * torch.arange(len(x))[:, None]),
        mse_loss,
    ),
    "pairs": (
        lambda m, x: m.last(m.first(x)),
        lambda o, batch: (o @ o.T).masked_fill(torch.eye(len(o)).bool(), 0).mean(),
    ),
    "pairs of others": (
        lambda m, x: m.last(m.first(x)),
        lambda o, batch: (o @ o.T).triu(1).sum() * 2 / (len(o) * (len(o) - 1)),
    ),
    "sizes of rows": (lambda m, x: m.last(m.first(x).cumsum(0).flip(0)), mse_loss),
}


@pytest.mark.parametrize("case", ROW_NUMBERS)
def test_number_of_rows_may_be_used_as_a_number(case):
    function, loss = ROW_NUMBERS[case]
    assert_trains_as_in_torch(Net(function), loss)


DEPENDS_ON_ROWS = {
    "loop over rows": (lambda m, x: torch.stack([m.last(m.first(row)) for row in x]), mse_loss),
    "loop in the loss": (lambda m, x: m.last(m.first(x)), lambda o, batch: sum(o[n].sum() for n in range(len(o)))),
    "logarithm": (lambda m, x: m.last(m.first(x)) * math.log(len(x)), mse_loss),
    "minimum": (lambda m, x: m.last(m.first(x)) * min(len(x), 5), mse_loss),
    "first rows": (lambda m, x: m.last(m.first(x)) + m.first(x[:5]).sum(), mse_loss),
    "branch": (lambda m, x: m.last(m.first(x)) * (2 if len(x) > 5 else 1), mse_loss),
}


@pytest.mark.parametrize("case", DEPENDS_ON_ROWS)
def test_operations_may_depend_on_the_number_of_rows_unless_exported_to_a_file(case):
    function, loss = DEPENDS_ON_ROWS[case]
    assert_trains_as_in_torch(Net(function), loss, (3, 7), is_file=False)
    with pytest.raises(InputError, match=r"^test_torch_gradients\.py:\d+: .*on the (number of )?rows"):
        export(Net(function), loss, make_batch(8))


def test_parameters_that_train_at_some_numbers_of_rows_are_refused():
    net = Net(lambda m, x: m.last(m.first(x)) if len(x) < 5 else m.last(x))
    _, graph_of_rows = export_by_rows(net, mse_loss, make_batch(8), 4)
    with pytest.raises(InputError, match=r"whether first\.bias is trained depends on the number of rows"):
        graph_of_rows(True, 8)


def test_halves_of_a_batch():
    """SimCLR's loss; an odd batch has no halves."""
    module = Net(lambda m, x: m.first(x))

    def pairs(outputs, batch):
        one, other = outputs.chunk(2)
        return (one - other).square().mean() + (outputs[: len(outputs) // 2] * other).mean()

    assert_trains_as_in_torch(module, pairs, (2, 4, 8, 64))
    exported = export(module, pairs, make_batch(8))
    with pytest.raises(InputError, match=r"a size in the module would be 3\.5 for 7 rows; use another number of rows"):
        run_graph(exported.train, exported.arrays, make_batch(7), None)


POINTS = [0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, 100.0, -100.0, 2.5, 1e-8, -2.0, 2.0]
F = functional
FUNCTIONS = {
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
    "ignored targets": lambda w: F.cross_entropy(w[None], torch.tensor([-100])),
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
"""Functions with points where torch chooses the derivative."""


@pytest.mark.parametrize("case", FUNCTIONS)
def test_derivative_at_ties_bounds_and_far_away_is_torchs(case):
    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(POINTS))

        def forward(self, x):
            return FUNCTIONS[case](self.w)

    assert_trains_as_in_torch(Forward(), total, (4,))


def test_output_of_a_module_is_shown_once(capfd):
    def forward(module, x):
        print("forward")
        print("deprecated", file=sys.stderr)
        return module.last(module.first(x))

    export(Net(forward), mse_loss, make_batch(8))
    out, err = capfd.readouterr()
    assert (out.count("forward"), err.count("deprecated")) == (1, 1)

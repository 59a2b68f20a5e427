"""A module that would train differently here than in torch is refused, by the parameter that says so."""

import jax
import numpy as np
import optax
import pytest
from tests.oracle.beside_torch import Of, squared
from tests.oracle.zoo import functional, nn, torch

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.graph import read
from tpuswarm.torch.ops import OPS
from tpuswarm.train.recipe import Options

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(64, width)).astype(np.float32) for width in (8, 1))


def plain(module, x):
    return module.last(torch.relu(module.first(x)))


def attend(module, x):
    places = module.first(x)[:, None]
    return module.last(module.attention(places, places, places)[0][:, 0])


DIFFERENT = {
    "relu": (lambda x: x, "the loss is .* here and"),
    "le": (lambda x, bound: x == x, "the gradient of first.weight is of norm .* here and of norm .* in torch"),
    "t": (lambda x: x.T * 1.1, "the loss"),
    "native_batch_norm_backward": (
        lambda gradient, *_: (gradient, gradient.sum(0), gradient.sum(0)),
        "the gradient of first",
    ),
}
"""Forms of operators that are wrong, and what tells."""


class Power(nn.Module):
    """Has a number called p, which is no probability."""

    def __init__(self):
        super().__init__()
        self.p = 3.0

    def forward(self, x):
        return x.abs().clamp(min=1e-3) ** self.p


SAME = {
    "power": Of(lambda m, x: m.last(m.power(m.first(x))), power=Power()),
    "plain": Of(plain),
    "dropout": Of(lambda m, x: m.last(m.drop(m.first(x))), drop=nn.Dropout(0.5)),
    "dropout as a function": Of(lambda m, x: m.last(functional.dropout(m.first(x), 0.5, m.training))),
    "batch norm": Of(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8)),
    "lstm": Of(
        lambda m, x: m.last(m.cells(m.first(x)[:, None])[0][:, 0]),
        cells=nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3),
    ),
    "attention": Of(attend, attention=nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)),
    "encoder": Of(
        lambda m, x: m.last(m.layer(m.first(x)[:, None])[:, 0]),
        layer=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ),
}  # fmt: skip


def made(module, loss=squared, **options):
    return recipe(module, loss, {"x": X, "y": Y}, optax.adam(1e-2), **options)


@pytest.mark.parametrize("case", DIFFERENT)
def test_module_that_would_train_differently_is_refused(case, tmp_path, monkeypatch):
    form, what = DIFFERENT[case]
    monkeypatch.setitem(OPS, case, form)
    module = Of(lambda m, x: m.last(torch.relu(m.norm(m.first(x)))), norm=nn.BatchNorm1d(8))
    refused = f"would train differently here than in torch: over 4 rows of the data {what}"
    with pytest.raises(InputError, match=refused):
        made(module).program(Options())
    with pytest.raises(InputError, match=refused):
        save(module, squared, {"x": X, "y": Y}, tmp_path / "module.safetensors")
    assert not (tmp_path / "module.safetensors").exists()
    made(module, check=False).program(Options())


@pytest.mark.parametrize("case", SAME)
def test_module_that_trains_as_in_torch_is_taken(case, capsys):
    module = SAME[case]
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.random.get_rng_state()
    made(module).program(Options())
    assert "not compared" not in capsys.readouterr().err
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_module_that_cannot_be_compared_is_taken_with_a_sentence(capsys):
    def noisy(module, x):
        return module.last(module.first(x) + torch.rand_like(x) if module.training else module.first(x))

    made(Of(noisy)).program(Options())
    assert "Of was not compared with torch itself: " in capsys.readouterr().err
    made(Of(noisy), check=False).program(Options())
    assert "not compared" not in capsys.readouterr().err


def test_random_numbers_in_evaluation_are_refused():
    module = Of(lambda m, x: m.last(functional.dropout(m.first(x), 0.5, True)))
    with pytest.raises(InputError, match=r"native_dropout.* draws random numbers in evaluation too"):
        made(module)


def test_parameters_without_a_gradient_stay_as_they_are(tmp_path):
    """Also with decay; from a file too."""
    module = Of(plain)
    module.first.requires_grad_(False)
    before = {name: each.detach().numpy().copy() for name, each in module.named_parameters()}
    save(module, squared, {"x": X, "y": Y}, tmp_path / "module.safetensors")
    assert read(tmp_path / "module.safetensors").frozen == ("first.weight", "first.bias")
    for of in (module, tmp_path / "module.safetensors"):
        loss = squared if of is module else None
        made = recipe(of, loss, {"x": X, "y": Y}, optax.adamw(0.1, weight_decay=0.1), defaults={"batch": 8})
        frozen = {each.path: each.frozen for each in made.program(Options()).parameters(_state(made))}
        assert frozen == {"first.weight": True, "first.bias": True, "last.weight": False, "last.bias": False}
        params = Trainer(devices=1).fit(made, steps=5, run=tmp_path / str(loss is None)).state.params
        for name in ("first.weight", "first.bias"):
            np.testing.assert_array_equal(params[name], before[name])
        assert (params["last.weight"] != before["last.weight"]).all()


def _state(made):
    return jax.eval_shape(made.program(Options()).init, jax.random.key(0))

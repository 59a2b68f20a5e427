"""A module that would train differently than in torch is refused, with the first difference."""

import jax
import numpy as np
import optax
import pytest
from tests.oracle.compare_modules import Net, mse_loss
from tests.oracle.zoo import functional, nn, torch
from tests.train.toy import clock

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.graph import read
from tpuswarm.torch.ops import OPS
from tpuswarm.train.recipe import Options

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(64, width)).astype(np.float32) for width in (8, 1))


def two_layers(module, x):
    return module.last(torch.relu(module.first(x)))


def attend(module, x):
    places = module.first(x)[:, None]
    return module.last(module.attention(places, places, places)[0][:, 0])


DIFFERENT = {
    "relu": (lambda x: x, "the loss is .* here and"),
    "le": (lambda x, bound: x == x, "the gradient of first.weight is of norm .* here and of norm .* in torch"),
    "t": (lambda x: x.T * 1.1, "the loss"),
    "mm": (lambda a, b: a @ b * 1.1, "the gradient of first"),
}
"""Wrong operators, and the difference that the check names."""


class Power(nn.Module):
    """Has a number called p that is not a probability of dropout."""

    def __init__(self):
        super().__init__()
        self.p = 3.0

    def forward(self, x):
        return x.abs().clamp(min=1e-3) ** self.p


SAME = {
    "power": Net(lambda m, x: m.last(m.power(m.first(x))), power=Power()),
    "plain": Net(two_layers),
    "unused parameter": Net(two_layers, unused=nn.Linear(3, 3)),
    "dropout": Net(lambda m, x: m.last(m.drop(m.first(x))), drop=nn.Dropout(0.5)),
    "dropout as a function": Net(lambda m, x: m.last(functional.dropout(m.first(x), 0.5, m.training))),
    "batch norm": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8)),
    "lstm": Net(
        lambda m, x: m.last(m.cells(m.first(x)[:, None])[0][:, 0]),
        cells=nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3),
    ),
    "attention": Net(attend, attention=nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)),
    "encoder": Net(
        lambda m, x: m.last(m.layer(m.first(x)[:, None])[:, 0]),
        layer=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ),
}  # fmt: skip


def make_recipe(module, loss=mse_loss, **options):
    return recipe(module, loss, {"x": X, "y": Y}, optax.adam(1e-2), **options)


@pytest.mark.parametrize("case", DIFFERENT)
def test_module_that_would_train_differently_is_refused(case, tmp_path, monkeypatch):
    form, what = DIFFERENT[case]
    monkeypatch.setitem(OPS, case, form)
    module = Net(lambda m, x: m.last(torch.relu(m.norm(m.first(x)))), norm=nn.BatchNorm1d(8))
    refused = f"would train differently than in torch: over 4 rows of the data {what}"
    with pytest.raises(InputError, match=refused):
        make_recipe(module).program(Options())
    with pytest.raises(InputError, match=refused):
        save(module, mse_loss, {"x": X, "y": Y}, tmp_path / "module.safetensors")
    assert not (tmp_path / "module.safetensors").exists()
    make_recipe(module, check=False).program(Options())


@pytest.mark.parametrize("case", SAME)
def test_module_that_trains_as_in_torch_is_accepted(case, capsys):
    module = SAME[case]
    before = {name: array.clone() for name, array in module.state_dict().items()}
    state = torch.random.get_rng_state()
    make_recipe(module).program(Options())
    assert "not compared" not in capsys.readouterr().err
    assert all(torch.equal(array, before[name]) for name, array in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_module_that_cannot_be_compared_is_accepted_with_a_message(capsys):
    def noisy(module, x):
        return module.last(module.first(x) + torch.rand_like(x) if module.training else module.first(x))

    make_recipe(Net(noisy)).program(Options())
    assert "Net was not compared with torch: " in capsys.readouterr().err
    make_recipe(Net(noisy), check=False).program(Options())
    assert "not compared" not in capsys.readouterr().err


def test_random_numbers_in_evaluation_are_refused():
    module = Net(lambda m, x: m.last(functional.dropout(m.first(x), 0.5, True)))
    with pytest.raises(InputError, match=r"native_dropout.* draws random numbers in evaluation"):
        make_recipe(module)


def test_parameters_without_a_gradient_stay_as_they_are(tmp_path):
    """With weight decay too, from a module and from a file."""
    module = Net(two_layers)
    module.first.requires_grad_(False)
    before = {name: param.detach().numpy().copy() for name, param in module.named_parameters()}
    save(module, mse_loss, {"x": X, "y": Y}, tmp_path / "module.safetensors")
    assert read(tmp_path / "module.safetensors").frozen == ("first.weight", "first.bias")
    for source in (module, tmp_path / "module.safetensors"):
        loss = mse_loss if source is module else None
        module_recipe = recipe(
            source, loss, {"x": X, "y": Y}, optax.adamw(0.1, weight_decay=0.1), defaults={"batch": 8}
        )
        program = module_recipe.program(Options())
        state = jax.eval_shape(program.init, jax.random.key(0))
        frozen = {parameter.path: parameter.frozen for parameter in program.parameters(state)}
        assert frozen == {"first.weight": True, "first.bias": True, "last.weight": False, "last.bias": False}
        params = Trainer(devices=1).fit(module_recipe, steps=5, run=tmp_path / str(loss is None)).state.params
        for name in ("first.weight", "first.bias"):
            np.testing.assert_array_equal(params[name], before[name])
        assert (params["last.weight"] != before["last.weight"]).all()


class Words(nn.Module):
    """A language model of 20 words, whose loss ignores -100."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids):
        return self.out(self.table(ids[:, :-1]))


def next_word(outputs, batch):
    return functional.cross_entropy(outputs.flatten(0, 1), batch["ids"][:, 1:].flatten(), ignore_index=-100)


IDS = RANDOM.integers(0, 20, (16, 6)).astype(np.int32)


@pytest.mark.parametrize(("row", "column", "number"), [(1, 2, 20), (9, 0, -1), (9, 5, 20)])
def test_index_outside_its_table_is_refused_before_the_first_step(row, column, number, tmp_path):
    ids = IDS.copy()
    ids[:, 5], ids[row, column] = -100, number
    save(Words(), next_word, {"ids": IDS}, tmp_path / "words.safetensors")
    for module, loss in (Words(), next_word), (tmp_path / "words.safetensors", None):
        message = rf"ids of the data holds {number}, but test_torch_checked.py:\d+ looks it up among 20 entries"
        with pytest.raises(InputError, match=message):
            recipe(module, loss, {"ids": ids}, optax.sgd(0.1)).data("train")


def test_error_of_torch_for_the_data_has_the_line():
    def loss(outputs, batch):
        return functional.cross_entropy(outputs[:, 0], batch["ids"][:, 0] * 2 + 1)

    message = r"^test_torch_checked\.py:\d+: torch fails over 4 rows of the data: .*Target \d+ is out of bounds"
    with pytest.raises(InputError, match=message):
        recipe(Words(), loss, {"ids": IDS}, optax.sgd(0.1)).program(Options())


def test_index_outside_its_table_gives_nan():
    """Data that is not in memory is not searched."""
    program = recipe(Words(), next_word, {"ids": IDS}, optax.sgd(0.1)).program(Options())
    state, step = program.init(jax.random.key(0)), jax.jit(program.step)
    for number, is_finite in (3, True), (20, False), (-1, False):
        ids = IDS.copy()
        ids[5, 2] = number
        assert np.isfinite(step(state, {"ids": ids}, clock(0, 0.0))[1]["loss"]) == is_finite

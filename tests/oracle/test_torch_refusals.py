"""What of a module cannot be exported: one sentence, with the module's line."""

import optax
import pytest
from tests.oracle.zoo import ROWS, nn, squared, torch

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save, state_dict
from tpuswarm.torch.export import export


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Writes(nn.Module):
    def forward(self, x):
        x[:, 0] = 0
        return x


class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(12))

    def forward(self, x):
        return torch.special.bessel_j0(x).sum() * self.w.sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.fft.fft(x * self.w).abs()


def on_cuda():
    """A module as it is on a GPU, without one."""
    module, mode = nn.Linear(8, 2, device="meta"), torch._subclasses.FakeTensorMode()
    for name, each in list(module.named_parameters()):
        fake = torch._subclasses.FakeTensor(mode, each.detach(), torch.device("cuda:0"))
        setattr(module, name, nn.Parameter(fake, requires_grad=False))
    return module


def half_there():
    return nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("module", "loss", "data", "said"),
    [
        (Branches, squared, "x", "test_torch_refusals.py:.*depends on values of the data"),
        (Writes, squared, "x", "writes into its input: copy it first"),
        (Folds, lambda outputs, batch: outputs, "x", "test_torch_refusals.py:.*special_bessel_j0.*has no form in JAX"),
        (lambda: nn.Linear(8, 2), lambda outputs, batch: outputs, "x", r"the loss is \[rows, 2\]: it has to be"),
        (lambda: nn.Linear(8, 2), squared, "y", "forward needs input, and the data has y"),
        (lambda: nn.Linear(8, 2, dtype=torch.complex64), squared, "x", "weight is complex"),
        (on_cuda, squared, "x", r"the module is on cuda: export needs it on the CPU \(module.cpu\(\)\)"),
        (half_there, squared, "x", "a part of the module is on the meta device, without values"),
        (Complex, squared, "x", "test_torch_refusals.py:.*_fft_r2c makes complex numbers: split them"),
        (lambda: nn.Linear(8, 2), lambda outputs, batch: (outputs.mean(), {"most": outputs}), "x", "metric most is"),
        (lambda: object(), squared, "x", "object is no torch.nn.Module"),
    ],
    ids=["branch", "in-place", "operator", "scalar", "argument", "complex-parameter", "device", "half",
         "complex", "metric", "module"],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_with_its_line(module, loss, data, said):
    made = module()
    rows = {"input" if isinstance(made, (nn.Linear, nn.Sequential)) and data == "x" else data: ROWS[data]}
    with pytest.raises(InputError, match=said) as error:
        export(made, loss, rows)
    assert "\n" not in str(error.value)


def test_the_line_is_the_users_whatever_its_folder_is_called(tmp_path, monkeypatch, capfd):
    (tmp_path / "torch").mkdir()
    head = "from torch import nn\n\nclass Mine(nn.Module):\n    def forward(self, x):\n"
    (tmp_path / "torch" / "mine_of_torch.py").write_text(f"{head}        return x if x.sum() > 0 else -x\n")
    monkeypatch.syspath_prepend(tmp_path / "torch")
    from mine_of_torch import Mine

    with pytest.raises(InputError, match=r"^mine_of_torch.py:5: what it does depends on values of the data"):
        export(Mine(), squared, {"x": ROWS["x"]})
    assert capfd.readouterr().err == "", "torch prints a graph"


def test_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(InputError, match=r"torch 2.4.1\+cpu is too old: 2.6 or newer exports modules"):
        export(nn.Linear(8, 2), squared, {"input": ROWS["x"]})


def test_a_state_dict_of_another_shape_is_refused(tmp_path):
    rows = {"input": ROWS["x"]}
    made = recipe(nn.Linear(8, 2), squared, rows, optax.sgd(0.1))
    Trainer(devices=1).fit(made, steps=1, batch=4, run=tmp_path / "run")
    with pytest.raises(InputError, match=r"weight is \[2, 8\] in .*, and \[3, 8\] in the module: it is another module"):
        state_dict(tmp_path / "run", nn.Linear(8, 3))
    with pytest.raises(InputError, match=r"run has no parameter 0\.weight: it trained another module"):
        state_dict(tmp_path / "run", nn.Sequential(nn.Linear(8, 2)))
    save(nn.Sequential(nn.Linear(8, 2)), squared, rows, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"run has no parameter 0\.bias: it trained another module"):
        state_dict(tmp_path / "run", tmp_path / "other.safetensors")

"""Modules that cannot be exported: one sentence, with the module's line."""

import optax
import pytest
from tests.oracle.zoo import ROWS, nn, squared, torch

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save, state_dict
from tpuswarm.torch.export import export


class Module(nn.Module):
    """Has weights; its forward is a function of the input and the weights."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(8)), function

    def forward(self, x):
        return self.function(x, self.w)


def writes(x, w):
    x[:, 0] = 0
    return x


def linear_on_cuda():
    """As it is on a GPU, without one."""
    module, mode = nn.Linear(8, 2, device="meta"), torch._subclasses.FakeTensorMode()
    for name, param in list(module.named_parameters()):
        fake = torch._subclasses.FakeTensor(mode, param.detach(), torch.device("cuda:0"))
        setattr(module, name, nn.Parameter(fake, requires_grad=False))
    return module


def outputs(outputs, batch):
    return outputs


HERE = "test_torch_refusals.py:.*"
CASES = {
    "branch": (Module(lambda x, w: x * 2 if x.sum() > 0 else x), squared, HERE + "depends on values of the data"),
    "in-place": (Module(writes), squared, "writes into its input x: copy it first"),
    "operator": (
        Module(lambda x, w: torch.special.bessel_j0(x).sum() * w.sum()), outputs,
        HERE + "special_bessel_j0.*has no form in JAX",
    ),
    "scalar": (nn.Linear(8, 2), outputs, r"the loss is \[rows, 2\]: it has to be"),
    "argument": (nn.Bilinear(8, 8, 2), squared, "forward needs input1, and the data has x"),
    "complex parameter": (nn.Linear(8, 2, dtype=torch.complex64), squared, "weight is complex"),
    "device": (linear_on_cuda(), squared, r"the module is on cuda: export needs it on the CPU \(module.cpu\(\)\)"),
    "half": (
        nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2, device="meta")), squared,
        "a part of the module is on the meta device, without values",
    ),
    "strides": (
        Module(lambda x, w: (x * w).t().as_strided((4,), (1,)).sum()), outputs,
        HERE + "as_strided reads memory that has gaps",
    ),
    "metric": (nn.Linear(8, 2), lambda outputs, batch: (outputs.mean(), {"most": outputs}), "metric most is"),
    "module": (object(), squared, "object is no torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_export_that_is_impossible_is_refused_with_the_line(case):
    module, loss, message = CASES[case]
    name = "input" if isinstance(module, (nn.Linear, nn.Sequential)) else "x"
    with pytest.raises(InputError, match=message) as error:
        export(module, loss, {name: ROWS["x"]})
    assert "\n" not in str(error.value)


def test_line_is_the_users_even_in_a_folder_called_torch(tmp_path, monkeypatch, capfd):
    (tmp_path / "torch").mkdir()
    head = "from torch import nn\n\nclass Mine(nn.Module):\n    def forward(self, x):\n"
    (tmp_path / "torch" / "mine_of_torch.py").write_text(f"{head}        return x if x.sum() > 0 else -x\n")
    monkeypatch.syspath_prepend(tmp_path / "torch")
    from mine_of_torch import Mine

    with pytest.raises(InputError, match=r"^mine_of_torch.py:5: what it does depends on values of the data"):
        export(Mine(), squared, {"x": ROWS["x"]})
    assert capfd.readouterr().err == "", "torch prints a graph"


def test_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(InputError, match=r"torch 2.4.1\+cpu is too old: 2.6 or newer exports modules"):
        export(nn.Linear(8, 2), squared, {"input": ROWS["x"]})


def test_state_dict_of_another_module_is_refused(tmp_path):
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

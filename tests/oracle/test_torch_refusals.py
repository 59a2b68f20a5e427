"""Modules that cannot be exported are refused with one sentence and the line of the module."""

import optax
import pytest
from tests.oracle.zoo import ROWS, mean_square, nn, torch

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save, state_dict
from tpuswarm.torch.export import export


class Module(nn.Module):
    """A function of the input and a parameter."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(8)), function

    def forward(self, x):
        return self.function(x, self.w)


def writes(x, w):
    x[:, 0] = 0
    return x


def linear_on_cuda():
    """Return a module whose parameters claim to be on a GPU."""
    module, mode = nn.Linear(8, 2, device="meta"), torch._subclasses.FakeTensorMode()
    for name, param in list(module.named_parameters()):
        fake = torch._subclasses.FakeTensor(mode, param.detach(), torch.device("cuda:0"))
        setattr(module, name, nn.Parameter(fake, requires_grad=False))
    return module


def outputs(outputs, batch):
    return outputs


HERE = "test_torch_refusals.py:.*"
CASES = {
    "branch": (Module(lambda x, w: x * 2 if x.sum() > 0 else x), mean_square, HERE + "depends on values of the data"),
    "in-place": (Module(writes), mean_square, "writes into its input x; copy it first"),
    "operator": (
        Module(lambda x, w: torch.special.bessel_j0(x).sum() * w.sum()), outputs,
        HERE + "special_bessel_j0.*is not implemented in JAX",
    ),
    "large integer": (
        Module(lambda x, w: (x.long() + 2**40).sum() * w.sum()), outputs,
        HERE + "add takes the number 1099511627776; JAX supports integers of 32 bits",
    ),
    "length": (
        Module(lambda x, w: x.repeat_interleave((w > 0).long(), 1)), outputs,
        HERE + "repeat_interleave by a tensor depends on the data; give it an output_size",
    ),
    "scalar": (nn.Linear(8, 2), outputs, r"the loss is \[rows, 2\]; return a scalar tensor"),
    "argument": (nn.Bilinear(8, 8, 2), mean_square, "forward needs input1, but the data has x"),
    "complex parameter": (nn.Linear(8, 2, dtype=torch.complex64), mean_square, "weight is complex"),
    "device": (linear_on_cuda(), mean_square, r"the module is on cuda; move it to the CPU with module.cpu\(\)"),
    "half": (
        nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2, device="meta")), mean_square,
        "only part of the module is on the meta device",
    ),
    "strides": (
        Module(lambda x, w: (x * w).t().as_strided((4,), (1,)).sum()), outputs,
        HERE + "as_strided needs memory without gaps",
    ),
    "metric": (nn.Linear(8, 2), lambda outputs, batch: (outputs.mean(), {"most": outputs}), "metric most is"),
    "module": (object(), mean_square, "object is not a torch.nn.Module"),
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

    with pytest.raises(InputError, match=r"^mine_of_torch.py:5: the control flow depends on values of the data"):
        export(Mine(), mean_square, {"x": ROWS["x"]})
    assert capfd.readouterr().err == "", "torch prints a graph"


def test_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(InputError, match=r"torch 2.12.1\+cpu is too old; install torch 2.13 or newer"):
        export(nn.Linear(8, 2), mean_square, {"input": ROWS["x"]})


def test_state_dict_of_another_module_is_refused(tmp_path):
    rows = {"input": ROWS["x"]}
    module_recipe = recipe(nn.Linear(8, 2), mean_square, rows, optax.sgd(0.1))
    Trainer(devices=1).fit(module_recipe, steps=1, batch=4, run=tmp_path / "run")
    with pytest.raises(
        InputError, match=r"weight is \[2, 8\] in .* and \[3, 8\] in the module; the run trained another module"
    ):
        state_dict(tmp_path / "run", nn.Linear(8, 3))
    with pytest.raises(InputError, match=r"run has no parameter 0\.weight; it trained another module"):
        state_dict(tmp_path / "run", nn.Sequential(nn.Linear(8, 2)))
    save(nn.Sequential(nn.Linear(8, 2)), mean_square, rows, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"run has no parameter 0\.bias; it trained another module"):
        state_dict(tmp_path / "run", tmp_path / "other.safetensors")

"""Plan an exported module."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.oracle.zoo import functional, nn, torch

import tpuswarm

RECIPE = """
import numpy as np
import optax
import tpuswarm

def make():
    data = {{"input": np.zeros((1, 256, 128), np.float32)}}
    return tpuswarm.torch.recipe("{file}", data=data, optimizer=optax.adam(1e-3))
"""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 128)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (2, 64)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


@pytest.mark.long
def test_module_gets_the_attention_and_layers_of_the_generation(tmp_path):
    """Splash attention on a v5e; plain attention and recomputed layers on a v3."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    with torch.device("meta"):
        module = nn.Sequential(Layer(), Layer())
    tpuswarm.torch.save(
        module,
        lambda outputs, batch: (outputs**2).mean(),
        {"input": np.zeros((8, 256, 128), np.float32)},
        tmp_path / "small.safetensors",
    )
    (tmp_path / "small.py").write_text(RECIPE.format(file=tmp_path / "small.safetensors"))
    command = [sys.executable, "-m", "tpuswarm", "plan", f"{tmp_path / 'small.py'}:make", "--batch", "16", "--json"]
    command += ["--on", "v3-8", "--on", "v5e-8"]
    environment = os.environ | {"PYTHONPATH": str(Path(tpuswarm.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    found = {row["accelerator"]: (row["fits"], row["remat"], row["attention"]) for row in rows}
    assert found == {"v3-8": (True, "dots", "xla"), "v5e-8": (True, "none", "splash")}

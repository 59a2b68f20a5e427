"""What the TPU compiler says of three well-known modules of PyTorch, for a v3-8 and a v5e-8. About 20 minutes.

ResNet-50, ViT-B/16 and a Llama of 1.2 B parameters, from transformers, exported on the meta device: no weights are
made or kept. Exports run in `.venv-oracle` (`make oracle` makes it), plans where torch is not. No TPU is needed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan import cell
from benchmarks.report import Settings, Skipped, Table
from benchmarks.torch_modules import in_oracle
from tpuswarm.config.units import GIB
from tpuswarm.plan.compile_pool import no_compiler

SLICES = ("v3-8", "v5e-8")
BATCHES = {"resnet50": 256, "vit_b": 256, "llama_1b": 8}
"""Rows of a step: pictures of 224 x 224, and 2,048 tokens each."""
RECIPE = '''
import numpy as np
import optax
import tpuswarm

def make():
    """{name} with AdamW."""
    data = {{name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in {rows}.items()}}
    return tpuswarm.torch.recipe("{file}", data=data, optimizer=optax.adamw(1e-3))
'''
PICTURES = {"pixels": ((3, 224, 224), "float32"), "label": ((), "int32")}
ROWS = {"resnet50": PICTURES, "vit_b": PICTURES, "llama_1b": {"ids": ((2048,), "int32")}}


def run(settings: Settings) -> Iterator[Table]:
    """A table for all."""
    if reason := no_compiler():
        raise Skipped(reason)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("resnet50",) if settings.quick else BATCHES:
            file = Path(folder) / f"{name}.safetensors"
            count = int(in_oracle("benchmarks.torch_shapes", name, str(file)).splitlines()[-1])
            script = Path(folder) / f"{name}.py"
            script.write_text(RECIPE.format(name=name, rows=ROWS[name], file=file))
            command: list[str | Path] = [Path(sys.executable).with_name("tpuswarm"), "plan", f"{script}:make", "--json"]
            command += ["--batch", str(BATCHES[name])]
            for each in SLICES:
                command += ["--on", each]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for row in json.loads(done.stdout)["rows"]:
                hbm = f"{row['hbm_bytes'] / GIB:.2f}"
                rows.append((f"{name}, {count:,}", row["accelerator"], str(BATCHES[name]), cell(row), hbm, _told(row)))
    yield Table(
        "PyTorch modules, as the TPU compiler fits them",
        ("module, parameters", "slice", "batch", "how, GiB a device", "of", "first hazard"),
        rows,
        ["exported on the meta device, bf16, AdamW in float32; no weights, no TPU"],
    )


def _told(row: dict[str, Any]) -> str:
    """The first thing that plan warns of, with its line of the module's source."""
    if not row["hazards"]:
        return "–"
    first = row["hazards"][0]
    return f"{first['file']}:{first['line']}: {first['sentence']}" if first["file"] else first["sentence"]

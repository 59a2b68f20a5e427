"""docs/torch.md, run as it stands: made where torch is, trained where it is not looked for, and back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "docs" / "torch.md"


def test_the_page(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    made, recipe, back, shapes, added, _, classifier = blocks
    (tmp_path / "module.py").write_text(made)
    (tmp_path / "circles.py").write_text(recipe)
    (tmp_path / "back.py").write_text(f"import numpy as np\nfrom circles import make\nfrom module import *\n{back}"
        "rows = make().data('train').rows(0, 500)\n"
        "found = module.eval()(torch.from_numpy(rows['input'])).argmax(-1).numpy()\n"
        "assert (found == rows['label']).mean() > 0.9\n")  # fmt: skip
    (tmp_path / "added.py").write_text(added + "assert tpuswarm.torch.op\n")
    (tmp_path / "shapes.py").write_text(shapes)
    (tmp_path / "classifier.py").write_text(classifier)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("module.py")
    run("-m", "tpuswarm", "train", "circles.py:make", "--run", "runs/circles")
    run("back.py")
    run("added.py")
    run("shapes.py")
    assert (tmp_path / "large.safetensors").stat().st_size < 100_000
    told = run("-m", "tpuswarm", "train", "classifier.py:make", "--eval-every", "100", "--run", "runs/classifier")
    assert "right" in told or "right" in (tmp_path / "runs/classifier/metrics.jsonl").read_text()
    wide = ("--shard", "fsdp", "--precision", "bf16", "--accumulate", "2", "--ema", "0.99")
    assert f"{' '.join(wide)} --run runs/wide" in PAGE.read_text()
    run("-m", "tpuswarm", "train", "circles.py:make", *wide, "--run", "runs/wide")

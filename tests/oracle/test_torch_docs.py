"""The programs of docs/torch.md run."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tpuswarm.torch.ops import OPS

pytest.importorskip("torch")
PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
CHECK = """
rows = make().data('train').rows(0, 500)
found = module.eval()(torch.from_numpy(rows['input'])).argmax(-1).numpy()
assert (found == rows['label']).mean() > 0.9
"""
LIGHTNING = """
from tests.oracle.test_torch_lightning import Classifier, functional

class MyModule(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))
"""


@pytest.mark.long
def test_page_of_torch(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module, circles, back, shapes, added, classifier = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    back = f"import numpy as np\nfrom circles import make\nfrom module import *\n{back}{CHECK}"
    programs = {"module": module, "circles": circles, "back": back, "shapes": shapes, "added": added}
    for name, text in (programs | {"classifier": classifier}).items():
        Path(f"{name}.py").write_text(text)

    def train(words):
        code, _, err = typed("train", *words.split())
        assert code == 0, err

    runpy.run_path("module.py")
    train("circles.py:make --run runs/circles")
    runpy.run_path("back.py")
    for name in ("circles", "module"):
        del sys.modules[name]
    wide = "--shard fsdp --precision bf16 --accumulate 2 --ema 0.99 --run runs/wide"
    assert wide in PAGE
    train(f"circles.py:make {wide}")
    Path("my_module.py").write_text(LIGHTNING)
    train("classifier.py:make --epochs 20 --eval-every 100 --run runs/classifier")
    assert "val_loss" in Path("runs/classifier/metrics.jsonl").read_text()

    runpy.run_path("shapes.py")
    assert Path("large.safetensors").stat().st_size < 100_000
    runpy.run_path("added.py")
    del OPS["special_bessel_j0"]

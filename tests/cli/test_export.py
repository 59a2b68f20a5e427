"""`export` writes a whole model or nothing; a published model without a tokenizer is pointed out."""

import shutil
from pathlib import Path

import pytest
import typer

from tests.journeys.documents import ROOT
from tpuswarm.cli.app import make_app
from tpuswarm.cli.train.train_options import make_recipe

pytestmark = pytest.mark.slow

GOLDEN = ROOT / "tests" / "recipes" / "golden" / "model"


def test_published_model_without_a_tokenizer_is_pointed_out(tmp_path, capsys):
    """Otherwise its weights would silently get tokens that they never saw."""
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "model"))
    context = typer.Context(typer.main.get_command(make_app()))

    def note(**options: str) -> str:
        make_recipe("gpt2-tiny", {"data": "fake"}, options, context, parent=f"hf:{copy}")
        return capsys.readouterr().err

    assert note() == ""
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (copy / name).unlink(missing_ok=True)
    assert note() == (
        f"note: hf:{copy} has no tokenizer, so gpt2-tiny uses its default; set --tokenizer if the parameters were "
        "trained with another\n"
    )
    assert note(tokenizer="bytes") == ""


def test_failed_export_leaves_nothing(on_small_disk):
    lines = on_small_disk("""
import os, sys
from pathlib import Path
import jax
import numpy as np
from tpuswarm import Options
from tpuswarm.cli import main
from tpuswarm.cli.train import trained
from tpuswarm.recipes.gpt2.recipe import GPT2

class Loaded:
    recipe = GPT2(data="fake", width=256)
    state = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(recipe.program(Options()).init, jax.eval_shape(jax.random.key, 0)),
    )

trained.load = lambda *_: Loaded
sys.argv = ["tpuswarm", "export", "run", sys.argv[1] + "/out", "--format", "hf"]
sys.stderr = sys.stdout
try:
    main()
except SystemExit as end:
    print(end.code, os.listdir(Path(sys.argv[3]).parent))
""")
    assert "out could not be written: " in lines[-2] and "No space left" in lines[-2]
    assert lines[-1] == "1 []"

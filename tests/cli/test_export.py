"""A published model without a tokenizer is pointed out before training starts from it."""

import shutil
from pathlib import Path

import typer

from tests.journeys.documents import ROOT
from tpuswarm.cli.app import make_app
from tpuswarm.cli.train.train_options import make_recipe

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

"""`tpuswarm export`: a trained model in a form that others read."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tpuswarm.cli.console import Best, Json, Run
from tpuswarm.cli.train.trained import load
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    form: Annotated[Literal["hf"], typer.Option("--format", help="hf: for Hugging Face transformers.")] = "hf",
    best: Best = False,
    as_json: Json = False,
) -> None:
    """Export a trained model to files that other programs read."""
    from tpuswarm.train.optional import Exports
    from tpuswarm.train.process.atomic import require_new, whole_folder
    from tpuswarm.train.run.directory import writing

    require_new(out)
    loaded = load(run, None, best)
    if not isinstance(loaded.recipe, Exports):
        raise InputError(f"{loaded.recipe.name} cannot be exported to Hugging Face")
    with writing(out), waiting("exporting"), whole_folder(out) as folder:
        loaded.recipe.export(loaded.state, folder)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        print(
            json.dumps(
                {"run": str(loaded.folder), "step": loaded.step, "format": form, "out": str(out), "files": files}
            )
        )
    else:
        say(f"exported {loaded.folder} at step {loaded.step:,} to {out}: {', '.join(files)}")

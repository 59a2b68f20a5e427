"""`tpuswarm export`: a trained model in a form that others read."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tpuswarm.cli.runs import Json, Run, load


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    form: Annotated[Literal["hf"], typer.Option("--format", help="hf: as Hugging Face's transformers loads it.")],
    as_json: Json = False,
) -> None:
    """Write a trained model as files that other programs read."""
    from tpuswarm.train.files import whole_folder
    from tpuswarm.train.run import writing

    with writing(out), whole_folder(out) as folder:
        loaded = load(run, None)
        loaded.recipe.export(loaded.state, folder)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        print(json.dumps({"run": run, "step": loaded.step, "format": form, "out": str(out), "files": files}))
    else:
        print(f"{run} at step {loaded.step} is in {out}: {', '.join(files)}")

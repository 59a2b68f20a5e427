"""`tpuswarm sample`, `evaluate`, `project`: what a run has learnt."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import Best, Json, Run
from tpuswarm.config.formatting import format_figure
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0: always the most likely token; 1: the model's own distribution.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Another seed gives another text, or other pictures.")] = 0,
    grid: Annotated[
        str | None, typer.Option(metavar="ROWSxCOLUMNS", help="Pictures side by side, such as 8x8, of a StyleGAN2.")
    ] = None,
    interpolate: Annotated[
        int | None,
        typer.Option(metavar="FRAMES", help="A film of so many pictures, on a walk that comes back."),
    ] = None,
    truncation: Annotated[
        float, typer.Option(help="Of pictures. 1: all that the model makes; less: fewer kinds, better ones.")
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="The file for pictures; its ending says the format."),
    ] = None,
    best: Best = False,
    as_json: Json = False,
) -> None:
    """Generate text, or a grid of pictures, with a trained model."""
    from tpuswarm.config.limits import check_settings
    from tpuswarm.train.optional import MakesPictures, WritesText

    check_number(tokens, "tokens", least=1)
    check_number(temperature, "temperature", least=0)
    check_number(truncation, "truncation", least=0, most=1)
    check_settings({"seed": seed})
    if interpolate is not None:
        check_number(interpolate, "interpolate", least=2)
        grid = grid or "1x1"
    if grid is not None:
        from tpuswarm.cli.train.pictures import check_picture, write_pictures

        rows, columns = _rows_and_columns(grid)
        out = out or Path("grid.png" if interpolate is None else "walk.gif")
        check_picture(out, interpolate is not None)
        loaded = load(run, None, best)
        if not isinstance(loaded.recipe, MakesPictures):
            raise InputError(f"{loaded.recipe.name} cannot make pictures")
        count = interpolate or 1
        with waiting("generating"):
            made = loaded.recipe.grids(loaded.state, rows, columns, truncation=truncation, seed=seed, count=count)
            write_pictures(made, out)
        if as_json:
            print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "grid": grid, "out": str(out)}))
        elif interpolate is None:
            say(f"{loaded.folder} at step {loaded.step:,}: {rows * columns:,} pictures in {out}")
        else:
            say(f"{loaded.folder} at step {loaded.step:,}: a film of {count:,} frames in {out}")
        return
    loaded = load(run, None, best)
    if not isinstance(loaded.recipe, WritesText):
        pictures = isinstance(loaded.recipe, MakesPictures)
        why = "makes pictures, not text: add --grid 8x8" if pictures else "cannot generate text"
        raise InputError(f"{loaded.recipe.name} {why}")
    with waiting("generating"):
        text = loaded.recipe.sample(loaded.state, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "prompt": prompt, "text": text}))
    else:
        print(prompt + text)


def _rows_and_columns(grid: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]?)x([1-9][0-9]?)", grid)
    if not match:
        raise InputError(f"grid is ROWSxCOLUMNS, each from 1 to 99, such as 8x8, not {grid!r}")
    return int(match[1]), int(match[2])


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option(help="Use all of this data instead of the run's held-out part.")] = None,
    split: Annotated[str, typer.Option(help="Rows to use: validation, test, train or all.")] = "validation",
    features: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Compare pictures by a function of yours, such as Inception's."),
    ] = None,
    best: Best = False,
    as_json: Json = False,
) -> None:
    """Measure the loss of a trained model on data; of pictures also how far they are from real ones."""
    if data and split != "validation":
        raise InputError("--data is evaluated as a whole: leave --split out")
    loaded = load(run, data, best)
    from tpuswarm.train.loop.evaluate import evaluate_run
    from tpuswarm.train.optional import Measured

    with waiting("evaluating") as far:
        values, rows = evaluate_run(loaded, "all" if data else split, far=far)
    more = {}
    if isinstance(loaded.recipe, Measured):
        with waiting("generating pictures") as far:
            more = loaded.recipe.measures(loaded.state, features, lambda done, all_: far(f"{done:,} of {all_:,}"))
    elif features:
        raise InputError(f"{loaded.recipe.name} is measured by its loss alone: leave --features out")
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "rows": rows, **values, **more}))
        return
    shown = ", ".join(f"{name} {format_figure(value)}" for name, value in values.items())
    what = data or ("the held-out data" if split == "validation" else f"the {split} data")
    say(f"{loaded.folder} at step {loaded.step:,}: {shown} over {rows:,} rows of {what}")
    if more:
        from tpuswarm.cli.train.pictures import told

        say(told(more, features))


def project(
    run: Run,
    picture: Annotated[Path, typer.Argument(help="A picture; its middle square is taken.")],
    steps: Annotated[
        int, typer.Option(help="Of the search; each takes about as long as making a picture thrice.")
    ] = 500,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    out: Annotated[
        Path, typer.Option(help="The picture beside the one found; its code goes to the same name with .npy.")
    ] = Path("projected.png"),
    best: Best = False,
    as_json: Json = False,
) -> None:
    """Find the latent code of a given picture in a trained StyleGAN2."""
    from tpuswarm.cli.train.pictures import check_picture, write_code, write_pictures
    from tpuswarm.config.limits import check_settings
    from tpuswarm.train.optional import FindsCodes

    check_number(steps, "steps", least=1)
    check_settings({"seed": seed})
    check_picture(out, False)
    if not picture.is_file():
        raise InputError(f"there is no picture {picture}")
    loaded = load(run, None, best)
    if not isinstance(loaded.recipe, FindsCodes):
        raise InputError(f"{loaded.recipe.name} cannot find the code of a picture")
    given = loaded.recipe.read_picture(picture)
    with waiting("searching") as far:
        found = loaded.recipe.project(
            loaded.state, given, steps, seed, lambda done, all_: far(f"step {done:,} of {all_:,}")
        )
    code = write_code(found.w, out)
    write_pictures(iter([found.beside(given)]), out)
    if as_json:
        facts = {"run": str(loaded.folder), "step": loaded.step, "error": found.error, "out": str(out)}
        print(json.dumps(facts | {"code": str(code)}))
    else:
        made = f"{picture} beside what {loaded.folder} makes of it"
        say(f"{out}: {made}, {found.error:.1f} of 255 apart; its code: {code}")


def load(run: str, data: str | None, best: bool = False) -> Any:
    """A run's newest state on all devices, or the best that it kept, with `data` in the place of its own."""
    from tpuswarm.train.process import platform
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.listing import find_run
    from tpuswarm.train.storage.copy import bring
    from tpuswarm.train.storage.folders import is_url, shown

    folder = bring(run, whole=True) if is_url(run) else Path(find_run(run))
    swarm = "swarm" in read_config(folder)
    platform.load_jax()
    with waiting(f"reading {shown(folder)}", short=0.0):
        from tpuswarm.swarm.storage.load import load_swarm
        from tpuswarm.train.run.loaded import load_run

        options = {"data": data} if data else None
        if swarm and not best:
            loaded = load_swarm(folder, platform.local_devices(), options)
        else:
            loaded = load_run(folder, platform.local_devices(), options, best=best)
    for note in loaded.notes:
        say(note, err=True)
    return loaded

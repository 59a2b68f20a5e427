"""`tpuswarm sample`, `evaluate`, `export`, `project`: use trained parameters."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tpuswarm.cli.console import Best, Json, Run, Trust, confirm
from tpuswarm.config.formatting import format_figure
from tpuswarm.config.limits import check_settings
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.train.process import platform
from tpuswarm.train.process.atomic import new_folder, require_new_folder, write_atomically
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.recipe import supports
from tpuswarm.train.run.directory import read_config, writing
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.run.trust import is_trusted, rebuild_recipe, require_trust
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import is_url, shown

if TYPE_CHECKING:
    import numpy as np

PICTURE_EXTENSIONS = (".png", ".jpg", ".webp")
FILM_EXTENSIONS = (".gif", ".png", ".webp")
FRAME_MS = 40

Temperature = Annotated[float, typer.Option(help="0: always the most likely token; 1: the model's own distribution.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the most likely tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the most likely tokens that together reach this probability.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: repeat fewer tokens of the text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.", show_default=False)]


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="Another seed gives another text, or other pictures.")] = 0,
    grid: Annotated[
        str | None, typer.Option(metavar="ROWSxCOLUMNS", help="Pictures side by side, such as 8x8, of a StyleGAN2.")
    ] = None,
    interpolate: Annotated[
        int | None, typer.Option(metavar="FRAMES", help="A film of so many pictures, on a walk that comes back.")
    ] = None,
    truncation: Annotated[
        float, typer.Option(help="Of pictures. 1: full variety; less: fewer kinds, better ones.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="The file for pictures; its extension gives the format.")] = None,
    best: Best = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Generate text, or a grid of pictures, with a trained model."""
    check_number(tokens, "tokens", least=1)
    check_sampling(temperature, top_k, top_p, repetition_penalty, stop)
    check_number(truncation, "truncation", least=0, most=1)
    check_settings({"seed": seed})
    if interpolate is not None:
        check_number(interpolate, "interpolate", least=2)
        grid = grid or "1x1"
    if grid is not None:
        _sample_pictures(run, grid, interpolate, truncation, seed, out, best, trust, as_json)
        return
    loaded = load(run, None, best, trust)
    if not supports(loaded.recipe, "sample"):
        makes_pictures = supports(loaded.recipe, "grids")
        reason = "makes pictures, not text; add --grid 8x8" if makes_pictures else "cannot generate text"
        raise InputError(f"{loaded.recipe.name} {reason}")
    choices = {"top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty, "stop": stop or None}
    choices = {name: value for name, value in choices.items() if value is not None}
    for name in choices.keys() - signature(loaded.recipe.sample).parameters.keys():
        raise InputError(f"{loaded.recipe.name} has no {name.replace('_', '-')}: leave it out")
    with waiting("generating"):
        text = loaded.recipe.sample(loaded.state, prompt, tokens=tokens, temperature=temperature, seed=seed, **choices)
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "prompt": prompt, "text": text}))
    else:
        print(prompt + text)


def check_sampling(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    stop: list[str] | None,
) -> None:
    """Raise InputError for impossible choices of how to draw tokens."""
    check_number(temperature, "temperature", least=0)
    if top_k is not None:
        check_number(top_k, "top_k", least=1)
    if top_p is not None:
        check_number(top_p, "top_p", above=0, most=1)
    if repetition_penalty is not None:
        check_number(repetition_penalty, "repetition_penalty", above=0)
    if "" in (stop or ()):
        raise InputError("--stop is empty: leave it out")


def _sample_pictures(
    run: str,
    grid: str,
    frames: int | None,
    truncation: float,
    seed: int,
    out: Path | None,
    best: bool,
    trust: bool,
    as_json: bool,
) -> None:
    match = re.fullmatch(r"([1-9][0-9]?)x([1-9][0-9]?)", grid)
    if not match:
        raise InputError(f"grid is ROWSxCOLUMNS, each from 1 to 99, such as 8x8, not {grid!r}")
    rows, columns = int(match[1]), int(match[2])
    out = out or Path("grid.png" if frames is None else "walk.gif")
    _check_picture_file(out, is_film=frames is not None)
    loaded = load(run, None, best, trust)
    if not supports(loaded.recipe, "grids"):
        raise InputError(f"{loaded.recipe.name} cannot make pictures")
    with waiting("generating"):
        grids = loaded.recipe.grids(loaded.state, rows, columns, truncation=truncation, seed=seed, count=frames or 1)
        _write_pictures(grids, out)
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "grid": grid, "out": str(out)}))
        return
    content = f"{rows * columns:,} pictures" if frames is None else f"a film of {frames:,} frames"
    echo(f"{loaded.folder} at step {loaded.step:,}: {content} in {out}")


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option(help="Use this data instead of the run's held-out part.")] = None,
    split: Annotated[str, typer.Option(help="Rows to use: validation, test, train or all.")] = "validation",
    features: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Compare pictures by a function of yours, such as Inception's."),
    ] = None,
    best: Best = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure the loss of a trained model on data; of pictures also how far they are from real ones."""
    if data and split != "validation":
        raise InputError("--data has no splits: leave --split out")
    loaded = load(run, data, best, trust)
    from tpuswarm.train.loop.evaluate import evaluate_run

    with waiting("evaluating") as show_progress:
        values, rows = evaluate_run(loaded, "all" if data else split, show_progress=show_progress)
    measures = {}
    if supports(loaded.recipe, "measures"):
        with waiting("generating pictures") as show_progress:
            measures = loaded.recipe.measures(
                loaded.state, features, lambda done, total: show_progress(f"{done:,} of {total:,}")
            )
    elif features:
        raise InputError(f"{loaded.recipe.name} is measured by its loss alone: leave --features out")
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "rows": rows, **values, **measures}))
        return
    losses = ", ".join(f"{name} {format_figure(value)}" for name, value in values.items())
    source = data or ("the held-out data" if split == "validation" else f"the {split} data")
    echo(f"{loaded.folder} at step {loaded.step:,}: {losses} over {rows:,} rows of {source}")
    if measures:
        echo(_describe_measures(measures, features))


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    form: Annotated[Literal["hf"], typer.Option("--format", help="hf: for Hugging Face transformers.")] = "hf",
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapters of --lora to the weights.")] = False,
    best: Best = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Export a trained model to files that other programs read."""
    require_new_folder(out)
    loaded = load(run, None, best, trust)
    if not supports(loaded.recipe, "export"):
        raise InputError(f"{loaded.recipe.name} cannot be exported to Hugging Face")
    if merge and not supports(loaded.recipe, "export_merged"):
        raise InputError(f"{loaded.recipe.name} has no adapters: leave --merge out")
    write = loaded.recipe.export_merged if merge else loaded.recipe.export
    with writing(out), waiting("exporting"), new_folder(out) as folder:
        write(loaded.state, folder)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        facts = {"run": str(loaded.folder), "step": loaded.step, "format": form, "out": str(out), "files": files}
        print(json.dumps(facts))
    else:
        echo(f"exported {loaded.folder} at step {loaded.step:,} to {out}: {', '.join(files)}")


def project(
    run: Run,
    picture: Annotated[Path, typer.Argument(help="A picture; its middle square is used.")],
    steps: Annotated[int, typer.Option(help="Search steps; each takes three times as long as making a picture.")] = 500,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[
        Path, typer.Option(help="The picture beside the one found; its code goes to the same name with .npy.")
    ] = Path("projected.png"),
    best: Best = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Find the latent code of a given picture in a trained StyleGAN2."""
    check_number(steps, "steps", least=1)
    check_settings({"seed": seed})
    _check_picture_file(out, is_film=False)
    if not picture.is_file():
        raise InputError(f"there is no picture {picture}")
    loaded = load(run, None, best, trust)
    if not (supports(loaded.recipe, "project") and supports(loaded.recipe, "read_picture")):
        raise InputError(f"{loaded.recipe.name} cannot find the code of a picture")
    given = loaded.recipe.read_picture(picture)
    with waiting("searching") as show_progress:
        found = loaded.recipe.project(
            loaded.state, given, steps, seed, lambda done, total: show_progress(f"step {done:,} of {total:,}")
        )
    code = _write_code(found.w, out)
    _write_pictures(iter([found.beside(given)]), out)
    if as_json:
        facts = {"run": str(loaded.folder), "step": loaded.step, "error": found.error, "out": str(out)}
        print(json.dumps(facts | {"code": str(code)}))
    else:
        echo(
            f"{out}: {picture} beside the picture of {loaded.folder}, {found.error:.1f} of 255 apart; its code: {code}"
        )


def load(run: str, data: str | None, best: bool, trust: bool) -> Any:
    """Load a run's newest (or best) state on all devices; `data` replaces the run's own.

    trust: consent to the run's code; without it, ask on a terminal.
    """
    folder = download_run(run, whole=True) if is_url(run) else Path(find_run(run))
    config = read_config(folder)
    if not trust and config["recipe"]["target"] and not is_trusted(config["recipe"]["target"]) and sys.stdin.isatty():
        echo(f"{shown(folder)} executes {config['recipe']['target']}, which is not part of tpuswarm.", err=True)
        confirm(False)
        trust = True
    require_trust(folder, trust)
    platform.load_jax()
    with waiting(f"reading {shown(folder)}", delay_s=0.0):
        from tpuswarm.swarm.storage.load import load_swarm
        from tpuswarm.train.run.loaded import load_run

        recipe = rebuild_recipe(folder, {"data": data} if data else None, trust)
        if "swarm" in config and not best:
            loaded = load_swarm(folder, platform.local_devices(), recipe)
        else:
            loaded = load_run(folder, platform.local_devices(), best=best, recipe=recipe)
    for note in loaded.notes:
        echo(note, err=True)
    return loaded


def _check_picture_file(out: Path, is_film: bool) -> None:
    """Raise InputError, before a model is loaded, if a file cannot be written."""
    extensions = FILM_EXTENSIONS if is_film else PICTURE_EXTENSIONS
    if out.suffix.lower() not in extensions:
        raise InputError(f"--out {out} needs one of the extensions {', '.join(extensions)}")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} for --out {out}; create it first")


def _write_pictures(pictures: Iterator["np.ndarray"], out: Path) -> None:
    """Write a picture, uint8 (height, width, 3), or several as a film that loops."""
    from PIL import Image

    first, *rest = (Image.fromarray(picture) for picture in pictures)
    film: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": FRAME_MS, "loop": 0} if rest else {}
    try:
        file = BytesIO()
        first.save(file, Image.registered_extensions()[out.suffix.lower()], **film)
        write_atomically(out, file.getvalue())
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error


def _write_code(w_D: "np.ndarray", out: Path) -> Path:
    """Write a latent code beside its picture, as a file of numpy."""
    import numpy as np

    path = out.with_suffix(".npy")
    try:
        file = BytesIO()
        np.save(file, w_D)
        write_atomically(path, file.getvalue())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _describe_measures(measures: Mapping[str, Any], features: str | None) -> str:
    """Describe how far generated pictures are from real ones. `features`: the user's own function, if any."""
    by = f"the features of {features}" if features else "the features of a fixed random network, not FID's"
    distances = (
        f"Fréchet distance {format_figure(measures['frechet_distance'])}, kernel distance "
        f"{format_figure(measures['kernel_distance'])}, precision {measures['precision']:.2f}, "
        f"recall {measures['recall']:.2f}"
    )
    sets = f"{measures['made']:,} generated and {measures['reference']:,} real pictures"
    return f"{sets}, {measures['held_out']:,} held out: {distances}; by {by}"

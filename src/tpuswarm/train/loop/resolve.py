"""Merge the settings of the user, the run and the recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuswarm.config.limits import check_settings
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.train.data.source import Repeated, source_of, training_source
from tpuswarm.train.data.stream import StreamSource
from tpuswarm.train.loop.evaluate import FiniteSource
from tpuswarm.train.program.contract import program_of
from tpuswarm.train.program.request import Request, default_batch
from tpuswarm.train.recipe import Options, Precision, Recipe, Source
from tpuswarm.train.run.directory import Run
from tpuswarm.train.settings import CHANGEABLE_SETTINGS, FIXED_SETTINGS, REMEMBERED_SETTINGS, count_steps, differences
from tpuswarm.train.user_code import blame

DEFAULT_STEPS = 1_000


@dataclass(frozen=True)
class Resolved:
    """Every setting of a run, before anything is compiled."""

    settings: dict[str, Any]
    source: Source
    tokens_per_row: int
    config: dict[str, Any] | None
    """The configuration in the run directory; None for a new run."""
    changed: list[str]
    """Settings that differ from it, in words."""
    renamed: list[str]
    """A different name or file of the recipe, in words."""


def resolve(
    run: Run,
    recipe: Recipe,
    requested: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    precision: Precision,
    devices: int,
    may_grow: bool = False,
) -> Resolved:
    """Resolve every setting of a run.

    requested: the user's settings, None for those without a value; precision: the default on these devices; may_grow:
    accept more steps than the run has, if no step depends on the progress of the run.
    """
    config = run.config()
    stored = dict(config["train"]) if config else {}
    stored_free = dict(config.get("may_change", {})) if config else {}
    if rows := stored_free.get("eval_batch"):
        stored_free["eval_batch"] = math.ceil(rows / devices) * devices
    defaults = {
        "steps": DEFAULT_STEPS, "seed": 0, "deterministic": False, "save_every": "5m", "keep": 3,
        **recipe.defaults, "precision": precision, "init_from": recipe.base_model,
    }  # fmt: skip
    seed = first_given(requested.get("seed"), stored.get("seed"), defaults["seed"])
    with blame(f"the data of {recipe.name} failed"):
        source = training_source(recipe, seed)
    requested["data"] = getattr(source, "digest", None)
    batch = requested["batch"] or stored.get("batch") or default_batch(recipe, devices, requested["accumulate"])
    program = program_of(recipe, Options())
    tokens_per_row = program.tokens_per_row
    if batches := first_given(requested.get("overfit_batches"), stored.get("overfit_batches")):
        source = Repeated(source, batches * batch)
    rows_per_epoch = getattr(source, "rows_per_epoch", None)
    requested["steps"] = count_steps(requested["steps"], tokens, epochs, batch * tokens_per_row, rows_per_epoch, batch)
    changed, renamed = list[str](), list[str]()
    if config:
        stored_recipe = config["recipe"]
        renamed = differences(
            {"recipe": stored_recipe["name"], "made by": stored_recipe["target"]},
            {"recipe": recipe.name, "made by": recipe.target},
        )
        fixed = {name: requested.get(name) for name in FIXED_SETTINGS}
        has_schedule = getattr(program, "has_progress_schedule", True)  # other programs may use the clock's progress
        if may_grow and not has_schedule and (fixed["steps"] or 0) > stored["steps"]:
            fixed["steps"] = None
        digest = fixed.pop("data")
        changed = _option_differences(config, recipe, requested) + differences(stored, fixed)
        if digest is not None and digest != stored.get("data"):
            changed.append("the data has changed")
    settings = {
        name: first_given(requested.get(name), stored.get(name), None if config else defaults.get(name))
        for name in FIXED_SETTINGS
    }
    settings |= {"batch": batch} | {name: requested[name] for name in CHANGEABLE_SETTINGS}
    settings |= {
        name: first_given(requested[name], stored_free.get(name), defaults.get(name)) for name in REMEMBERED_SETTINGS
    }
    check_settings(settings)  # values from tokens, epochs and the recipe, too
    return Resolved(settings, source, tokens_per_row, config, changed, renamed)


def first_given(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def request(settings: Mapping[str, Any]) -> Request:
    """Return the part of the settings that concerns the program."""
    names = ("batch", "shard", "precision", "accumulate", "clip", "freeze", "decay", "ema")
    return Request(**{name: settings[name] for name in names if name in settings})


def _option_differences(config: Mapping[str, Any], recipe: Recipe, requested: Mapping[str, Any]) -> list[str]:
    """Return differences between stored and current options; equal data may have another path."""
    stored, options = dict(config["recipe"]["options"]), recipe.options()
    if requested["data"] is not None and config["train"].get("data") == requested["data"]:
        for values in (stored, options):
            values.pop("data", None)
    defaults = dict.fromkeys([*options, *stored], "the default")
    return differences(defaults | stored, defaults | options)


def held_out(recipe: Recipe, required: bool) -> FiniteSource | None:
    """Return the held-out rows, which must be finite; None if there are none and evaluations were not requested."""
    with blame(f"the data of {recipe.name} failed"):
        try:
            source: Any = source_of(recipe, "validation")
        except NoSuchSplit:
            if required:
                raise
            return None
    if isinstance(source, StreamSource) and source is source_of(recipe, "train"):
        raise InputError(
            f"training and validation data of {recipe.name} are one StreamSource, which would restart for each "
            "evaluation and after it: give each split a StreamSource of its own"
        )
    rows = getattr(source, "rows_per_epoch", None)
    if not rows:
        why = "no rows" if rows is not None else "no rows_per_epoch, so evaluation would never end"
        raise InputError(f"the validation data of {recipe.name} has {why}; say how many it has, or leave it out")
    return source

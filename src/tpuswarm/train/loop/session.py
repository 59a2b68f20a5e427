"""Prepare a run: resolve its settings, compile its program, restore or make its state."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.config.limits import check_settings
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.train.data.source import Repeated, source_of, training_source
from tpuswarm.train.data.stream import StreamSource
from tpuswarm.train.hosts.agreement import Agreement, join_hosts
from tpuswarm.train.hosts.host_group import HostGroup
from tpuswarm.train.loop.evaluate import FiniteSource, HeldOut, rehearse
from tpuswarm.train.loop.finite import require_finite
from tpuswarm.train.loop.recorded import chosen, configuration, facts, first_row, lr_scale_after
from tpuswarm.train.loop.result import Result, last_row
from tpuswarm.train.optional import KeepsFiles
from tpuswarm.train.process import platform
from tpuswarm.train.process.numerics import changed_numerics, numerics, run_key
from tpuswarm.train.process.stop import defer_interrupts
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.compiled import Compiled, compile_step, place
from tpuswarm.train.program.contract import program_of
from tpuswarm.train.program.digest import is_another, is_same, step_digest
from tpuswarm.train.program.largest_batch import AUTO, largest_batch
from tpuswarm.train.program.request import BATCH, Request, default_batch
from tpuswarm.train.recipe import Clock, Options, Recipe, Source, State, default_precision
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.directory import EVENTS, FollowedRun, Run, read_rows
from tpuswarm.train.run.life import last_event
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.settings import FIXED, FREE, HABITS, check_batch, count_steps, differences, refuse_differences
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame

STEPS = 1_000
"""For a recipe that wants nothing else."""


@dataclass
class Session:
    """A run made ready, held by this process until `run.close()`."""

    run: Run
    agreement: Agreement
    recipe: Recipe
    settings: dict[str, Any]
    compiled: Compiled
    source: Source
    validation: HeldOut | None
    measured: list[str]
    """The names of what evaluations find."""
    state: State
    first_step: int
    wall_s: float
    """Seconds of training before this process."""
    lr_scale: float
    """By what hooks have multiplied the learning rate."""
    save_seconds: float | None
    """How long the restored checkpoint took to save."""
    step_key: jax.Array
    config: dict[str, Any]
    """For config.toml."""
    notes: list[str]
    """Sentences for the user about the start of the run."""

    def begin(self) -> None:
        """Write the configuration: from now on the directory is a run, and stays."""
        if self.run.writes and isinstance(self.recipe, KeepsFiles):
            with blame(f"keep of {self.recipe.name} fails"):
                self.recipe.keep(self.run.folder)
        self.run.write_config(self.config)

    def forget(self, setting: str) -> None:
        """Remove a setting that may change from the configuration."""
        self.config["may_change"].pop(setting, None)
        self.run.write_config(self.config)

    @property
    def steps(self) -> int:
        """Length of the whole run."""
        return int(self.settings["steps"])

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one batch."""
        return int(self.settings["batch"]) * self.compiled.program.tokens_per_row

    def clock(self, step: int) -> Clock:
        """The clock of the step after `step` updates; progress = steps so far / steps of the run."""
        return Clock(self.step_key, np.int32(step), np.float32(step / self.steps), np.float32(self.lr_scale))

    def position(self, step: int) -> Any:
        """Return the position of the data after `step` updates; None without positions and on several hosts."""
        position = getattr(self.source, "position", None)
        if position is None or jax.process_count() > 1:
            return None
        return position(step * int(self.settings["batch"]))


@contextmanager
def taken(
    recipe: Recipe, asked: Mapping[str, Any], folder: Path | None, hosts: HostGroup | None, ends: ExitStack
) -> Iterator[tuple[Run, Agreement]]:
    """Yield the run directory and the hosts of a run; end them if the block fails.

    ends: its close releases the directory, and removes it if the session has not begun.
    """
    if hosts and folder is None:
        raise InputError("a run over several hosts needs --run, a directory on a shared disk")
    follows = hosts is not None and hosts.index > 0
    with defer_interrupts():  # else the directory could be there without anybody to let it go
        run = FollowedRun(folder) if folder and follows else Run(folder, recipe.name)
        ends.callback(run.abandon)
    agreement = Agreement()
    try:
        stored = (run.config() or {}).get("train", {})
        platform.configure_jax(bool(_first(asked.get("deterministic"), stored.get("deterministic"))))
        if hosts:
            agreement = join_hosts(hosts, run.folder, run.fail)
        yield run, agreement
    except BaseException:
        agreement.__exit__(*sys.exc_info())
        raise


@dataclass(frozen=True)
class Resolved:
    """Every setting of a run, before anything is compiled."""

    settings: dict[str, Any]
    source: Source
    tokens_per_row: int
    config: dict[str, Any] | None
    """The configuration in the run directory; None in a new one."""
    changed: list[str]
    """Settings that differ from it, in words."""
    renamed: list[str]
    """A different name or file of the recipe, in words."""


def resolve(
    run: Run,
    recipe: Recipe,
    asked: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    platform: str,
    devices: int,
    may_grow: bool = False,
) -> Resolved:
    """Merge the user's settings, the run's and the recipe's defaults into one set.

    may_grow: accept more steps than the run has, if no step depends on the progress of the run.
    """
    config = run.config()
    stored = dict(config["train"]) if config else {}
    before = dict(config.get("may_change", {})) if config else {}
    if rows := before.get("eval_batch"):
        before["eval_batch"] = math.ceil(rows / devices) * devices
    usual = {"steps": STEPS, "seed": 0, "deterministic": False, "save_every": "5m", "keep": 3, **recipe.defaults}
    seed = _first(asked.get("seed"), stored.get("seed"), usual["seed"])
    with blame(f"the data of {recipe.name} failed"):
        source = training_source(recipe, seed)
    asked["data"] = getattr(source, "digest", None)
    batch = asked["batch"] or stored.get("batch") or default_batch(recipe, devices, asked["accumulate"])
    program = program_of(recipe, Options())
    tokens_per_row = program.tokens_per_row
    if batches := _first(asked.get("overfit_batches"), stored.get("overfit_batches")):
        source = Repeated(source, batches * batch)
    rows_per_epoch = getattr(source, "rows_per_epoch", None)
    asked["steps"] = count_steps(asked["steps"], tokens, epochs, batch * tokens_per_row, rows_per_epoch, batch)
    changed, renamed = list[str](), list[str]()
    if config:
        stored_recipe = config["recipe"]
        renamed = differences(
            {"recipe": stored_recipe["name"], "made by": stored_recipe["target"]},
            {"recipe": recipe.name, "made by": recipe.target},
        )
        found = _option_differences(config, recipe, asked)
        fixed = {name: asked.get(name) for name in FIXED}
        scheduled = getattr(program, "scheduled", True)  # a program that does not say may use the clock's progress
        if may_grow and not scheduled and (fixed["steps"] or 0) > stored["steps"]:
            fixed["steps"] = None
        digest = fixed.pop("data")
        changed = found + differences(stored, fixed)
        if digest is not None and digest != stored.get("data"):
            changed.append("the data has changed")
    usual["precision"] = default_precision(platform)
    settings = {name: _first(asked.get(name), stored.get(name), None if config else usual.get(name)) for name in FIXED}
    settings |= {"batch": batch} | {name: asked[name] for name in FREE}
    settings |= {name: _first(asked[name], before.get(name), usual.get(name)) for name in HABITS}
    check_settings(settings)  # also those from tokens, epochs and the recipe
    return Resolved(settings, source, tokens_per_row, config, changed, renamed)


def prepare(
    run: Run,
    agreement: Agreement,
    recipe: Recipe,
    asked: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    accept_code: bool = False,
) -> Session | Result:
    """Resolve every setting, compile, and restore or make the state; of a run that is finished compile nothing.

    asked: the settings of FIXED and FREE that the user named, None for the others; accept_code: whether to go on with
    another program than the run began with. Raises InputError for anything that cannot be done as asked.
    """
    devices = agreement.devices(asked["devices"])
    notes = []
    if asked["batch"] == AUTO:
        asked["batch"] = None  # a run that has begun has one
        if run.config() is None:
            with waiting(f"looking for the largest batch of {recipe.name}", short=0.0) as far:
                found = largest_batch(recipe, asked, devices, far)
            asked["batch"] = agreement.broadcast("looking for the largest batch", found)
            notes.append(f"batch {asked['batch']:,}, the largest that fits")
    with waiting(f"reading the data of {recipe.name}"):
        resolved = resolve(run, recipe, asked, tokens, epochs, devices[0].platform, len(devices), may_grow=True)
    settings, source, config = resolved.settings, resolved.source, resolved.config
    with waiting(f"tracing {recipe.name}"):
        program = step_digest(recipe, request(settings), devices[0].platform)
    recorded = (config or {}).get("program", {})
    renamed = [] if is_same(recorded, program) else resolved.renamed  # the same program may have another name
    refuse_differences(shown(run.folder), renamed + resolved.changed)
    batch = settings["batch"]
    if settings["eval_batch"]:
        check_batch(settings["eval_batch"], len(devices), 1, name="eval_batch")
    agreement.require_equal(lambda: facts(recipe, settings, source))
    changed = is_another(recorded, program)
    sentence = f"{shown(run.folder)} began with a different loss, optimizer or schedule than {recipe.name} has now"
    if changed and not accept_code:
        raise InputError(
            f"{sentence}; use another --run, or accept the change with --accept-code (accept_code=True), which the run "
            "records"
        )
    saved, damaged = _last_saved(run, agreement)
    last = last_event(run.folder)
    ended = ""
    if saved and last.get("event") == "finished":
        if last.get("step") == saved.step and last.get("of") == settings["steps"]:
            ended = last["message"]  # a hook ended it
        elif saved.step == settings["steps"]:
            ended = f"finished: {saved.step} steps"
    if saved and (ended := agreement.broadcast("looking for what is left to do", ended)):
        if changed:
            raise InputError(f"{sentence}, and is finished: begin another run, with --init-from to take its parameters")
        with waiting(f"restoring the checkpoint of step {saved.step}"):
            placed = place(recipe, request(settings), devices, (config or {})["chosen"]["sharding"])
            state, metrics = checkpoint.restore(saved, placed.state), last_row(run.folder)
            return Result(run.folder, state, saved.step, settings["steps"], metrics, "finished", ended, None)
    evaluates = settings["eval_every"] is not None
    rows = source if isinstance(source, Repeated) else held_out(recipe, required=evaluates)
    with waiting(f"compiling {recipe.name} for {len(devices)} x {devices[0].device_kind}"):
        compiled = compile_step(recipe, request(settings), devices)
    choice = compiled.choice
    agreement.require_equal(lambda: {"form of the program": f"{choice.why}, {choice.accumulate} micro-batches"})
    validation = HeldOut(rows, settings["eval_batch"] or batch // choice.accumulate) if rows is not None else None
    measured: list[str] = []
    if validation is not None:
        with waiting(f"tracing the evaluation of {recipe.name}"):
            measured = [f"eval_{name}" for name in rehearse(compiled, recipe.name, validation)]
    if validation is None and (goal := settings["keep_best"]):
        raise InputError(f"{recipe.name} has no held-out rows: keep_best {goal} has no meaning")
    init_key, step_key = jax.random.split(run_key(settings["seed"]))
    shared = None
    if saved is None and settings["init_from"]:
        with waiting(f"reading the parameters of {settings['init_from']}"):
            shared = initial_parameters(
                settings["init_from"], settings["init_only"], recipe, compiled, init_key, agreement.require_equal
            )
    written = configuration(recipe, settings) | {"chosen": chosen(compiled)}
    written["numerics"] = (config or {}).get("numerics") or numerics()
    written["program"] = program or recorded
    unnamed = {} if settings["data"] else {"first_row": first_row(source)}
    written["data"] = (config or {}).get("data") or unnamed
    if unnamed and written["data"] != unnamed:
        notes.append(
            "the first row of the data is not the one that this run began with: other data, another order, or random "
            "augmentation"
        )

    notes.insert(0, f"{choice.why}; {compiled.options.precision}")
    if asked["batch"] is None and not config and batch != recipe.defaults.get("batch", BATCH):
        notes.append(f"batch {batch}, a multiple of {len(devices)} devices")
    if settings["overfit_batches"]:
        notes.append(f"trains and evaluates on the first {settings['overfit_batches'] * batch:,} rows alone")
    notes += damaged
    if changed:
        notes.append("the loss, optimizer or schedule has changed since this run began, which was accepted")
    if getattr(compiled.program, "has_step_schedule", False):
        notes.append("the schedule counts updates, as its parameter is called `step` or `count`")
    decayed = sum(parameter.decayed for parameter in compiled.program.parameters(compiled.state))
    if config and "numerics" not in config and settings["decay"] is None and decayed:
        notes.append(
            f"this run began when nothing decayed without --decay; from here on {decayed} arrays of two or more axes "
            "do, if the optimizer uses its decay_mask"
        )
    notes += changed_numerics(written["numerics"])
    first_step, wall_s, lr_scale, save_seconds = 0, 0.0, 1.0, None
    if saved is not None:
        with waiting(f"restoring the checkpoint of step {saved.step}"):
            state = checkpoint.restore(saved, compiled.state)
        first_step, wall_s, save_seconds = saved.step, saved.about.get("wall_s", 0.0), saved.seconds
        lr_scale = agreement.broadcast("reading the events", lr_scale_after(read_rows(run.folder / EVENTS), first_step))
        if (position := saved.position) is not None and hasattr(source, "go_to"):
            with blame("the data source failed"):
                source.go_to(position)
        elif isinstance(source, StreamSource) and first_step:
            notes.append(
                f"the stream has no position: {first_step * batch:,} rows are read again, and the next ones are new "
                "only if all come in the same order as before"
            )
        cut = run.cut_metrics(first_step)
        notes.append(f"resumed from the checkpoint of step {first_step}" + (f"; {cut} later rows cut" if cut else ""))
    else:
        if cut := run.cut_metrics(0):
            notes.append(f"starting over: no checkpoint was finished; {cut} rows of metrics cut")
        if shared is not None:
            matching = f" that match {settings['init_only']!r}" if settings["init_only"] else ""
            notes.append(f"parameters{matching} from {settings['init_from']}")
        with waiting("making the parameters"):
            state = compiled.init(init_key, shared)
        made = compiled.program.exchange().get(state)
        require_finite(made, settings["init_from"] or f"init of {recipe.name}")
    return Session(
        run, agreement, recipe, settings, compiled, source, validation, measured, state, first_step, wall_s,
        lr_scale, save_seconds, step_key, written, notes,
    )  # fmt: skip


def _last_saved(run: Run, agreement: Agreement) -> tuple[checkpoint.Saved | None, list[str]]:
    """Return the checkpoint to resume from, and sentences about damaged ones; set newer folders aside."""
    if not agreement.is_leader:
        there = agreement.broadcast("choosing the checkpoint", dict[str, Any]())
        return (checkpoint.Saved(**there | {"folder": run.checkpoints / there["folder"]}) if there else None), []
    saved, damaged = checkpoint.newest(run.checkpoints)
    checkpoint.set_aside(run.checkpoints, saved)
    agreement.broadcast("choosing the checkpoint", {**vars(saved), "folder": saved.folder.name} if saved else {})
    return saved, damaged


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def request(settings: Mapping[str, Any]) -> Request:
    """Return the part of the settings that concerns the program."""
    names = ("batch", "shard", "precision", "accumulate", "clip", "freeze", "decay", "ema")
    return Request(**{name: settings[name] for name in names if name in settings})


def _option_differences(config: Mapping[str, Any], recipe: Recipe, asked: Mapping[str, Any]) -> list[str]:
    """Return what differs between the stored options and the recipe's; another path to the same data does not count."""
    options = recipe.options()
    if asked["data"] is not None and config["train"].get("data") == asked["data"]:
        options.pop("data", None)
    return differences(config["recipe"]["options"], options)


def held_out(recipe: Recipe, required: bool) -> FiniteSource | None:
    """Return the held-out rows; None if there are none and evaluations were not requested.

    InputError for held-out rows that cannot be evaluated.
    """
    with blame(f"the data of {recipe.name} failed"):
        try:
            source: Any = source_of(recipe, "validation")
        except NoSuchSplit:
            if required:
                raise
            return None
    if isinstance(source, StreamSource) and source is source_of(recipe, "train"):
        raise InputError(
            f"training and validation data of {recipe.name} are one StreamSource, which would begin anew for each "
            "evaluation and after it: give each split a StreamSource of its own"
        )
    rows = getattr(source, "rows_per_epoch", None)
    if not rows:
        why = "no rows" if rows is not None else "no rows_per_epoch, so evaluation would never end"
        raise InputError(f"the validation data of {recipe.name} has {why}; say how many it has, or leave it out")
    return source

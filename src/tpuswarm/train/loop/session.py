"""Prepare a run: open it, compile its program, and restore or make its state."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  # slow: before a run is open, which an interrupt would have to remove

from tpuswarm.errors import InputError
from tpuswarm.train.data.source import Repeated, reader_lock
from tpuswarm.train.data.stream import StreamSource
from tpuswarm.train.hosts.agreement import Agreement, join_hosts
from tpuswarm.train.hosts.host_group import HostGroup
from tpuswarm.train.loop.evaluate import HeldOut, trace_evaluation
from tpuswarm.train.loop.resolve import first_given, held_out, request, resolve
from tpuswarm.train.loop.result import Result, last_row
from tpuswarm.train.loop.run_config import (
    chosen_form,
    first_row_digest,
    refuse_damaged_settings,
    restored_lr_scale,
    run_config,
    shared_facts,
)
from tpuswarm.train.loop.saver import require_finite
from tpuswarm.train.process import platform
from tpuswarm.train.process.numerics import changed_numerics, numerics, run_key
from tpuswarm.train.process.stop import defer_interrupts
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.batch_search import AUTO, largest_batch
from tpuswarm.train.program.compiled import Compiled, compile_step, lowest_capability, place_program
from tpuswarm.train.program.digest import is_other_program, is_same_program, step_digest
from tpuswarm.train.program.request import DEFAULT_BATCH, capability_note
from tpuswarm.train.recipe import Clock, Recipe, Source, State, default_precision
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.checkpoint_writer import set_aside
from tpuswarm.train.run.directory import CONFIG, EVENTS, FollowedRun, Run, read_rows
from tpuswarm.train.run.life import last_event, last_start, updates_done
from tpuswarm.train.run.loaded import initial_parameters, restore_state
from tpuswarm.train.settings import check_batch, refuse_differences
from tpuswarm.train.storage.copy import refresh
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame


@dataclass
class Session:
    """A prepared run, which this process holds until `run.close()`."""

    run: Run
    agreement: Agreement
    recipe: Recipe
    settings: dict[str, Any]
    compiled: Compiled
    source: Source
    validation: HeldOut | None
    eval_names: list[str]
    """Names of the metrics of evaluations."""
    config: dict[str, Any]
    """For config.toml."""
    notes: list[str]
    """Sentences for the user about the start of the run."""
    step_key: jax.Array
    state: State
    first_step: int = 0
    wall_s: float = 0.0
    """Seconds of training before this process."""
    lr_scale: float = 1.0
    """Product of the learning-rate factors of hooks."""
    updates_done: int = 0
    """By all earlier processes, including the updates that this one repeats."""
    save_s: float | None = None
    """How long the restored checkpoint took to save."""

    def write_config(self) -> None:
        """Write the configuration, which makes the directory a run for good."""
        if self.run.writes:
            with blame(f"keep of {self.recipe.name} fails"):
                self.recipe.keep(self.run.folder)
        self.run.write_config(self.config)

    def remove_setting(self, name: str) -> None:
        """Remove a setting that may change from the configuration."""
        self.config["may_change"].pop(name, None)
        self.run.write_config(self.config)

    @property
    def steps(self) -> int:
        """Length of the whole run."""
        return int(self.settings["steps"])

    @property
    def tokens_per_step(self) -> int:
        return int(self.settings["batch"]) * self.compiled.program.tokens_per_row

    def clock(self, step: int) -> Clock:
        """Return the clock of the step after `step` updates."""
        return Clock(self.step_key, np.int32(step), np.float32(step / self.steps), np.float32(self.lr_scale))

    def position(self, step: int) -> Any:
        """Return the position of the data after `step` updates; None without positions and on several hosts.

        None also if the run is to stop while another thread is reading: the resumed run then reads the rows again.
        """
        position = getattr(self.source, "position", None)
        if position is None or jax.process_count() > 1:
            return None
        row = step * int(self.settings["batch"])
        if isinstance(self.source, StreamSource):
            return position(row)
        with reader_lock(self.source, self.agreement.should_stop) as has_lock:
            return position(row) if has_lock else None


@contextmanager
def open_run(
    recipe: Recipe, requested: Mapping[str, Any], folder: Path | None, hosts: HostGroup | None, ends: ExitStack
) -> Iterator[tuple[Run, Agreement]]:
    """Yield the run directory and the hosts of a run; end them if the block fails.

    ends: its close releases the directory, and removes it if the session has not begun.
    """
    if hosts and folder is None:
        raise InputError("a run over several hosts needs --run, in a bucket or on a shared disk")
    follows = hosts is not None and hosts.index > 0
    with defer_interrupts():  # else the directory could exist without a callback that releases it
        run = FollowedRun(folder) if folder and follows else Run(folder, recipe.name)
        ends.callback(run.abandon)
    agreement = Agreement()
    try:
        stored = (run.config() or {}).get("train", {})
        platform.configure_jax(bool(first_given(requested.get("deterministic"), stored.get("deterministic"))))
        if hosts:
            run.upload()  # the other hosts copy what is in a bucket
            agreement = join_hosts(hosts, run.folder, run.fail)
            if follows:
                refresh(run.folder, whole=True)
        yield run, agreement
    except BaseException:
        agreement.__exit__(*sys.exc_info())
        raise


def prepare(
    run: Run,
    agreement: Agreement,
    recipe: Recipe,
    requested: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    accept_code: bool = False,
) -> Session | Result:
    """Resolve every setting, compile, and restore or make the state; return a finished run without compiling.

    requested: values of FIXED_SETTINGS and CHANGEABLE_SETTINGS, None if the user set none; accept_code: whether to
    continue with a program that differs from the run's. Raise InputError for impossible settings.
    """
    devices = agreement.devices(requested["devices"])
    capability = lowest_capability(devices)
    found_batch = _find_largest_batch(run, agreement, recipe, requested, devices)
    with waiting(f"reading the data of {recipe.name}"):
        precision = default_precision(devices[0].platform, capability)
        resolved = resolve(run, recipe, requested, tokens, epochs, precision, len(devices), may_grow=True)
    settings, source, config = resolved.settings, resolved.source, resolved.config
    batch = settings["batch"]
    with waiting(f"tracing {recipe.name}"):
        program = step_digest(recipe, request(settings), devices[0].platform, capability)
    recorded = (config or {}).get("program", {})
    renamed = [] if is_same_program(recorded, program) else resolved.renamed  # an equal program may have another name
    refuse_differences(shown(run.folder), renamed + resolved.changed)
    if settings["eval_batch"]:
        check_batch(settings["eval_batch"], len(devices), 1, name="eval_batch")
    agreement.require_equal(lambda: shared_facts(recipe, settings, source))
    is_changed = is_other_program(recorded, program)
    sentence = f"{shown(run.folder)} began with a different loss, optimizer or schedule than {recipe.name} has now"
    if is_changed and not accept_code:
        raise InputError(
            f"{sentence}; use another --run, or accept the change with --accept-code (accept_code=True), which the run "
            "records"
        )
    saved, damaged = _last_saved(run, agreement)
    if saved and config:
        refuse_damaged_settings(run.folder / CONFIG, config, saved)
    if saved and (ended := agreement.broadcast("looking for what is left to do", _how_finished(run, saved, settings))):
        if is_changed:
            raise InputError(f"{sentence}, and is finished: begin another run, with --init-from to take its parameters")
        with waiting(f"restoring the checkpoint of step {saved.step}"):
            shard = (config or {}).get("chosen", {}).get("sharding", "fsdp")
            placed = place_program(recipe, request(settings), devices, shard)
            state = restore_state(saved, recipe, placed, (config or {}).get("numerics", {}))
            metrics = last_row(run.folder)
            return Result(run.folder, state, saved.step, settings["steps"], metrics, "finished", ended, None)

    evaluates = settings["eval_every"] is not None
    rows = source if isinstance(source, Repeated) else held_out(recipe, required=evaluates)
    with waiting(f"compiling {recipe.name} for {len(devices)} x {devices[0].device_kind}"):
        compiled = compile_step(recipe, request(settings), devices)
    choice = compiled.choice
    agreement.require_equal(lambda: {"form of the program": f"{choice.why}, {choice.accumulate} micro-batches"})
    validation = HeldOut(rows, settings["eval_batch"] or batch // choice.accumulate) if rows is not None else None
    eval_names: list[str] = []
    if validation is not None:
        with waiting(f"tracing the evaluation of {recipe.name}"):
            eval_names = [f"eval_{name}" for name in trace_evaluation(compiled, recipe.name, validation)]
    elif goal := settings["keep_best"]:
        raise InputError(f"{recipe.name} has no held-out rows: keep_best {goal} has no meaning")
    init_key, step_key = jax.random.split(run_key(settings["seed"]))
    shared = None
    if saved is None and settings["init_from"]:
        with waiting(f"reading the parameters of {settings['init_from']}"):
            shared = initial_parameters(
                settings["init_from"], settings["init_only"], recipe, compiled, init_key, agreement.require_equal
            )
    first_row = {} if settings["data"] else {"first_row": first_row_digest(source)}
    new_config = run_config(recipe, settings) | {
        "chosen": chosen_form(compiled),
        "numerics": (config or {}).get("numerics") or numerics(),
        "program": program or recorded,
        "data": (config or {}).get("data") or first_row,
    }

    notes = [*capability_note(capability), *found_batch]
    if first_row and new_config["data"] != first_row:
        notes.append(
            "the first row of the data is not the one that this run began with: other data, another order, or random "
            "augmentation"
        )
    if requested["batch"] is None and not config and batch != recipe.defaults.get("batch", DEFAULT_BATCH):
        notes.append(f"batch {batch}, a multiple of {len(devices)} devices")
    if settings["overfit_batches"]:
        notes.append(f"trains and evaluates on the first {settings['overfit_batches'] * batch:,} rows alone")
    notes += damaged
    if is_changed:
        notes.append("the loss, optimizer or schedule has changed since this run began, which was accepted")
    if getattr(compiled.program, "has_step_schedule", False):
        notes.append("the schedule counts updates or epochs, as its parameter is called `step`, `count` or `epoch`")
    notes += changed_numerics(new_config["numerics"])
    session = Session(
        run, agreement, recipe, settings, compiled, source, validation, eval_names, new_config, notes, step_key,
        state=None,
    )  # fmt: skip
    if saved is None:
        _make_state(session, init_key, shared)
    else:
        _restore(session, saved)
    return session


def _find_largest_batch(
    run: Run, agreement: Agreement, recipe: Recipe, requested: dict[str, Any], devices: list[jax.Device]
) -> list[str]:
    """Replace the batch `auto` in the settings; return notes about it."""
    if requested["batch"] != AUTO:
        return []
    requested["batch"] = None
    if run.config() is not None:
        return []  # the run has a batch
    with waiting(f"looking for the largest batch of {recipe.name}", delay_s=0.0) as show_progress:
        found = largest_batch(recipe, requested, devices, show_progress)
    requested["batch"] = agreement.broadcast("looking for the largest batch", found)
    return [f"batch {requested['batch']:,}, the largest that fits"]


def _last_saved(run: Run, agreement: Agreement) -> tuple[checkpoint.Saved | None, list[str]]:
    """Return the checkpoint to resume from, and sentences about damaged ones; set newer folders aside."""
    if not agreement.is_leader:
        fields = agreement.broadcast("choosing the checkpoint", dict[str, Any]())
        if fields:
            refresh(run.folder, step=fields["folder"])
        return (checkpoint.Saved(**fields | {"folder": run.checkpoints / fields["folder"]}) if fields else None), []
    saved, damaged = checkpoint.newest_intact(run.checkpoints)
    set_aside(run.checkpoints, saved)
    agreement.broadcast("choosing the checkpoint", {**vars(saved), "folder": saved.folder.name} if saved else {})
    return saved, damaged


def _how_finished(run: Run, saved: checkpoint.Saved, settings: Mapping[str, Any]) -> str:
    """Return how a run ended; empty if it is not finished."""
    last = last_event(run.folder)
    if last.get("event") != "finished":
        return ""
    if last.get("step") == saved.step and last.get("of") == settings["steps"]:
        return str(last.get("message", "finished"))  # a hook ended it
    return f"finished: {saved.step} steps" if saved.step == settings["steps"] else ""


def _make_state(session: Session, init_key: jax.Array, shared: Any) -> None:
    """Make a first state, from `shared` parameters if they are given."""
    settings, compiled = session.settings, session.compiled
    session.updates_done = _updates_done(session.run, 0)
    if cut := session.run.cut_metrics(0):
        session.notes.append(f"starting over: no checkpoint was finished; {cut} rows of metrics cut")
    if shared is not None:
        matching = f" that match {settings['init_only']!r}" if settings["init_only"] else ""
        session.notes.append(f"parameters{matching} from {settings['init_from']}")
    with waiting("making the parameters"):
        session.state = compiled.init(init_key, shared)
    parameters = compiled.program.exchange().get(session.state)
    require_finite(parameters, settings["init_from"] or f"init of {session.recipe.name}")


def _updates_done(run: Run, step: int) -> int:
    """Return how many updates were done before the rows after `step` are cut."""
    return updates_done(last_start(run.folder), max(step, last_row(run.folder).get("step", 0)))


def _restore(session: Session, saved: checkpoint.Saved) -> None:
    run, source, step = session.run, session.source, saved.step
    with waiting(f"restoring the checkpoint of step {step}"):
        session.state = restore_state(saved, session.recipe, session.compiled, session.config["numerics"])
    session.first_step, session.wall_s, session.save_s = step, saved.about.get("wall_s", 0.0), saved.seconds
    restored = restored_lr_scale(list(read_rows(run.folder / EVENTS)), saved)
    session.lr_scale, note = session.agreement.broadcast("reading the events", restored)
    session.notes += [note] if note else []
    if (position := saved.position) is not None and hasattr(source, "go_to"):
        with blame("the data source failed"):
            source.go_to(position)
    elif isinstance(source, StreamSource) and step:
        session.notes.append(
            f"the stream has no position: {step * session.settings['batch']:,} rows are read again, and the next ones "
            "are new only if all come in the same order as before"
        )
    session.updates_done = _updates_done(run, step)
    cut = run.cut_metrics(step)
    removed = f"; {cut} later rows of metrics removed" if cut else ""
    session.notes.append(f"resumed from the checkpoint of step {step}{removed}")

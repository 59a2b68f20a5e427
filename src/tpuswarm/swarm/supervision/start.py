"""`train --members`: from what was decided to a plan, and a supervisor that carries it out."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

import jax

from tpuswarm.config.formatting import token_unit
from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.swarm.core.arithmetic.outer import Average
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.core.view import LANDMARK
from tpuswarm.swarm.engines.node import silent
from tpuswarm.swarm.engines.opening import require_dashboard
from tpuswarm.swarm.engines.ray import Cluster
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.processes.plan import Plan, member_name
from tpuswarm.swarm.storage.founding import FOUNDING
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.load import load_swarm
from tpuswarm.swarm.storage.retention import disk
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision import local_devices as machine
from tpuswarm.swarm.supervision import needs
from tpuswarm.swarm.supervision.decide import Asked, Intended, decide, forget
from tpuswarm.swarm.supervision.supervisor import Ended, Supervisor
from tpuswarm.swarm.views.drawing import About
from tpuswarm.swarm.views.screen import Screen, auto_screen
from tpuswarm.swarm.views.status import FILE as STATUS
from tpuswarm.swarm.views.status import FINISHED, look, read_status, write_status
from tpuswarm.train.look.outputs import Blamed, all_loggers
from tpuswarm.train.loop.recorded import configuration
from tpuswarm.train.loop.session import Resolved, request
from tpuswarm.train.optional import KeepsFiles, SharesData, sampled
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.process.stop import Interrupted, held
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.compiled import place
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import (
    CONFIG,
    METRICS,
    SAMPLE,
    Run,
    command_line,
    read_rows,
    writing,
)
from tpuswarm.train.run.life import last_event, removed_sentence, stopped_sentence
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.storage.folders import shown

Environment = Callable[[int | None], dict[str, str]]
SAMPLED_BYTES = 2**31
"""Of a larger state no sample is made: this machine may have no accelerator, and little memory."""
MENTIONED = 2**30
"""Bytes that a run keeps, from which on it says so as it starts."""
TOKEN, REPORT = "token", "report.html"


@dataclass(frozen=True)
class SwarmResult:
    """The end of a swarm's run, as far as this process saw it."""

    run: Path
    ended: Ended
    metrics: dict[str, Any]
    version: int
    tokens: int


def train(
    recipe: Recipe,
    swarm: Asked,
    asked: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    folder: Path | None,
    screen: Screen | None = None,
    watch: Callable[[Supervisor], None] = lambda supervisor: None,
) -> SwarmResult:
    """Start or go on with a run of several members, until it ends.

    asked: the settings of FIXED and FREE that the user named, None for the others. Raises InputError for what cannot
    be done as asked, and RunFailed.
    """
    if swarm.ray_address not in (None, "auto"):
        _check_cluster(str(swarm.ray_address))
    if swarm.dashboard:
        if swarm.ray_address is not None:
            raise InputError("--dashboard and --ray-address exclude each other: that cluster has its own, or has none")
        require_dashboard()
    with ExitStack() as ends:
        with held():  # else the directory could be there without anybody to let it go
            run = Run(folder, recipe.name)
            ends.callback(run.abandon)
        screen = screen or auto_screen()
        ends.callback(screen.close)
        try:
            with waiting(f"reading the data of {recipe.name}"):
                intended = decide(run, recipe, swarm, asked, tokens, epochs)
            if done := _finished(run, intended.resolved):
                if run.in_bucket:
                    _say_finished(run.folder)
                screen.note(f"{shown(run.folder)} is finished; nothing left to do")
                return done
            with waiting("preparing the run"):
                ready = _prepare(run, recipe, intended, swarm)
        except BaseException:
            if not (run.folder / CONFIG).exists():
                forget(run.folder)
            raise
        try:
            result = _supervise(run, recipe, ready, screen, watch)
            if result.ended.signal is not None and _nothing_came(run.folder):
                raise Interrupted(Signals(result.ended.signal))
            return result
        except Interrupted as interrupted:
            if _nothing_came(run.folder) and interrupted.asked != Signals.SIGHUP:  # nobody would read that it is gone
                said = removed_sentence(run.folder)
                run.remove()
                screen.close()
                screen.note(said)
            raise
        except TpuswarmError:
            if _nothing_came(run.folder) and not (run.folder / "logs").exists():  # not one process of it was started
                run.remove()
            raise


def _nothing_came(folder: Path) -> bool:
    """Whether a run has no version yet."""
    return not (folder / FOUNDING).exists() and not Ledger(Store(folder)).versions()


def _check_cluster(address: str) -> None:
    """Raise InputError, before anything is written, for a Ray cluster that nobody finds or may use."""
    parse_address(address, "ray-address")
    if why := silent(address):
        raise InputError(f"nothing answers at {address} ({why.strerror or why}); is that Ray cluster still running?")
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if not any(os.environ.get(name) for name in given) and not Path("~/.ray/auth_token").expanduser().exists():
        raise InputError(f"the Ray cluster at {address} needs a token; give it in {' or '.join(given)}")


@dataclass(frozen=True)
class _Ready:
    """A run of which everything is written and nothing started."""

    plan: Plan
    environment: Environment
    """Of each member."""
    cluster: Cluster
    notes: list[str]
    """Sentences for the user."""
    state_bytes: int
    """Of a member's whole state."""
    wandb: str | None
    """The project of Weights & Biases to which every row is sent."""


def _prepare(run: Run, recipe: Recipe, intended: Intended, asked: Asked) -> _Ready:
    """Write down what was intended, and the data."""
    made, kind, sizes = intended.swarm, intended.kind, intended.sizes
    needs.check_memory(made.members, sizes.exchanged, sizes.largest, sizes.state, kind, made.expected, made.aggregators)
    settings, notes = intended.resolved.settings, [f"changed: {each}" for each in intended.changed]
    keeps = _kept_bytes(intended)
    if not run.in_bucket:
        needs.check_disk(run.folder, keeps)
    if keeps >= MENTIONED:
        notes.append(f"{shown(run.folder)} will hold up to {keeps / 2**30:.1f} GiB")
    if (parent := settings["init_from"]) and not (run.folder / FOUNDING).exists():
        # A member reads them again: here they are only found to be wrong before anything is started.
        placed = place(recipe, request(settings), jax.devices())
        initial_parameters(parent, settings["init_only"], recipe, placed, run_key(settings["seed"]))
        notes.append(f"parameters from {parent}")
    shared = recipe.share(run.folder / "data") if isinstance(recipe, SharesData) else {}
    data = files.described(run.folder / "data", intended.files) if shared else {}
    plan = Plan(
        swarm=made,
        target=recipe.target,
        options=recipe.options(),
        settings=settings,
        files=data,
        shared={k: str(v).replace(str(run.folder / "data"), "{data}") for k, v in shared.items()},
        tokens_per_row=intended.resolved.tokens_per_row,
        data=settings["data"] or "",
        code=intended.code,
        evaluate_every=intended.evaluate_every,
        statistics=intended.sizes.statistics,
        average=_average(intended),
    )
    table = {name: value for name, value in asdict(made).items() if value is not None} | {
        "devices_per_member": intended.per_member,
        "code": intended.code,
        "files": {name: file.digest for name, file in data.items()},
        **({"demo": True} if asked.demo else {}),
    }
    chosen = {"platform": kind, "devices": intended.per_member, "tokens_per_row": plan.tokens_per_row}
    if isinstance(recipe, KeepsFiles):
        recipe.keep(run.folder)
    run.write_config(configuration(recipe, settings) | {"swarm": table, "chosen": chosen})
    for each in intended.changed:
        run.write_event("note", message=f"accepted: {each}")
    environment = machine.environments(kind, intended.devices, intended.per_member)
    cluster = Cluster(
        made.run,
        asked.token or run.folder / TOKEN,
        asked.ray_address,
        intended.per_member,
        sizes.largest,
        sizes.exchanged,
        asked.ports,
        bool(asked.dashboard),
    )
    return _Ready(plan, environment, cluster, notes, sizes.state, asked.wandb)


def _average(intended: Intended) -> Average | None:
    """The moving average that the recipe's program keeps, as commits make it."""
    if (kept := intended.sizes.average) is None:
        return None
    half_life = kept.half_life(int(intended.resolved.settings["batch"]))
    return Average(half_life * intended.resolved.tokens_per_row, kept.share)


def _kept_bytes(intended: Intended) -> float:
    """What a run keeps at most, with the members that it starts itself."""
    made, sizes, members = intended.swarm, intended.sizes, max(1, intended.swarm.members)
    kept = disk(sizes.exchanged // 4, made.quantize, made.outer, members, sizes.average is not None)
    commits = int(intended.resolved.settings["steps"]) / (made.cycle * members)
    return kept.held + commits / LANDMARK * kept.version


def _finished(run: Run, resolved: Resolved) -> SwarmResult | None:
    """The end of a run that came to it before, and that is not to be any longer; None for all others."""
    last = last_event(run.folder)
    if last.get("event") != "finished":
        return None
    ledger = Ledger(Store(run.folder))
    versions = ledger.versions()
    if not versions:
        return None
    newest = ledger.record(versions[-1])
    settings = resolved.settings
    if newest.tokens < int(settings["steps"]) * int(settings["batch"]) * resolved.tokens_per_row:
        return None
    if not (run.folder / REPORT).exists():  # the disk was full, or its process was killed
        _report(run)
    return _result(run, Ended("finished", f"finished: {last['message']}", None), newest)


def _say_finished(folder: Path) -> None:
    """For those who look for a head by the run's folder alone: whoever started this command may have removed it."""
    write_status(folder, replace(look(folder).status, phase=FINISHED))


def _sample(run: Run) -> None:
    """What the model writes, for the report."""
    with waiting("writing a sample"):
        loaded = load_swarm(run.folder, jax.devices()[:1])
        text = sampled(loaded.recipe, loaded.state)
    if text is not None:
        run.write_event(SAMPLE, step=loaded.step, text=text)


def _report(run: Run) -> None:
    with writing(run.folder / REPORT), waiting("writing the report"):
        from tpuswarm.swarm.views.report import write_report  # matplotlib: half a second that no start waits for

        write_report(run.folder)


def _result(run: Run, ended: Ended, newest: Record | None) -> SwarmResult:
    """What is said at the end: metrics of the first member, which is the one that evaluates, and the loss of all."""
    metrics: dict[str, Any] = {}
    first = run.folder / "members" / member_name(0) / METRICS
    for row in read_rows(first if first.exists() else run.folder / METRICS):
        metrics |= row if "loss" in row else {name: value for name, value in row.items() if name.startswith("eval_")}
    if (status := read_status(run.folder)) and status.loss is not None:
        metrics["loss"] = status.loss  # of all members
    return SwarmResult(run.folder, ended, metrics, newest.version if newest else 0, newest.tokens if newest else 0)


@contextmanager
def _logging(
    run: Run, recipe: Recipe, project: str | None, screen: Screen
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What takes in each row of a member, for the recipe's loggers and W&B. Raises InputError where W&B refuses."""
    with ExitStack() as ends:
        writers: list[Callable[[dict[str, Any]], None]] = []
        for logger in map(Blamed, all_loggers(recipe)):
            ends.callback(logger.close)
            writers.append(logger.write)
        if project is not None:
            from tpuswarm.train.look import wandb_log

            with waiting("opening W&B"):
                log = wandb_log.WandbLog(run.folder, project)
            ends.callback(log.close)
            run.write_event(wandb_log.EVENT, id=log.id, message=f"W&B: {log.where}")
            screen.note(f"W&B: {log.where}")
            writers.append(log.write_member)

        def take(row: dict[str, Any]) -> None:
            for write in writers:
                write(row)

        yield take


def _supervise(
    run: Run, recipe: Recipe, ready: _Ready, screen: Screen, watch: Callable[[Supervisor], None]
) -> SwarmResult:
    plan, made = ready.plan, ready.plan.swarm
    rule = made.outer if made.outer_lr is None else f"{made.outer} at {made.outer_lr}"
    who = "1 member" if made.members == 1 else f"{made.members} members" if made.members else "only members that join"
    sentences = [
        f"{who}, each pushing every {made.cycle} steps; outer rule {rule}"
        + (f", {made.quantize} in both directions" if made.quantize != "plain" else ""),
        *ready.notes,
    ]
    per_row = plan.tokens_per_row
    screen.open(About(recipe.name, shown(run.folder), plan.settings["batch"] * per_row, token_unit(per_row)), sentences)
    for name in (STATUS, REPORT):
        (run.folder / name).unlink(missing_ok=True)  # of the processes before these
    run.write_event("started", message=who, command=command_line())
    try:
        with _logging(run, recipe, ready.wandb, screen) as log, ready.cluster as cluster:
            if not cluster.found and not (run.config() or {}).get("swarm", {}).get("demo"):
                screen.note(f"to add a machine: `tpuswarm join {cluster.address} --token-file {cluster.token}`")
            if cluster.dashboard:
                screen.note(f"Ray's dashboard: http://{cluster.dashboard}, which asks for the token in {cluster.token}")
            supervisor = Supervisor(run, plan, cluster, screen, ready.environment, watch, log)
            ended = supervisor.go()
    except TpuswarmError as error:
        run.write_event("failed", message=str(error))
        raise
    except KeyboardInterrupt:
        message = "interrupted while its processes started or stopped"
        run.write_event("stopped", message=message)
        if not _nothing_came(run.folder):
            screen.close()
            screen.note(stopped_sentence(run.folder, message))
        raise
    except BaseException as error:
        run.write_event("failed", message=f"{type(error).__name__}: {error}")
        raise
    run.write_event(ended.how, message=ended.message.removeprefix("finished: "))
    if ended.how == "finished":
        if ready.state_bytes <= SAMPLED_BYTES:
            _sample(run)
        _report(run)
    return _result(run, ended, supervisor.view.newest if supervisor.view else None)

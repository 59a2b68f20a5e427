"""`train --members`: prepare a run, then supervise it."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

import jax

from tpuswarm.config.formatting import token_unit
from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.swarm.anywhere.invites import GUEST, InviteBook, prepare_listening
from tpuswarm.swarm.core.arithmetic.fragments import fragment_sizes
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage
from tpuswarm.swarm.core.arithmetic.quantize import sent_bytes
from tpuswarm.swarm.core.ledger_view import LANDMARK_INTERVAL
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.engines.node import connection_error
from tpuswarm.swarm.engines.opening import require_dashboard
from tpuswarm.swarm.engines.ray import Cluster
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.processes.run_plan import RunPlan, member_name
from tpuswarm.swarm.storage.founding import FOUNDING, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.load import load_swarm
from tpuswarm.swarm.storage.retention import RETAINED_COMMITS, estimate_disk
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision import local_devices as machine
from tpuswarm.swarm.supervision import needs
from tpuswarm.swarm.supervision.decide import RunSpec, SwarmOptions, decide, remove_unstarted
from tpuswarm.swarm.supervision.supervisor import RunEnd, Supervisor
from tpuswarm.swarm.views.drawing import About
from tpuswarm.swarm.views.screen import Screen, auto_screen
from tpuswarm.swarm.views.status import FINISHED, carry_over, read_run, read_status, write_status
from tpuswarm.train.look import wandb_log
from tpuswarm.train.look.describe import describe_start
from tpuswarm.train.look.guarded_logger import GuardedLogger
from tpuswarm.train.look.outputs import all_loggers
from tpuswarm.train.look.preview import print_preview
from tpuswarm.train.loop.resolve import Resolved, held_out, request
from tpuswarm.train.loop.run_config import run_config
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.process.stop import Interrupted, defer_interrupts
from tpuswarm.train.process.timestamps import writes_timestamped_log
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.compiled import place_program
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import (
    CONFIG,
    METRICS,
    SAMPLE_EVENT,
    Run,
    command_line,
    read_rows,
    writing,
)
from tpuswarm.train.run.life import last_event, removed_sentence, stopped_sentence
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import sample_for_report

Environment = Callable[[int | None], dict[str, str]]
MAX_SAMPLED_BYTES = 2**31
"""No sample is written from a larger state: this machine may have no accelerator and little memory."""
MIN_ANNOUNCED_BYTES = 2**30
"""A run that will store at least this much says so at its start."""
TOKEN, REPORT = "token", "report.html"


@dataclass(frozen=True)
class SwarmResult:
    """The end of a swarm's run, as this process saw it."""

    run: Path
    ended: RunEnd
    metrics: dict[str, Any]
    version: int
    tokens: int


def train(
    recipe: Recipe,
    swarm: SwarmOptions,
    asked: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    folder: Path | None,
    screen: Screen | None = None,
    watch: Callable[[Supervisor], None] = lambda supervisor: None,
) -> SwarmResult:
    """Start or resume a run of several members; return when it ends.

    asked: settings of FIXED and FREE that the user named, None for the others. Raise InputError for impossible
    requests, and RunFailed.
    """
    if swarm.ray_address not in (None, "auto"):
        _check_cluster(str(swarm.ray_address))
    if swarm.dashboard:
        if swarm.ray_address is not None:
            raise InputError("--dashboard and --ray-address exclude each other: that cluster has its own, or has none")
        require_dashboard()
    with ExitStack() as ends:
        with defer_interrupts():  # or an interrupt could leave the directory locked
            run = Run(folder, recipe.name)
            ends.callback(run.abandon)
        screen = screen or auto_screen()
        ends.callback(screen.close)
        try:
            with waiting(f"reading the data of {recipe.name}"):
                spec = decide(run, recipe, swarm, asked, tokens, epochs)
            if done := _finished(run, spec.resolved):
                if run.in_bucket:
                    _mark_finished(run.folder)
                screen.note(f"{shown(run.folder)} is finished; nothing left to do")
                return done
            with waiting("preparing the run"):
                prepared = _prepare(run, recipe, spec, swarm)
        except BaseException:
            if not (run.folder / CONFIG).exists():
                remove_unstarted(run.folder)
            raise
        try:
            result = _supervise(run, recipe, prepared, screen, watch)
            if result.ended.signal is not None and _has_no_version(run.folder):
                raise Interrupted(Signals(result.ended.signal))
            return result
        except Interrupted as interrupted:
            if _has_no_version(run.folder) and interrupted.signal != Signals.SIGHUP:  # without a terminal, keep the run
                message = removed_sentence(run.folder)
                run.remove()
                screen.close()
                screen.note(message)
            raise
        except TpuswarmError:
            if _has_no_version(run.folder) and not (run.folder / "logs").exists():  # no process was started
                run.remove()
            raise


def _has_no_version(folder: Path) -> bool:
    return not (folder / FOUNDING).exists() and not Ledger(Store(folder)).versions()


def _check_cluster(address: str) -> None:
    """Raise InputError, before anything is written, for a Ray cluster that does not answer or needs a token."""
    parse_address(address, "ray-address")
    if why := connection_error(address):
        raise InputError(f"nothing answers at {address} ({why.strerror or why}); is that Ray cluster still running?")
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if not any(os.environ.get(name) for name in given) and not Path("~/.ray/auth_token").expanduser().exists():
        raise InputError(f"the Ray cluster at {address} needs a token; give it in {' or '.join(given)}")


@dataclass(frozen=True)
class _PreparedRun:
    """A run whose files are written and whose processes are not started."""

    plan: RunPlan
    environment: Environment
    cluster: Cluster
    notes: list[str]
    """Sentences for the user."""
    state_bytes: int
    """Size of a member's whole state."""
    wandb: str | None
    """Project of Weights & Biases for metrics rows."""
    listen: tuple[str, int] | None
    """Where the gateway listens for members that dial in."""


def _prepare(run: Run, recipe: Recipe, spec: RunSpec, options: SwarmOptions) -> _PreparedRun:
    """Write the run's configuration and data."""
    swarm, kind, sizes = spec.swarm, spec.kind, spec.sizes
    founding = read_founding(Store(run.folder))
    layout = founding.layout if founding else None
    fragment = 4 * max(layout.sizes if layout else fragment_sizes(sizes.exchanged // 4, swarm.fragments))
    needs.check_memory(swarm.members, sizes.exchanged, fragment, sizes.state, kind, swarm.expected, swarm.aggregators)
    settings = spec.resolved.settings
    rows = held_out(recipe, required=False)
    form = f"{spec.per_member} x {kind} for each member" if swarm.members else ""
    about = describe_start(
        recipe, settings, sizes.parameters, form, spec.resolved.source, rows.rows_per_epoch if rows else 0
    )
    notes = [f"{name}: {text}" for name, text in about.items()]
    notes += [*spec.device_notes, *(f"changed: {change}" for change in spec.changed)]
    keeps = _stored_bytes(spec)
    if not run.in_bucket:
        needs.check_disk(run.folder, keeps)
    if keeps >= MIN_ANNOUNCED_BYTES:
        notes.append(f"{shown(run.folder)} will hold up to {keeps / 2**30:.1f} GiB")
    if (parent := settings["init_from"]) and layout is None:
        if parent != recipe.base_model:  # members read them again; this finds errors before anything is started
            placed = place_program(recipe, request(settings), jax.devices())
            initial_parameters(parent, settings["init_only"], recipe, placed, run_key(settings["seed"]))
        notes.append(f"parameters from {parent}")
    shared = recipe.share(run.folder / "data")
    data = files.describe(run.folder / "data", spec.files) if shared else {}
    plan = RunPlan(
        swarm=swarm,
        target=recipe.target,
        options=recipe.options(),
        settings=settings,
        files=data,
        shared={k: str(v).replace(str(run.folder / "data"), "{data}") for k, v in shared.items()},
        tokens_per_row=spec.resolved.tokens_per_row,
        data=settings["data"] or "",
        code=spec.code,
        evaluate_every=spec.evaluate_every,
        statistics=spec.sizes.statistics,
        average=_average(spec),
        layout=layout,
        keep_payloads=spec.keep_payloads,
    )
    table = {name: value for name, value in asdict(swarm).items() if value is not None} | {
        "devices_per_member": spec.per_member,
        "code": spec.code,
        "files": {name: file.digest for name, file in data.items()},
        **({"demo": True} if options.demo else {}),
        **({"keep_payloads": str(spec.keep_payloads or "all")} if spec.keep_payloads != RETAINED_COMMITS else {}),
    }
    chosen = {"platform": kind, "devices": spec.per_member, "tokens_per_row": plan.tokens_per_row}
    recipe.keep(run.folder)
    run.write_config(run_config(recipe, settings) | {"swarm": table, "chosen": chosen})
    for change in spec.changed:
        run.write_event("note", message=f"accepted: {change}")
    environment = machine.environments(kind, spec.devices, spec.per_member, swarm.members)
    listen = prepare_listening(run.folder, options.listen, options.address) if options.listen else None
    cluster = Cluster(
        swarm.run,
        options.token or run.folder / TOKEN,
        options.ray_address,
        spec.per_member,
        fragment,
        sizes.exchanged,
        options.ports,
        bool(options.dashboard),
        is_open=bool(swarm.expected or options.ports or options.token) or not (swarm.members or listen),
    )
    return _PreparedRun(plan, environment, cluster, notes, sizes.state, options.wandb, listen)


def _average(spec: RunSpec) -> MovingAverage | None:
    if (average := spec.sizes.average) is None:
        return None
    half_life = average.half_life(int(spec.resolved.settings["batch"]))
    return MovingAverage(half_life * spec.resolved.tokens_per_row, average.share)


def _stored_bytes(spec: RunSpec) -> float:
    swarm, sizes, members = spec.swarm, spec.sizes, max(1, spec.swarm.members)
    kept = estimate_disk(sizes.exchanged // 4, swarm.quantize, swarm.outer, members, sizes.average is not None)
    commits = int(spec.resolved.settings["steps"]) / (swarm.cycle * members)
    payloads = (commits if spec.keep_payloads is None else min(commits, spec.keep_payloads)) - RETAINED_COMMITS
    sent = members * sent_bytes(sizes.exchanged // 4, swarm.quantize)
    return kept.held + max(0, payloads) * sent + commits / LANDMARK_INTERVAL * kept.version


def _finished(run: Run, resolved: Resolved) -> SwarmResult | None:
    """Return the result of a run that is finished already, else None."""
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
    if not (run.folder / REPORT).exists():  # the disk was full, or the process was killed
        _report(run)
    return _result(run, RunEnd("finished", f"finished: {last['message']}", None), newest)


def _mark_finished(folder: Path) -> None:
    write_status(folder, replace(read_run(folder).status, phase=FINISHED))


def _sample(run: Run, recipe: Recipe) -> None:
    with waiting("writing a sample"):
        loaded = load_swarm(run.folder, jax.devices()[:1], recipe)
        text = sample_for_report(recipe, loaded.state)
    if text is not None:
        run.write_event(SAMPLE_EVENT, step=loaded.step, text=text)


def _report(run: Run) -> None:
    with writing(run.folder / REPORT), waiting("writing the report"):
        from tpuswarm.swarm.views.report import write_report  # imports matplotlib, which takes half a second

        write_report(run.folder)


def _result(run: Run, ended: RunEnd, newest: Record | None) -> SwarmResult:
    """Return the result, with the metrics of the first member, which evaluates, and the loss of all."""
    metrics: dict[str, Any] = {}
    first = run.folder / "members" / member_name(0) / METRICS
    for row in read_rows(first if first.exists() else run.folder / METRICS):
        metrics |= row if "loss" in row else {name: value for name, value in row.items() if name.startswith("eval_")}
    if (status := read_status(run.folder)) and status.loss is not None:
        metrics["loss"] = status.loss  # the mean of all members
    return SwarmResult(run.folder, ended, metrics, newest.version if newest else 0, newest.tokens if newest else 0)


def _open_loggers(run: Run, recipe: Recipe, project: str | None, screen: Screen, to_close: list[GuardedLogger]) -> None:
    """Add the recipe's loggers and W&B to `to_close`. Raise InputError if W&B refuses."""

    def report(message: str) -> None:
        run.write_event("note", message=message)
        screen.note(message)

    to_close += all_loggers(recipe, (), report)
    if project is not None:
        with waiting("opening W&B"):
            logger = wandb_log.open_wandb(run.folder, project, report)
        to_close.append(logger)
        if log := logger.logger:
            run.write_event(wandb_log.WANDB_EVENT, id=log.id, message=f"W&B: {log.where}")
            screen.note(f"W&B: {log.where}")


def show_invite(screen: Screen, folder: Path) -> None:
    """Say how to join from anywhere. A log does not get the invite: others may read it, and a bucket keeps it."""
    command = f"`tpuswarm invite {shown(folder)}`"
    if writes_timestamped_log():
        screen.note(f"{command} prints the line with which others join from anywhere")
        return
    screen.note(f"to join from anywhere, paste this line there ({command} prints it again):")
    screen.line(f"tpuswarm join {InviteBook(folder).invite(GUEST)}")


def _supervise(
    run: Run, recipe: Recipe, prepared: _PreparedRun, screen: Screen, watch: Callable[[Supervisor], None]
) -> SwarmResult:
    plan, swarm = prepared.plan, prepared.plan.swarm
    rule = swarm.outer if swarm.outer_lr is None else f"{swarm.outer} at {swarm.outer_lr}"
    who = "only members that join"
    if swarm.members:
        who = "1 member" if swarm.members == 1 else f"{swarm.members} members"
    sentences = [
        f"{who}, each pushing every {swarm.cycle} steps; outer rule {rule}"
        + (f", {swarm.quantize} in both directions" if swarm.quantize != "plain" else ""),
        *prepared.notes,
    ]
    per_row = plan.tokens_per_row
    screen.open(About(recipe.name, shown(run.folder), plan.settings["batch"] * per_row, token_unit(per_row)), sentences)
    print_preview(screen.console, recipe.preview())
    carry_over(run.folder, screen.began)
    (run.folder / REPORT).unlink(missing_ok=True)  # from an earlier start
    run.write_event("started", message=who, command=command_line())
    ended: RunEnd | None = None
    loggers: list[GuardedLogger] = []

    def close_loggers() -> None:
        is_urgent = ended is not None and ended.signal not in (None, Signals.SIGINT)
        with ExitStack() as closing:  # all of them, even after Ctrl-C in one
            for logger in loggers:
                closing.callback(logger.close, is_urgent=is_urgent)

    try:
        with ExitStack() as ends:
            ends.callback(close_loggers)
            _open_loggers(run, recipe, prepared.wandb, screen, loggers)

            def log_row(row: dict[str, Any]) -> None:
                for logger in loggers:
                    logger.write(row)

            cluster = ends.enter_context(prepared.cluster)
            if cluster.join_address:
                screen.note(f"to add a machine: `tpuswarm join {cluster.join_address} --token-file {cluster.token}`")
            if cluster.dashboard:
                screen.note(f"Ray's dashboard: http://{cluster.dashboard}, which asks for the token in {cluster.token}")
            if prepared.listen:
                show_invite(screen, run.folder)
            supervisor = Supervisor(run, plan, cluster, screen, prepared.environment, watch, log_row, prepared.listen)
            ended = supervisor.run_to_end()
    except TpuswarmError as error:
        run.write_event("failed", message=str(error))
        raise
    except KeyboardInterrupt:
        message = "interrupted during the start or stop of its processes"
        run.write_event("stopped", message=message)
        if not _has_no_version(run.folder):
            screen.close()
            screen.note(stopped_sentence(run.folder, message))
        raise
    except BaseException as error:
        run.write_event("failed", message=f"{type(error).__name__}: {message_of(error)}")
        raise
    run.write_event(ended.how, message=ended.message.removeprefix("finished: "))
    if ended.how == "finished":
        if prepared.state_bytes <= MAX_SAMPLED_BYTES:
            _sample(run, recipe)
        _report(run)
    return _result(run, ended, supervisor.view.newest if supervisor.view else None)

"""`train --members`: from what was asked to a plan, and a supervisor that carries it out."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import jax

from tpuswarm.config.limits import check
from tpuswarm.config.shown import unit
from tpuswarm.config.units import Every, parse_address, parse_every
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.swarm.core.fragments import fragments_for
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.drawing import About
from tpuswarm.swarm.engines.node import silent
from tpuswarm.swarm.engines.ray import Cluster
from tpuswarm.swarm.ledger import Ledger
from tpuswarm.swarm.load import load_swarm
from tpuswarm.swarm.report import write_report
from tpuswarm.swarm.runtime import files, machine, memory
from tpuswarm.swarm.runtime.head import FOUNDING, read_founding
from tpuswarm.swarm.runtime.plan import CYCLE, Plan, Swarm, code_digest, member_name
from tpuswarm.swarm.runtime.screen import Screen, auto_screen
from tpuswarm.swarm.runtime.supervisor import Ended, Supervisor
from tpuswarm.swarm.status import FILE as STATUS
from tpuswarm.swarm.status import read_status
from tpuswarm.swarm.store import Store
from tpuswarm.train.fit import place
from tpuswarm.train.load import load_parameters
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run import (
    COMMITS,
    CONFIG,
    EVENTS,
    LAST,
    METRICS,
    SAMPLE,
    Run,
    command_line,
    read_rows,
    removed_sentence,
    stopped_sentence,
    writing,
)
from tpuswarm.train.session import Resolved, configuration, held_out, request, resolve
from tpuswarm.train.settings import check_batch, differences
from tpuswarm.train.stop import Interrupted, held
from tpuswarm.train.waiting import waiting

Environment = Callable[[int | None], dict[str, str]]
STAYS = ("batch", "seed", "data")
"""Settings that give rows their meaning: --accept-code changes them no more than anything else does."""
SAMPLED_BYTES = 2**31
"""Of a larger state no sample is made: this machine may have no accelerator, and little memory."""
MAY_CHANGE = ("run", "members")
TOKEN, REPORT = "token", "report.html"


@dataclass(frozen=True)
class Asked:
    """The options of a swarm, None where the user gave none."""

    members: int | None = None
    devices_per_member: int | None = None
    cycle: int | None = None
    outer: str | None = None
    outer_lr: float | None = None
    quantize: str | None = None
    overlap: str | None = None
    ray_address: str | None = None
    accept_code: bool = False
    demo: bool = False
    """Whether another demo may replace the run."""


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
    with ExitStack() as ends:
        with held():  # else the directory could be there without anybody to let it go
            run = Run(folder, recipe.name)
            ends.callback(run.abandon)
        screen = screen or auto_screen()
        ends.callback(screen.close)
        try:
            with waiting(f"reading the data of {recipe.name}"):
                decided = _decide(run, recipe, swarm, asked, tokens, epochs)
            if done := _finished(run, decided.resolved):
                screen.note(f"{run.folder} is finished; nothing left to do")
                return done
            with waiting("preparing the run"):
                ready = _prepare(run, recipe, decided, swarm)
        except BaseException:
            if not (run.folder / CONFIG).exists():
                _forget(run.folder)
            raise
        try:
            result = _supervise(run, recipe, ready, screen, watch)
            if result.ended.signal is not None and _nothing_came(run.folder):
                raise Interrupted(Signals(result.ended.signal))
            return result
        except Interrupted:
            if _nothing_came(run.folder):
                shutil.rmtree(run.folder)
                screen.close()
                screen.note(removed_sentence(run.folder))
            raise
        except TpuswarmError:
            if _nothing_came(run.folder) and not (run.folder / "logs").exists():  # not one process of it was started
                shutil.rmtree(run.folder)
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


def _begun(folder: Path) -> bool:
    """Whether a run has a first version: commit 0, and after it founding.json, which a kill may have left to be made.

    Raises InputError where something is gone that no kill takes away; Corrupt for a damaged one.
    """
    store = Store(folder)
    founding, versions = read_founding(store) is not None, Ledger(store).versions()
    if founding != bool(versions) and versions != [0]:
        lost = f"{COMMITS}/" if founding else FOUNDING
        raise InputError(f"{folder} has lost its {lost}; restore a copy of it, or use another --run to start over")
    return bool(versions)


def _forget(folder: Path) -> None:
    """Remove what a run that never had a first version left: any other command may take its place."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / CONFIG).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Decided:
    """What a run is to be; nothing of it is written yet."""

    resolved: Resolved
    swarm: Swarm
    code: str
    files: dict[str, str]
    """Digests of the data files that the run was started with, where it was."""
    changed: list[str]
    """What was accepted to be different from the run that is there, in words."""
    evaluate_every: int | None
    kind: str
    """The platform of this machine's devices."""
    devices: list[int]
    per_member: int
    sizes: machine.Sizes


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


def _decide(
    run: Run, recipe: Recipe, swarm: Asked, asked: dict[str, Any], tokens: int | None, epochs: float | None
) -> _Decided:
    if not recipe.target:
        raise InputError(f"{recipe.name} was built in a Python program; put it into a file and train file.py:Recipe")
    check(asdict(swarm))
    if asked["ema"] or recipe.defaults.get("ema"):
        raise InputError("--ema does not work in a swarm yet; leave it out")
    jax.config.update("jax_platforms", "cpu")  # the devices are for the members
    config = run.config()
    if config and "swarm" in config and not _begun(run.folder):
        _forget(run.folder)
        config = None
    if config and "swarm" not in config:
        raise InputError(f"{run.folder} is a plain run; use another --run, or leave out --members")
    stored = dict(config["swarm"]) if config else {}
    members = stored.get("members", 1) if swarm.members is None else swarm.members
    kind, devices = machine.local_devices(asked["devices"])
    per_member = machine.share_out(kind, devices, members, swarm.devices_per_member or stored.get("devices_per_member"))
    resolved = resolve(run, recipe, asked, tokens, epochs, kind, per_member)
    check_batch(resolved.settings["batch"], per_member, resolved.settings["accumulate"] or 1)
    sizes = machine.sizes(recipe)
    made = _swarm(swarm, stored, recipe, members, sizes.exchanged)
    code = code_digest(recipe.target)
    changed = _changes(run, swarm, stored, resolved, made, code)
    evaluate_every = _evaluate_every(asked["eval_every"], recipe, resolved)
    return _Decided(
        resolved, made, code, stored.get("files", {}), changed, evaluate_every, kind, devices, per_member, sizes
    )


def _prepare(run: Run, recipe: Recipe, decided: _Decided, asked: Asked) -> _Ready:
    """Write down what was decided, and the data."""
    made, kind, sizes = decided.swarm, decided.kind, decided.sizes
    memory.check_memory(made.members, sizes.exchanged, sizes.state, kind)
    settings, notes = decided.resolved.settings, [f"changed: {each}" for each in decided.changed]
    if (parent := settings["init_from"]) and not (run.folder / FOUNDING).exists():
        # A member reads them again: here they are only found to be wrong before anything is started.
        load_parameters(parent, recipe, place(recipe, request(settings), jax.devices()))
        notes.append(f"parameters from {parent}")
    shared = recipe.share(run.folder / "data")
    data = files.described(run.folder / "data", decided.files) if shared else {}
    plan = Plan(
        swarm=made,
        target=recipe.target,
        options=recipe.options(),
        settings=settings,
        files=data,
        shared={k: str(v).replace(str(run.folder / "data"), "{data}") for k, v in shared.items()},
        tokens_per_row=decided.resolved.tokens_per_row,
        data=settings["data"] or "",
        code=decided.code,
        evaluate_every=decided.evaluate_every,
    )
    table = {name: value for name, value in asdict(made).items() if value is not None} | {
        "devices_per_member": decided.per_member,
        "code": decided.code,
        "files": {name: file.digest for name, file in data.items()},
        **({"demo": True} if asked.demo else {}),
    }
    chosen = {"platform": kind, "devices": decided.per_member, "tokens_per_row": plan.tokens_per_row}
    recipe.keep(run.folder)
    run.write_config(configuration(recipe, settings) | {"swarm": table, "chosen": chosen})
    for each in decided.changed:
        run.write_event("note", message=f"accepted: {each}")
    environment = machine.environments(kind, decided.devices, decided.per_member)
    cluster = Cluster(
        made.run, run.folder / TOKEN, asked.ray_address, decided.per_member, sizes.largest, sizes.exchanged
    )
    return _Ready(plan, environment, cluster, notes, sizes.state)


def _finished(run: Run, resolved: Resolved) -> SwarmResult | None:
    """The end of a run that came to it before, and that is not to be any longer; None for all others."""
    ends = [row for row in read_rows(run.folder / EVENTS) if row["event"] in ("started", *LAST)]
    if not ends or ends[-1]["event"] != "finished":
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
    return _result(run, Ended("finished", f"finished: {ends[-1]['message']}", None), newest)


def _sample(run: Run) -> None:
    """What the model writes, for the report."""
    with waiting("writing a sample"):
        loaded = load_swarm(run.folder, jax.devices()[:1])
        text = loaded.recipe.sampled(loaded.state)
    if text is not None:
        run.write_event(SAMPLE, step=loaded.step, text=text)


def _report(run: Run) -> None:
    with writing(run.folder / REPORT), waiting("writing the report"):
        write_report(run.folder)


def _result(run: Run, ended: Ended, newest: Record | None) -> SwarmResult:
    """What is said at the end: metrics of the first member, which is the one that evaluates, and the loss of all."""
    metrics: dict[str, Any] = {}
    for row in read_rows(run.folder / "members" / member_name(0) / METRICS):
        metrics |= row if "loss" in row else {name: value for name, value in row.items() if name.startswith("eval_")}
    if (status := read_status(run.folder)) and status.loss is not None:
        metrics["loss"] = status.loss  # of all members
    return SwarmResult(run.folder, ended, metrics, newest.version if newest else 0, newest.tokens if newest else 0)


def _changes(
    run: Run, swarm: Asked, stored: Mapping[str, Any], resolved: Resolved, made: Swarm, code: str
) -> list[str]:
    """What differs from the run that is there, in words; InputError where that was not accepted or cannot be."""
    if not stored:
        return []
    changed = resolved.changed + differences(
        stored, {name: value for name, value in asdict(made).items() if name not in MAY_CHANGE}
    )
    if never := [each for each in changed if each.partition(" ")[0] in STAYS]:
        raise InputError(
            f"{run.folder} is a different run: {'; '.join(never)}; {', '.join(STAYS)} define its rows and cannot "
            "change; use another --run"
        )
    if stored.get("code") != code:
        changed.append(f"code was {str(stored.get('code'))[:12]}…, now {code[:12]}…")
    if changed and not swarm.accept_code:
        raise InputError(
            f"{run.folder} has a different configuration: {'; '.join(changed)}; --accept-code resumes with the new one "
            "and records the change, or use another --run"
        )
    return changed


def _swarm(swarm: Asked, stored: Mapping[str, Any], recipe: Recipe, members: int, exchanged: int) -> Swarm:
    usual = "average" if members == 1 else str(recipe.defaults.get("outer", "nesterov"))
    outer: Any = swarm.outer or stored.get("outer") or usual
    same = outer == stored.get("outer")
    rate = swarm.outer_lr if swarm.outer_lr is not None else stored.get("outer_lr") if same else None
    if outer == "average" and rate is not None:
        raise InputError(f"--outer average takes no --outer-lr ({rate}); leave one of them out")
    form: Any = swarm.quantize or stored.get("quantize") or "plain"
    overlap = stored.get("overlap", True) if swarm.overlap is None else swarm.overlap == "auto"
    return Swarm(
        run=stored.get("run") or secrets.token_hex(8),
        members=members,
        cycle=swarm.cycle or stored.get("cycle") or CYCLE,
        outer=outer,
        outer_lr=rate,
        quantize=form,
        overlap=overlap,
        fragments=stored.get("fragments") or fragments_for(exchanged, members),
    )


def _evaluate_every(asked: Any, recipe: Recipe, resolved: Resolved) -> int | None:
    """Tokens between two evaluations; None for one at the end."""
    every = Every() if asked is None else parse_every(asked, "eval_every")
    held_out(recipe, required=asked is not None)
    if every.seconds is not None:
        raise InputError(
            "in a swarm --eval-every counts steps, as its members share no clock; use for example --eval-every 500"
        )
    return every.steps and every.steps * int(resolved.settings["batch"]) * resolved.tokens_per_row


def _supervise(
    run: Run, recipe: Recipe, ready: _Ready, screen: Screen, watch: Callable[[Supervisor], None]
) -> SwarmResult:
    plan, made = ready.plan, ready.plan.swarm
    rule = made.outer if made.outer_lr is None else f"{made.outer} at {made.outer_lr}"
    sentences = [
        f"{made.members} members, a push every {made.cycle} steps, outer rule {rule}"
        + (f", {made.quantize} in both directions" if made.quantize != "plain" else ""),
        *ready.notes,
    ]
    per_row = plan.tokens_per_row
    screen.open(About(recipe.name, str(run.folder), plan.settings["batch"] * per_row, unit(per_row)), sentences)
    for name in (STATUS, REPORT):
        (run.folder / name).unlink(missing_ok=True)  # of the processes before these
    run.write_event("started", message=f"{made.members} members", command=command_line())
    try:
        with ready.cluster as cluster:
            if not cluster.found:
                screen.note(f"to add a machine: tpuswarm join {cluster.address} --token-file {run.folder / TOKEN}")
            supervisor = Supervisor(run, plan, cluster, screen, ready.environment, watch)
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

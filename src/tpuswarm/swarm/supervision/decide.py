"""`train --members`: derive a run's settings from the options and an existing run; starts nothing."""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tpuswarm.config.limits import check_settings
from tpuswarm.config.units import Interval, check_number, parse_count, parse_every
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.fragments import fragments_for
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.member.program import swarm_hooks
from tpuswarm.swarm.processes.run_plan import DEFAULT_CYCLE_STEPS, Swarm, code_digest
from tpuswarm.swarm.storage.founding import FOUNDING, read_founding
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name
from tpuswarm.swarm.storage.retention import RETAINED_COMMITS
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import announced_version
from tpuswarm.swarm.supervision import local_devices as machine
from tpuswarm.train.loop.resolve import Resolved, held_out, resolve
from tpuswarm.train.program.request import capability_note
from tpuswarm.train.recipe import Recipe, default_precision
from tpuswarm.train.run.directory import COMMITS, CONFIG, EVENTS, Run
from tpuswarm.train.settings import check_batch, differences
from tpuswarm.train.storage.folders import shown

UNCHANGEABLE = ("batch", "seed", "data")
"""Settings that define the rows; not even --accept-code changes them."""
CHANGEABLE = ("run", "members", "expected")


@dataclass(frozen=True)
class SwarmOptions:
    """The options of a swarm; None if not given."""

    members: int | None = None
    devices_per_member: int | None = None
    cycle: int | None = None
    outer: str | None = None
    outer_lr: float | None = None
    quantize: str | None = None
    overlap: str | None = None
    ray_address: str | None = None
    dashboard: bool | None = None
    """Whether to serve Ray's dashboard."""
    accept_code: bool = False
    token: Path | None = None
    """File with the secret for joining; None draws one for the run."""
    expect: int | None = None
    """Number of members that will join."""
    keep_payloads: str | None = None
    """Commits whose payloads are kept, or `all`."""
    ports: Ports | None = None
    """Ports of the Ray that is started here; None for any."""
    listen: str | None = None
    """HOST:PORT on which this machine listens for members that dial in."""
    address: str | None = None
    """Where they reach it: HOST:PORT, or https://… if a tunnel has a certificate of its own."""
    wandb: str | None = None
    """Project of Weights & Biases for metrics rows."""
    demo: bool = False
    """Whether another demo may replace the run."""


@dataclass(frozen=True)
class RunSpec:
    """A run's settings, before anything is written."""

    resolved: Resolved
    swarm: Swarm
    code: str
    files: dict[str, str]
    """Digests of the data files that the existing run was started with."""
    changed: list[str]
    """Accepted differences from the existing run, in words."""
    evaluate_every: int | None
    kind: str
    """Platform of this machine's devices."""
    devices: list[str]
    per_member: int
    device_notes: list[str]
    """Sentences for the user about the devices."""
    sizes: machine.Sizes
    keep_payloads: int | None
    """Last commits whose payloads are kept; None for all."""


def decide(
    run: Run, recipe: Recipe, swarm: SwarmOptions, asked: dict[str, Any], tokens: int | None, epochs: float | None
) -> RunSpec:
    """Derive the run's settings from the options and the existing run. Raise InputError for impossible options."""
    if not recipe.target:
        raise InputError(f"{recipe.name} was built in a Python program; put it into a file and train file.py:Recipe")
    checked_here = ("token", "ports", "keep_payloads", "listen", "address")
    check_settings({name: value for name, value in asdict(swarm).items() if name not in checked_here})
    keep_payloads = _payload_commits(swarm.keep_payloads)
    jax.config.update("jax_platforms", "cpu")  # the members use the devices
    swarm_hooks(recipe)
    config = run.config()
    if config and "swarm" in config and not _has_first_version(run.folder):
        remove_unstarted(run.folder)
        config = None
    if config and "swarm" not in config:
        raise InputError(f"{shown(run.folder)} is a plain run; use another --run, or leave out --members")
    stored = dict(config["swarm"]) if config else {}
    if swarm.keep_payloads is None:
        keep_payloads = _payload_commits(stored.get("keep_payloads"))
    members = stored.get("members", 1) if swarm.members is None else swarm.members
    kind, devices = machine.local_devices(asked["devices"])
    capability = machine.require_usable(kind, devices if members else [])
    per_member = machine.share_out(kind, devices, members, swarm.devices_per_member or stored.get("devices_per_member"))
    resolved = resolve(run, recipe, asked, tokens, epochs, default_precision(kind, capability), per_member)
    check_batch(resolved.settings["batch"], per_member, resolved.settings["accumulate"] or 1)
    if resolved.settings["eval_batch"]:
        check_batch(resolved.settings["eval_batch"], per_member, 1, name="eval_batch")
    sizes = machine.sizes(recipe, resolved.settings["ema"])
    made = _swarm(swarm, stored, recipe, members, sizes)
    code = code_digest(recipe.target)
    changed = _changes(run, swarm, stored, resolved, made, code)
    evaluate_every = _evaluate_every(resolved.settings["eval_every"], recipe, resolved)
    notes = [*machine.sharing_note(devices, members, per_member), *capability_note(capability)]
    return RunSpec(
        resolved,
        made,
        code,
        stored.get("files", {}),
        changed,
        evaluate_every,
        kind,
        devices,
        per_member,
        notes,
        sizes,
        keep_payloads,
    )


def _has_first_version(folder: Path) -> bool:
    """Whether a run has its first version: commit 0 and then founding.json, which a kill may have left out.

    Raise InputError if a file is lost that no kill can remove, Corrupt if one is damaged.
    """
    store = Store(folder)
    founding, versions = read_founding(store) is not None, Ledger(store).versions()
    if founding != bool(versions) and versions != [0]:
        lost = f"{COMMITS}/" if founding else FOUNDING
        raise InputError(f"{folder} has lost its {lost}; restore a copy of it, or use another --run to start over")
    if versions:
        _require_ledger(folder, store, versions)
    return bool(versions)


def _require_ledger(folder: Path, store: Store, versions: Sequence[int]) -> None:
    """Raise InputError if an announced commit or the header of a recent push is lost, RunFailed for a read-only run."""
    for name in (commit_name(versions[-1] + 1), "headers/next.json", "objects/next.safetensors"):
        with store.temporary(name):
            pass
    ledger, lost = Ledger(store), ""
    if (announced := announced_version(store)) > versions[-1]:
        lost = f"{commit_name(announced)}, which {EVENTS} announces: its newest commit is {versions[-1]}"
    else:
        stored = set(store.names("headers/"))
        recent = ledger.records(versions[-RETAINED_COMMITS:])
        names = (header_name(decision.identity) for record in recent for decision in record.decisions)
        lost = next((name for name in names if name not in stored), "")
    if lost:
        raise InputError(
            f"{folder} has lost {lost}; restore a copy of it, or go on from commit {versions[-1]} in a new run: "
            f"--run NEW --init-from {folder}"
        )


def remove_unstarted(folder: Path) -> None:
    """Remove the files of a run without a first version; another run may replace it."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / CONFIG).unlink(missing_ok=True)


def _changes(
    run: Run, options: SwarmOptions, stored: Mapping[str, Any], resolved: Resolved, swarm: Swarm, code: str
) -> list[str]:
    """Describe the differences from the existing run. Raise InputError if they are impossible or not accepted."""
    if not stored:
        return []
    changed = resolved.changed + differences(
        stored, {name: value for name, value in asdict(swarm).items() if name not in CHANGEABLE}
    )
    called = shown(run.folder)
    if never := [change for change in changed if change.partition(" ")[0] in UNCHANGEABLE]:
        raise InputError(
            f"{called} is a different run: {'; '.join(never)}; {', '.join(UNCHANGEABLE)} define its rows and cannot "
            "change; use another --run"
        )
    if stored.get("code") != code:
        changed.append(f"code was {str(stored.get('code'))[:12]}…, now {code[:12]}…")
    if changed and not options.accept_code:
        raise InputError(
            f"{called} has a different configuration: {'; '.join(changed)}; --accept-code resumes with the new one "
            "and records the change, or use another --run"
        )
    return changed


def _swarm(
    options: SwarmOptions, stored: Mapping[str, Any], recipe: Recipe, members: int, sizes: machine.Sizes
) -> Swarm:
    default = "average" if members == 1 else str(recipe.defaults.get("outer", "nesterov"))
    outer: Any = options.outer or stored.get("outer") or default
    same = outer == stored.get("outer")
    rate = options.outer_lr if options.outer_lr is not None else stored.get("outer_lr") if same else None
    if outer == "average" and rate is not None:
        raise InputError(f"--outer average takes no --outer-lr ({rate}); omit one of them")
    if sizes.swarm_obstacle and not stored and members + (options.expect or 0) > 1:
        raise InputError(f"the optimizer of {recipe.name} {sizes.swarm_obstacle}")
    form: Any = options.quantize or stored.get("quantize") or "plain"
    if sizes.statistics and form != "plain":
        raise InputError(
            f"{recipe.name} has running statistics ({sizes.statistics[0]}); --quantize {form} could make a variance "
            "negative; omit it"
        )
    overlap = stored.get("overlap", True) if options.overlap is None else options.overlap == "auto"
    expected = stored.get("expected", 0) if options.expect is None else options.expect
    return Swarm(
        run=stored.get("run") or secrets.token_hex(8),
        members=members,
        cycle=options.cycle or stored.get("cycle") or DEFAULT_CYCLE_STEPS,
        outer=outer,
        outer_lr=rate,
        quantize=form,
        overlap=overlap,
        fragments=stored.get("fragments") or fragments_for(sizes.exchanged // 4, members + expected),
        expected=expected,
        base=recipe.shared_digest(recipe.base_model) if recipe.base_model else None,
    )


def _payload_commits(text: str | None) -> int | None:
    """Return how many commits keep their payloads, None for all. Raise InputError."""
    if text is None:
        return RETAINED_COMMITS
    if text == "all":
        return None
    commits = parse_count(text, "--keep-payloads")
    check_number(commits, "--keep-payloads", least=RETAINED_COMMITS)
    return commits


def _evaluate_every(asked: Any, recipe: Recipe, resolved: Resolved) -> int | None:
    """Return the tokens between two evaluations; None for one at the end."""
    every = Interval() if asked is None else parse_every(asked, "eval_every")
    held_out(recipe, required=asked is not None)
    if every.seconds is not None:
        raise InputError(
            "in a swarm --eval-every counts steps, as its members share no clock; use for example --eval-every 500"
        )
    return every.steps and every.steps * int(resolved.settings["batch"]) * resolved.tokens_per_row

"""Preview a plan: numbered steps with their costs and equivalent gcloud commands."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from tpuswarm.catalog import APIS
from tpuswarm.cloud.protocol import Listing, Machine, Spec, TpuSpec
from tpuswarm.fleet.apply import gcloud
from tpuswarm.fleet.decide.actions import Action, Create, Delete, Grow, Plan, Start, Stop, Wait
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flags import Flag
from tpuswarm.fleet.decide.limits import is_billable
from tpuswarm.fleet.decide.money import GrantCover, Rate, covered_machines, machine_price, spec_price
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.store.machine_flags import add_flag_metadata


class PreviewStep(NamedTuple):
    says: str
    costs: str
    """Per hour; empty if the step costs nothing more."""
    line: str
    """The gcloud command that does the same."""


class Preview(NamedTuple):
    steps: tuple[PreviewStep, ...]
    waits: tuple[Wait, ...]
    free: int
    """Machines under grants, afterwards."""
    paid: int
    rate: Rate


def make_preview(
    desired: Desired, listing: Listing, plan: Plan, project: str, now: float, flags: Sequence[Flag] = ()
) -> Preview:
    """Return the steps of a plan. `flags`: all that are set; a TensorFlow pod has them in its metadata."""
    own = desired.own(listing.machines)
    if desired.down is not None:  # the keeper deletes its own machine in a later plan
        plan = plan._replace(actions=tuple(Delete(machine, desired.down) for machine in own))
    deleted = {_key(action.machine) for action in plan.actions if isinstance(action, Delete)}
    staying = [machine for machine in listing.machines if is_billable(machine) and _key(machine) not in deleted]
    _, cover = covered_machines(staying, desired.grants, now)
    actions = [
        action._replace(spec=add_flag_metadata(action.spec, flags)) if isinstance(action, Create) else action
        for action in (*plan.actions, *_successors(desired, own, plan))
    ]
    steps = [step for _, group in groupby(actions, key=_step_key) for step in _steps(list(group), project, cover)]

    free_keys, cover = covered_machines(staying, desired.grants, now)
    vm_prices = {pool.name: spec_price(pool.spec) for pool in desired.pools if not isinstance(pool.spec, TpuSpec)}
    free, paid, rate = 0, 0, Rate()
    for machine in desired.own(staying):
        is_free = _key(machine) in free_keys
        free, paid = free + is_free, paid + (not is_free)
        rate = rate if is_free else rate.plus(vm_prices.get(machine.pool or "", machine_price(machine)))
    for spec in (action.spec for action in actions if isinstance(action, Create)):
        is_free = isinstance(spec, TpuSpec) and cover.claim(spec)
        free, paid = free + is_free, paid + (not is_free)
        rate = rate if is_free else rate.plus(spec_price(spec))
    return Preview(tuple(steps), plan.waits, free, paid, rate)


def _successors(desired: Desired, own: Sequence[Machine], plan: Plan) -> Iterable[Create]:
    """Yield the creations of later plans that replace machines being deleted now."""
    deleted = [action.machine for action in plan.actions if isinstance(action, Delete)]
    keys = {_key(machine) for machine in deleted}
    for pool in desired.pools if desired.down is None else ():
        alive = [machine for machine in own if machine.pool == pool.name and machine.state != "dead"]
        staying = [machine for machine in alive if _key(machine) not in keys]
        created = sum(isinstance(action, Create) and action.spec.pool == pool.name for action in plan.actions)
        waiting = sum(wait.missing for wait in plan.waits if wait.pool == pool.name)
        missing = max(0, pool.count - len(staying) - created - waiting)
        for machine in [machine for machine in deleted if machine.pool == pool.name][:missing]:
            spec = replace(pool.spec, name=machine.name, zone=machine.zone)
            yield Create(spec, "after the old machine is deleted")


def _key(machine: Machine) -> tuple[str, str]:
    return machine.zone, machine.name


def _step_key(action: Action) -> tuple[object, ...]:
    if isinstance(action, Create):
        return "create", action.spec.pool, action.spec.zone
    return type(action).__name__, action.machine.pool, action.machine.zone, action.why


def _steps(group: Sequence[Action], project: str, cover: GrantCover) -> Iterable[PreviewStep]:
    specs = [action.spec for action in group if isinstance(action, Create)]
    covered = [isinstance(spec, TpuSpec) and cover.claim(spec) for spec in specs]
    for is_free in (True, False):
        if same := [spec for spec, free in zip(specs, covered, strict=True) if free == is_free]:
            yield _creation(same, is_free, project)
    machines = [action.machine for action in group if not isinstance(action, Create)]
    if not machines:
        return
    first = group[0]
    assert not isinstance(first, Create)
    machine = first.machine
    verb = {Delete: "delete", Stop: "stop", Start: "start", Grow: "grow the disk of"}[type(first)]
    if isinstance(first, Delete):
        command = gcloud.delete(machine, project)
    elif isinstance(first, Grow):
        command = gcloud.grow_disk(machine, first.disk_gib, project)
    else:
        command = gcloud.stop_or_start(machine, verb, project)
    names = [machine.name for machine in machines]
    says = f"{verb} {_times(len(machines))}{machine.type} in {machine.zone}: {_name_range(names)}; {first.why}"
    yield PreviewStep(says, "", _repeat(command, names))


def _creation(specs: list[Spec], free: bool, project: str) -> PreviewStep:
    spec, names = specs[0], [spec.name for spec in specs]
    kind, through = ("", f", {APIS[spec.api]}") if isinstance(spec, TpuSpec) else ("VM ", "")
    says = f"create {_times(len(specs))}{kind}{spec.type} ({spec.how}{through}) in {spec.zone}: {_name_range(names)}"
    rate = Rate()
    for one in specs:
        rate = rate.plus(spec_price(one))
    costs = "nothing: a grant covers " + ("it" if len(specs) == 1 else "them") if free else f"{rate.hour} an hour"
    return PreviewStep(says, costs, _repeat(gcloud.create(spec, project), names))


def _times(number: int) -> str:
    return "" if number == 1 else f"{number:,} × "


def _name_range(names: Sequence[str]) -> str:
    ordered = sorted(names, key=by_number)
    return ", ".join(ordered) if len(ordered) <= 3 else f"{ordered[0]} … {ordered[-1]}"


def _repeat(command: str, names: Sequence[str]) -> str:
    """Return a shell loop over machines whose names differ by number."""
    if len(names) == 1:
        return command
    stem = names[0].rpartition("-")[0]
    numbers = sorted(int(name.rpartition("-")[2]) for name in names)
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    items = f"{{{numbers[0]}..{numbers[-1]}}}" if is_range else " ".join(map(str, numbers))
    return f"for n in {items}; do {command.replace(names[0], f'{stem}-$n')}; done"

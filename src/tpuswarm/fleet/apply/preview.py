"""What is about to be done, as numbered steps with what they cost and the gcloud lines that do the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from tpuswarm.cloud.protocol import Listing, Machine, Spec, TpuSpec
from tpuswarm.fleet.apply import gcloud
from tpuswarm.fleet.decide.actions import Action, Create, Delete, Plan, Start, Stop, Wait
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.limits import is_billable
from tpuswarm.fleet.decide.money import GrantCover, Rate, covered_machines, machine_price, spec_price
from tpuswarm.fleet.decide.names import by_number


class PreviewStep(NamedTuple):
    """One line of a preview."""

    says: str
    costs: str
    """What it costs an hour; empty where it costs nothing more."""
    line: str
    """The gcloud line that does the same."""


@dataclass(frozen=True)
class Preview:
    """All of it."""

    steps: tuple[PreviewStep, ...]
    waits: tuple[Wait, ...]
    free: int
    """TPUs that grants pay for, afterwards."""
    paid: int
    """Machines that nobody else pays for, afterwards."""
    rate: Rate
    """What those cost an hour."""

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.steps)


def make_preview(desired: Desired, listing: Listing, plan: Plan, project: str, now: float) -> Preview:
    """Of a plan that was made from this listing."""
    steps: list[PreviewStep] = []
    ours = [each for each in listing.machines if each.fleet == desired.fleet]
    gone = {_key(each.machine) for each in plan.actions if isinstance(each, Delete)}
    stay = [each for each in listing.machines if is_billable(each) and _key(each) not in gone]
    _, cover = covered_machines(stay, desired.grants, now)
    actions = (*plan.actions, *_successors(desired, ours, plan))
    for _, group in groupby(actions, key=_alike):
        steps += _steps(list(group), project, cover)
    created = [each.spec for each in actions if isinstance(each, Create)]
    free, paid, rate = _bill(desired, [each for each in stay if each in ours], stay, created, now)
    return Preview(tuple(steps), plan.waits, free, paid, rate)


def _successors(desired: Desired, ours: Sequence[Machine], plan: Plan) -> Iterable[Create]:
    """What the plans after this one create in the place of machines that are deleted now."""
    deleted = [each.machine for each in plan.actions if isinstance(each, Delete)]
    gone = {_key(each) for each in deleted}
    for pool in desired.pools if desired.down is None else ():
        stay = [each for each in ours if each.pool == pool.name and each.state != "dead" and _key(each) not in gone]
        created = sum(isinstance(each, Create) and each.spec.pool == pool.name for each in plan.actions)
        paused = sum(
            of == pool.name and name not in {each.name for each in stay} for name, of in desired.paused.items()
        )
        waits = sum(each.missing for each in plan.waits if each.pool == pool.name)
        missing = max(0, pool.count - len(stay) - created - paused - waits)
        for each in [each for each in deleted if each.pool == pool.name][:missing]:
            yield Create(replace(pool.spec, name=each.name, zone=each.zone), "it comes when what was there is gone")


def _key(machine: Machine) -> tuple[str, str]:
    return machine.zone, machine.name


def _alike(action: Action) -> tuple[object, ...]:
    """What is said in one step."""
    if isinstance(action, Create):
        return "create", action.spec.pool, action.spec.zone
    return type(action).__name__, action.machine.pool, action.machine.zone, action.why


def _steps(group: Sequence[Action], project: str, cover: GrantCover) -> Iterable[PreviewStep]:
    if isinstance(group[0], Create):
        specs = [each.spec for each in group if isinstance(each, Create)]
        taken = [isinstance(each, TpuSpec) and cover.claim(each.type, each.zone, each.how) for each in specs]
        for free in (True, False):
            if some := [spec for spec, is_free in zip(specs, taken, strict=True) if is_free == free]:
                yield _creation(some, free, project)
        return
    machines = [each.machine for each in group if not isinstance(each, Create)]
    verb = {Delete: "delete", Stop: "stop", Start: "start"}[type(group[0])]
    one = machines[0]
    lines = gcloud.delete(one, project) if verb == "delete" else gcloud.stop_or_start(one, verb, project)
    yield PreviewStep(
        f"{verb} {_count(len(machines))}{one.type} in {one.zone}: {_names([each.name for each in machines])}; "
        f"{group[0].why}",
        "",
        _repeated(lines, [each.name for each in machines]),
    )


def _creation(specs: list[Spec], free: bool, project: str) -> PreviewStep:
    spec, names = specs[0], [each.name for each in specs]
    kind = "VM " if not isinstance(spec, TpuSpec) else ""
    says = f"create {_count(len(specs))}{kind}{spec.type} ({spec.how}) in {spec.zone}: {_names(names)}"
    rate = Rate()
    for each in specs:
        rate = rate.plus(spec_price(each))
    said = "nothing: a grant covers " + ("it" if len(specs) == 1 else "them") if free else f"{rate.hour} an hour"
    return PreviewStep(says, said, _repeated(gcloud.create(spec, project), names))


def _count(number: int) -> str:
    return "" if number == 1 else f"{number:,} × "


def _names(names: Sequence[str]) -> str:
    ordered = sorted(names, key=by_number)
    return ", ".join(ordered) if len(ordered) <= 3 else f"{ordered[0]} … {ordered[-1]}"


def _repeated(line: str, names: Sequence[str]) -> str:
    """For several machines whose names differ by their numbers: a loop of the shell."""
    if len(names) == 1:
        return line
    stem = names[0].rpartition("-")[0]
    numbers = sorted(int(each.rpartition("-")[2]) for each in names)
    row = numbers == list(range(numbers[0], numbers[-1] + 1))
    which = f"{{{numbers[0]}..{numbers[-1]}}}" if row else " ".join(map(str, numbers))
    return f"for n in {which}; do {line.replace(names[0], f'{stem}-$n')}; done"


def _bill(
    desired: Desired, ours: list[Machine], everything: list[Machine], created: list[Spec], now: float
) -> tuple[int, int, Rate]:
    """Free TPUs, paid machines, and what those cost, when all of it is there."""
    free, cover = covered_machines(everything, desired.grants, now)
    disks = {pool.name: spec_price(pool.spec) for pool in desired.pools if not isinstance(pool.spec, TpuSpec)}
    count_free, count_paid, rate = 0, 0, Rate()
    for machine in ours:
        if _key(machine) in free:
            count_free += 1
        else:
            count_paid += 1
            rate = rate.plus(disks.get(machine.pool or "", machine_price(machine)))
    for spec in created:
        if isinstance(spec, TpuSpec) and cover.claim(spec.type, spec.zone, spec.how):
            count_free += 1
        else:
            count_paid += 1
            rate = rate.plus(spec_price(spec))
    return count_free, count_paid, rate

"""Which workers of a fleet a person means by WHERE: values in, values out."""

from collections.abc import Collection
from typing import NamedTuple

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import ALL, by_number, resolve_name, short_zone


class Target(NamedTuple):
    """A worker of a machine."""

    machine: Machine
    worker: int

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.machine.name}/{self.worker}"

    @property
    def internal(self) -> str:
        """Its address within the network; it has one once it can be reached."""
        return self.machine.workers[self.worker].internal or ""

    @property
    def alias(self) -> str:
        """Its name in `known_hosts`: made again, it has another one."""
        return f"{self.machine.name}.{self.worker}.{self.machine.zone}.{self.machine.created * 1000:.0f}"


class Selection(NamedTuple):
    """What a word means."""

    targets: tuple[Target, ...]
    away: tuple[str, ...]
    """Machines that are meant too and cannot be reached now, and zones that do not answer: NAME and why."""
    group: bool = False
    """Whether it means however many machines there are: a pool, or all."""


def find_targets(text: str, desired: Desired, listing: Listing) -> Selection:
    """As `find_meant`. Raises InputError too where nothing of it can be reached."""
    found = select_targets(text, desired, listing)
    if found.targets:
        return found
    there = "; ".join(found.away[:6]) or "there is none"
    if not found.group:
        keeper = "`tpuswarm up`, or a keeper, replaces what is lost and deletes what is of no pool"
        raise InputError(f"{there}: `tpuswarm list` shows it; {keeper}")
    raise InputError(f"no machine of {'the fleet' if text == ALL else f'pool {text}'} can be reached: {there}")


def select_targets(text: str, desired: Desired, listing: Listing, gone: Collection[str] = ()) -> Selection:
    """The workers that NAME, NAME/2, POOL or `all` means; a machine also by its number or a beginning.

    gone: names of machines that were there once. Raises InputError for what there never was, with the nearest name.
    """
    ours = {each.name: each for each in listing.machines if each.fleet == desired.fleet}
    pools = {each.name: each for each in desired.pools}
    if text == ALL or (text in pools and text not in ours):
        zones = desired.zones if text == ALL else pools[text].zones
        meant = sorted(ours.values(), key=lambda each: by_number(each.name))
        meant = [each for each in meant if text in (ALL, each.pool)]
        away = [f"{each.name} {why}" for each in meant if (why := unreachable_reason(each, pools))]
        away += [
            f"{zone} does not answer: which machines are there nobody knows"
            for zone in zones if zone in listing.unreachable
        ]  # fmt: skip
        ready = (each for each in meant if unreachable_reason(each, pools) is None)
        return Selection(tuple(target for each in ready for target in list_workers(each)), tuple(away), group=True)
    name, slash, number = text.partition("/")
    if slash and name in (ALL, *pools) and name not in ours:
        of = ", ".join(sorted((each for each in ours if name in (ALL, ours[each].pool)), key=by_number)[:6])
        what = "means all machines" if name == ALL else "is a pool"
        raise InputError(f"{name} {what}, and a worker is one of a machine: name one" + (f" of {of}" if of else ""))
    try:
        machine = ours[resolve_name(name, ours, () if slash else (*pools, ALL))]
    except InputError:
        if why := _lost(name, desired, listing, gone):
            return Selection((), (why,))
        if other := next((each for each in listing.machines if each.name == name), None):
            raise InputError(_strange(other)) from None
        raise
    if why := unreachable_reason(machine, pools):
        return Selection((), (f"{machine.name} {why}",))
    found = list_workers(machine)
    if not slash:
        return Selection(found, ())
    if not number.isdecimal() or int(number) >= len(found):
        known = f"{machine.name}/0" + (f" to {machine.name}/{len(found) - 1}" if len(found) > 1 else "")
        raise InputError(f"{machine.name} has no worker {number!r}: it has {len(found)}, {known}")
    return Selection((found[int(number)],), ())


def list_workers(machine: Machine) -> tuple[Target, ...]:
    """All of them."""
    return tuple(Target(machine, number) for number in range(len(machine.workers)))


def unreachable_reason(machine: Machine, pools: Collection[str]) -> str | None:
    """Why a machine cannot be reached; None: it can. pools: those that are wanted."""
    if machine.state != "ready":
        return f"is {machine.said.lower()}, not ready"
    if not machine.workers or any(not each.internal for each in machine.workers):
        return "has no address yet"
    if machine.pool not in pools:
        return "is of no pool of the fleet any more"
    return None


def _strange(machine: Machine) -> str:
    """Of a machine that is not of the fleet: whose it is, and the way to it."""
    if machine.fleet is None:
        return f"{machine.name} in {machine.zone} was made by hand, and is of no fleet: gcloud leads to it"
    return (
        f"{machine.name} is of another fleet, {machine.fleet}: give the command beside the swarm.toml of that one; if "
        f"it is lost, `tpuswarm down --orphans {machine.fleet}` deletes its machines"
    )


def _lost(name: str, desired: Desired, listing: Listing, gone: Collection[str]) -> str | None:
    """Of a machine that is not listed: its name, and why; None: there never was one."""
    for zone in desired.zones:
        if zone in listing.unreachable and short_zone(zone) in name.split("-"):
            return f"{name} is not seen: {zone} does not answer"
    try:
        return f"{resolve_name(name, gone)} is gone: the cloud does not list it any more"
    except InputError:
        return None

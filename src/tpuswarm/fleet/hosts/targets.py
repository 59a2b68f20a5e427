"""Find the workers that a user means by WHERE."""

from collections.abc import Collection
from typing import NamedTuple

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import ALL, by_number, resolve_name, short_zone


class Target(NamedTuple):
    machine: Machine
    worker: int

    @property
    def label(self) -> str:
        return f"{self.machine.name}/{self.worker}"

    @property
    def internal(self) -> str:
        return self.machine.workers[self.worker].internal or ""

    @property
    def alias(self) -> str:
        """The name in `known_hosts`; a machine that is created again gets another one."""
        return f"{self.machine.name}.{self.worker}.{self.machine.zone}.{self.machine.created * 1000:.0f}"

    @property
    def exports(self) -> str:
        """Shell code that exports a worker's number in its slice, and the addresses of all workers.

        JAX and libtpu read the same from the metadata server (agent-worker-number, worker-network-endpoints).
        """
        addresses = [worker.internal for worker in self.machine.workers if worker.internal]
        if len(addresses) < 2 or len(addresses) < len(self.machine.workers):
            return ""
        return f"export TPU_WORKER_ID={self.worker} TPU_WORKER_HOSTNAMES={','.join(addresses)}; "


class Selection(NamedTuple):
    targets: tuple[Target, ...]
    away: tuple[str, ...]
    """NAME and why: machines that cannot be reached, and zones that do not answer."""
    group: bool = False


def find_targets(text: str, desired: Desired, listing: Listing) -> Selection:
    """Select targets as `select_targets` does. Raise InputError if none can be reached."""
    selection = select_targets(text, desired, listing)
    if selection.targets:
        return selection
    why = "; ".join(selection.away[:6]) or "there is none"
    if not selection.group:
        keeper = "`tpuswarm up`, or a keeper, replaces lost machines and deletes those without a pool"
        raise InputError(f"{why}: `tpuswarm list` shows it; {keeper}")
    raise InputError(f"no machine of {'the fleet' if text == ALL else f'pool {text}'} can be reached: {why}")


def select_targets(text: str, desired: Desired, listing: Listing, past_names: Collection[str] = ()) -> Selection:
    """Select workers by NAME, NAME/2, POOL or `all`; a machine also by its number or a unique beginning.

    `past_names`: machines that existed once. Raise InputError for an unknown name, and suggest the nearest.
    """
    own = {machine.name: machine for machine in desired.own(listing.machines)}
    pools = {pool.name: pool for pool in desired.pools}
    if text == ALL or (text in pools and text not in own):
        return _select_group(text, desired, listing)
    name, slash, number = text.partition("/")
    if slash and name in (ALL, *pools) and name not in own:
        members = [machine.name for machine in own.values() if name in (ALL, machine.pool)]
        examples = ", ".join(sorted(members, key=by_number)[:6])
        what = "means all machines" if name == ALL else "is a pool"
        one_of = f" of {examples}" if examples else ""
        raise InputError(f"{name} {what}, but a worker belongs to one machine: name one{one_of}")
    try:
        machine = own[resolve_name(name, own, () if slash else (*pools, ALL))]
    except InputError:
        if why := _reason_unlisted(name, desired, listing, past_names):
            return Selection((), (why,))
        if other := next((machine for machine in listing.machines if machine.name == name), None):
            raise InputError(_describe_foreign(other)) from None
        raise
    if reason := unreachable_reason(machine, pools):
        return Selection((), (f"{machine.name} {reason}",))
    targets = list_workers(machine)
    if not slash:
        return Selection(targets, ())
    if not number.isdecimal() or int(number) >= len(targets):
        names = f"{machine.name}/0" + (f" to {machine.name}/{len(targets) - 1}" if len(targets) > 1 else "")
        raise InputError(f"{machine.name} has no worker {number!r}: it has {len(targets)}, {names}")
    return Selection((targets[int(number)],), ())


def _select_group(text: str, desired: Desired, listing: Listing) -> Selection:
    pools = {pool.name: pool for pool in desired.pools}
    zones = desired.zones if text == ALL else pools[text].zones
    own = [machine for machine in desired.own(listing.machines) if text in (ALL, machine.pool)]
    targets: list[Target] = []
    away = []
    for machine in sorted(own, key=lambda machine: by_number(machine.name)):
        if reason := unreachable_reason(machine, pools):
            away.append(f"{machine.name} {reason}")
        else:
            targets += list_workers(machine)
    unknown = [f"{zone} does not answer: its machines are unknown" for zone in zones if zone in listing.unreachable]
    return Selection(tuple(targets), (*away, *unknown), group=True)


def list_workers(machine: Machine) -> tuple[Target, ...]:
    return tuple(Target(machine, number) for number in range(len(machine.workers)))


def unreachable_reason(machine: Machine, pools: Collection[str]) -> str | None:
    """Return why a machine cannot be reached, as `is creating, not ready`; None if it can."""
    if machine.state != "ready":
        return f"is {machine.state_word}, not ready"
    if not machine.workers or any(not worker.internal for worker in machine.workers):
        return "has no address yet"
    if machine.pool not in pools:
        return "has no pool in the fleet now"
    return None


def _describe_foreign(machine: Machine) -> str:
    if machine.fleet is None:
        return f"{machine.name} in {machine.zone} was made by hand and belongs to no fleet: use gcloud"
    return (
        f"{machine.name} belongs to another fleet, {machine.fleet}: run the command beside that fleet's swarm.toml; if "
        f"the file is lost, `tpuswarm down --orphans {machine.fleet}` deletes its machines"
    )


def _reason_unlisted(name: str, desired: Desired, listing: Listing, past_names: Collection[str]) -> str | None:
    """Return why a machine is not listed; None if there never was one."""
    for zone in desired.zones:
        if zone in listing.unreachable and short_zone(zone) in name.split("-"):
            return f"{name} is unknown: {zone} does not answer"
    try:
        return f"{resolve_name(name, past_names)} is gone: the cloud does not list it now"
    except InputError:
        return None

"""The way to the hosts that a person means by WHERE: address, host keys, our key."""

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.keys import key_file, make_key, public_key
from tpuswarm.cloud.protocol import Listing, Machine, Provider, VmSpec
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.hosts.ssh_config import refresh_config
from tpuswarm.fleet.hosts.targets import (
    Selection,
    Target,
    find_targets,
    list_workers,
    select_targets,
    unreachable_reason,
)
from tpuswarm.fleet.spec.desired_from_file import SSH_KEYS, add_ssh_key, login_user
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import Fleet, Store
from tpuswarm.fleet.store.machine_flags import machine_exports
from tpuswarm.remote.host import Host
from tpuswarm.remote.known import Known
from tpuswarm.remote.openssh import openssh
from tpuswarm.train.process.atomic import write_atomically

HOST_KEYS_PATH = "hostkeys/"
"""Where a machine writes down its SSH host keys."""
PRODUCT_NAME_FILE = Path("/sys/class/dmi/id/product_name")
"""Says `Google Compute Engine` on a computer that is one."""
METADATA_TIMEOUT_S = 60.0
"""Seconds in which a machine's metadata should have changed."""
MAX_THREADS = 16


class ReachableHosts(NamedTuple):
    """The way to what a word means."""

    hosts: list[Host]
    away: tuple[str, ...]
    group: bool
    machines: Mapping[str, Machine]
    """Of each host, by its label."""


@dataclass(frozen=True)
class Snapshot:
    """A fleet as it was looked at once."""

    document: Document
    listing: Listing


class AdmittedMachines:
    """Which machines know this computer's key, where it came to the fleet later: a file of this computer."""

    def __init__(self, file: Path):
        self._file = file

    def begin(self) -> None:
        """From now on new machines know it, and all others have to be told."""
        self._write(time.time(), [])

    def lacks(self, machine: Machine) -> bool:
        """Whether it was made before the key came, and not told since."""
        since, told = self._read()
        return machine.created < since + METADATA_TIMEOUT_S and _id(machine) not in told

    def add(self, machines: Iterable[Machine]) -> None:
        """They were told."""
        since, told = self._read()
        self._write(since, [*told, *map(_id, machines)])

    def _read(self) -> tuple[float, list[str]]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return -METADATA_TIMEOUT_S, []  # the key has been there as long as the fleet
        return found["since"], found["told"]

    def _write(self, since: float, told: list[str]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps({"since": since, "told": told}))


def _id(machine: Machine) -> str:
    return f"{machine.name}.{machine.zone}.{machine.created * 1000:.0f}"


class Routes:
    """The way to the machines of one fleet, from this computer."""

    def __init__(self, fleet: Fleet, cloud: Provider, store: Store):
        self.fleet, self._cloud, self._store = fleet, cloud, store
        self.known = Known(fleet.folder / "known_hosts")
        self._inside = fleet.provider_name == "rehearsal" or _is_google_vm()

    @property
    def key(self) -> Path:
        """The file of this computer's private key."""
        return key_file()

    def snapshot(self) -> Snapshot:
        """The fleet now. Raises InputError where there is none."""
        document = self._store.load()
        if document is None:
            raise InputError(
                f"there is no fleet {self.fleet.name} in project {self._cloud.project}: `tpuswarm up` makes it"
            )
        listing = self._cloud.machines(document.zones)
        seen = Snapshot(self._admit(document, listing), listing)
        self.follow(seen)
        return seen

    def follow(self, seen: Snapshot) -> None:
        """Tell OpenSSH which hosts there are, where it is told at all."""
        if not seen.listing.unreachable:
            refresh_config(self.fleet, self.key, self.users(seen))

    def users(self, seen: Snapshot) -> dict[str, str]:
        """All hosts that can be reached by what they are called, and as which user."""
        pools = {each.name: each for each in seen.document.desired.pools}
        ours = (each for each in seen.listing.machines if each.fleet == seen.document.desired.fleet)
        return {
            target.label: login_user(pool)
            for machine in sorted(ours, key=lambda each: by_number(each.name))
            if unreachable_reason(machine, pools) is None and (pool := pools.get(machine.pool or "")) is not None
            for target in list_workers(machine)
        }

    def hosts(self, where: str) -> tuple[list[Host], tuple[str, ...]]:
        """Those that `where` means, now; and which machines are meant too and away."""
        return self.find(where)[:2]

    def find(self, where: str) -> ReachableHosts:
        """The same, and whether `where` means a group."""
        seen = self.snapshot()
        found = find_targets(where, seen.document.desired, seen.listing)
        reached = self._reached(seen, found)
        if not reached.hosts:
            raise InputError(reached.away[len(found.away)])
        return reached

    def find_listed(self, where: str, seen: Snapshot) -> ReachableHosts:
        """The same of what was looked at, where nothing of it need be reached, or be there still."""
        once = {each.machine for each in seen.document.events} - {""}
        return self._reached(seen, select_targets(where, seen.document.desired, seen.listing, once))

    def _reached(self, seen: Snapshot, found: Selection) -> ReachableHosts:
        hosts, keyless = self._ways(seen, found.targets)
        machines = {each.label: each.machine for each in found.targets}
        return ReachableHosts(hosts, (*found.away, *map(_no_keys, keyless)), found.group, machines)

    def route_to(self, seen: Snapshot, targets: Iterable[Target]) -> list[Host]:
        """The way to each. Raises InputError for a machine of no pool, or that has not written down its host keys."""
        hosts, keyless = self._ways(seen, targets)
        if keyless:
            raise InputError(_no_keys(keyless[0]))
        return hosts

    def _ways(self, seen: Snapshot, targets: Iterable[Target]) -> tuple[list[Host], list[Target]]:
        """The way to each that has written down its host keys; and those that have not."""
        targets = list(targets)
        desired = seen.document.desired
        pools = {each.name: each for each in desired.pools}
        jump = None if self._inside else self._jump(seen, targets)
        keys = self._host_keys(seen, targets)
        hosts = []
        for target in targets:
            if target.alias not in keys:
                continue
            pool = pools.get(target.machine.pool or "")
            if pool is None:
                raise InputError(f"{target.machine.name} is of no pool of the fleet any more")
            worker = target.machine.workers[target.worker]
            outside = None if self._inside else worker.external
            proxy = None
            if not self._inside and outside is None:
                proxy = self._proxy(target, jump)
            hosts.append(
                Host(
                    target.label, outside or worker.internal or "", self._port, login_user(pool), target.alias,
                    keys[target.alias], self.known.path, proxy, machine_exports(seen.document, target.machine),
                )
            )  # fmt: skip
        return hosts, [each for each in targets if each.alias not in keys]

    @property
    def _port(self) -> int:
        if self.fleet.provider_name == "rehearsal":
            from tpuswarm.cloud.rehearsal.machines.root import SSH_PORT

            return SSH_PORT
        return 22

    # Keys.

    def accepts_own_key(self, document: Document) -> bool:
        """Whether this computer's key may log in on all machines; `look` sees to it."""
        mine = public_key()
        return mine is not None and all(add_ssh_key(each, mine) is each for each in document.desired.pools)

    def _admit(self, document: Document, listing: Listing) -> Document:
        """See to it that this computer's key may log in on all machines, now and later.

        Which were told is noted: what was cut short goes on with the next command, and what was being created is told
        when it is ready.
        """
        make_key()
        mine = public_key()
        assert mine is not None

        def add(found: Document | None) -> Document:
            if found is None:
                raise InputError(f"{self._store.where} is gone: somebody has deleted it")
            pools = tuple(add_ssh_key(each, mine) for each in found.desired.pools)
            return replace(found, desired=replace(found.desired, pools=pools))

        admitted = AdmittedMachines(self.fleet.folder / "admitted.json")
        if not self.accepts_own_key(document):
            admitted.begin()
            document = self._store.change(add)
        lines = {each.name: each.spec.metadata[SSH_KEYS] for each in document.desired.pools}
        ours = [each for each in listing.machines if each.fleet == document.desired.fleet and each.state == "ready"]
        if untold := [each for each in ours if admitted.lacks(each)]:
            with ThreadPoolExecutor(MAX_THREADS) as pool:
                done = list(pool.map(lambda each: self._tell(each, lines.get(each.pool or "")), untold))
            admitted.add(each for each, told in zip(untold, done, strict=True) if told)
        return document

    def _tell(self, machine: Machine, keys: str | None) -> bool:
        """Whether it was told. One that was not refuses our key, and that is said of it; the others are reached."""
        if keys is None:
            return True
        try:
            self.set_metadata(machine, {SSH_KEYS: keys})
        except (CloudError, RunFailed):
            return False
        return True

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> None:
        """Set keys of a machine's metadata, and wait until they are. Raises CloudError, RunFailed."""
        operation = self._cloud.set_metadata(machine, metadata)
        end = time.monotonic() + METADATA_TIMEOUT_S
        while not (outcome := self._cloud.outcome(operation)).done:
            if time.monotonic() > end:
                raise RunFailed(f"the metadata of {machine.name} has not changed after {METADATA_TIMEOUT_S:g} s")
            time.sleep(0.2)
        if outcome.error is not None:
            raise outcome.error

    def _host_keys(self, seen: Snapshot, targets: Iterable[Target]) -> Mapping[str, tuple[str, ...]]:
        """The host keys by alias: those that are known, else those that a machine has written down, if it has."""
        targets = list(targets)
        known = self.known.keys()
        new = [each for each in targets if each.alias not in known]
        if not new:
            return known
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            read = list(
                pool.map(lambda each: self._cloud.guest_attributes(each.machine, each.worker, HOST_KEYS_PATH), new)
            )
        lines = {
            target.alias: [f"{kind} {value}" for kind, value in found.items()]
            for target, found in zip(new, read, strict=True)
            if found
        }
        ours = (each for each in seen.listing.machines if each.fleet == seen.document.desired.fleet)
        keep = None if seen.listing.unreachable else {to.alias for each in ours for to in list_workers(each)}
        return self.known.add(lines, keep)

    # From outside of the machines' network.

    def _jump(self, seen: Snapshot, targets: Iterable[Target]) -> Host | None:
        """A VM of the fleet by which machines without an external address are reached, if one is needed and there."""
        if all(each.machine.workers[each.worker].external for each in targets):
            return None
        vms = {each.name for each in seen.document.desired.pools if isinstance(each.spec, VmSpec)}
        for each in seen.listing.machines:
            fits = (
                each.fleet == seen.document.desired.fleet and each.pool in vms and unreachable_reason(each, vms) is None
            )
            if fits and each.workers[0].external:
                return self.route_to(seen, [Target(each, 0)])[0]
        return None

    def _proxy(self, target: Target, jump: Host | None) -> str:
        """The command that leads to a machine without an external address: through a VM of the fleet, else IAP."""
        machine = target.machine
        if jump is not None:
            return shlex.join([*openssh(jump, self.key), "-W", "%h:%p", f"{jump.user}@{jump.address}"])
        if machine.kind == "vm":
            return shlex.join(
                ["gcloud", "compute", "start-iap-tunnel", machine.name, "%p", "--listen-on-stdin", "--zone",
                 machine.zone, "--project", self._cloud.project]
            )  # fmt: skip
        raise InputError(
            f"{machine.name} has no external address, and the fleet no [[vm]] or [head] with one by which it could be "
            "reached: add one, or give the command on such a machine"
        )


def _no_keys(target: Target) -> str:
    return (
        f"{target.label} has not written down its SSH host key yet, and without it nobody knows whether it is that "
        "machine: a new one needs a minute; enable-guest-attributes in its metadata must stay TRUE"
    )


def open_routes(fleet: Fleet) -> Routes:
    """The way to a fleet's machines; asks nobody yet."""
    cloud = fleet.provider()
    return Routes(fleet, cloud, fleet.store(cloud))


def _is_google_vm() -> bool:
    try:
        return PRODUCT_NAME_FILE.read_text().strip() == "Google Compute Engine"
    except OSError:
        return False

"""Find how to reach the hosts that a user names: address, SSH host keys, this computer's key."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import SSH_KEYS, Listing, Machine, Provider, VmSpec
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
from tpuswarm.fleet.spec.desired_from_file import add_ssh_key, login_user
from tpuswarm.fleet.store.document import Document, DocumentStore
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.fleet.store.machine_flags import WHOLE_POD_EXPORT, has_tf_pod, machine_exports
from tpuswarm.remote.host import Host, openssh_command
from tpuswarm.remote.known_hosts import KnownHosts
from tpuswarm.remote.own_key import key_file, make_key, public_key
from tpuswarm.train.process.atomic import write_atomically

HOST_KEYS_PATH = "hostkeys/"
PRODUCT_NAME_FILE = Path("/sys/class/dmi/id/product_name")
METADATA_TIMEOUT_S = 60.0
MAX_THREADS = 16


class NoHostKey(InputError):
    """A machine has not published its SSH host key."""


class ReachableHosts(NamedTuple):
    hosts: list[Host]
    away: tuple[str, ...]
    """Why other machines and zones cannot be reached."""
    group: bool
    machines: Mapping[str, Machine]


@dataclass(frozen=True)
class Snapshot:
    document: Document
    listing: Listing

    @property
    def own_machines(self) -> list[Machine]:
        return self.document.desired.own(self.listing.machines)


class AdmittedMachines:
    """Remembers which older machines know this computer's key, if the key joined the fleet later."""

    def __init__(self, file: Path):
        self._file = file

    def reset(self) -> None:
        """Note that from now on new machines know the key, and existing ones do not."""
        self._write(time.time(), [])

    def lacks(self, machine: Machine) -> bool:
        """Whether the machine existed before the key and has not received it."""
        since, admitted = self._read()
        return machine.created < since + METADATA_TIMEOUT_S and _machine_id(machine) not in admitted

    def add(self, machines: Iterable[Machine]) -> None:
        since, admitted = self._read()
        self._write(since, [*admitted, *map(_machine_id, machines)])

    def _read(self) -> tuple[float, list[str]]:
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return -METADATA_TIMEOUT_S, []  # the key is as old as the fleet
        return stored["since"], stored["told"]

    def _write(self, since: float, admitted: list[str]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps({"since": since, "told": admitted}), is_shared=True)


def _machine_id(machine: Machine) -> str:
    return f"{machine.name}.{machine.zone}.{machine.created * 1000:.0f}"


class Routes:
    def __init__(self, fleet: Fleet, cloud: Provider, store: DocumentStore):
        self.fleet, self._cloud, self._store = fleet, cloud, store
        self.known = KnownHosts(fleet.folder / "known_hosts")
        self._in_network = fleet.provider_name == "rehearsal" or _is_google_vm()

    @property
    def key(self) -> Path:
        return key_file()

    def snapshot(self) -> Snapshot:
        """Load the document, list the machines and admit this computer's key. Raise InputError without a fleet."""
        document = self._store.load()
        if document is None:
            raise InputError(
                f"there is no fleet {self.fleet.name} in project {self._cloud.project}: `tpuswarm up` makes it"
            )
        listing = self._cloud.machines(document.zones)
        snapshot = Snapshot(self._admit_key(document, listing), listing)
        self.refresh_ssh_config(snapshot)
        return snapshot

    def refresh_ssh_config(self, snapshot: Snapshot) -> None:
        """Update the OpenSSH configuration of this fleet, if the user has one."""
        if not snapshot.listing.unreachable:
            refresh_config(self.fleet, self.key, self.users(snapshot))

    def users(self, snapshot: Snapshot) -> dict[str, str]:
        pools = {pool.name: pool for pool in snapshot.document.desired.pools}
        return {
            target.label: login_user(pools[machine.pool or ""])
            for machine in sorted(snapshot.own_machines, key=lambda machine: by_number(machine.name))
            if unreachable_reason(machine, pools) is None
            for target in list_workers(machine)
        }

    def hosts(self, where: str) -> tuple[list[Host], tuple[str, ...]]:
        """Find the hosts that `where` means, and why others cannot be reached."""
        return self.find(where)[:2]

    def find(self, where: str) -> ReachableHosts:
        """Find the hosts that `where` means. Raise InputError if none can be reached."""
        snapshot = self.snapshot()
        selection = find_targets(where, snapshot.document.desired, snapshot.listing)
        found = self._reachable(snapshot, selection)
        if not found.hosts:
            raise InputError(found.away[len(selection.away)])
        return found

    def find_listed(self, where: str, snapshot: Snapshot) -> ReachableHosts:
        """Find hosts in a snapshot, including past and unreachable ones."""
        past_names = {event.machine for event in snapshot.document.events} - {""}
        selection = select_targets(where, snapshot.document.desired, snapshot.listing, past_names)
        return self._reachable(snapshot, selection)

    def _reachable(self, snapshot: Snapshot, selection: Selection) -> ReachableHosts:
        hosts, without_keys = self._route_to(snapshot, selection.targets)
        machines = {target.label: target.machine for target in selection.targets}
        return ReachableHosts(hosts, (*selection.away, *map(_no_host_key, without_keys)), selection.group, machines)

    def route_to(self, snapshot: Snapshot, targets: Sequence[Target]) -> list[Host]:
        """Return the hosts. Raise NoHostKey, or InputError if a machine has no pool."""
        hosts, without_keys = self._route_to(snapshot, targets)
        if without_keys:
            raise NoHostKey(_no_host_key(without_keys[0]))
        return hosts

    def _route_to(self, snapshot: Snapshot, targets: Sequence[Target]) -> tuple[list[Host], list[Target]]:
        """Return the hosts that have published their host keys, and the targets that have not."""
        pools = {pool.name: pool for pool in snapshot.document.desired.pools}
        jump = None if self._in_network else self._find_jump_host(snapshot, targets)
        keys = self._host_keys(snapshot, targets)
        hosts = []
        workers = Counter(target.machine.name for target in targets)
        for target in targets:
            if target.alias not in keys:
                continue
            pool = pools.get(target.machine.pool or "")
            if pool is None:
                raise InputError(f"the fleet has no pool for {target.machine.name} now")
            worker = target.machine.workers[target.worker]
            external = None if self._in_network else worker.external
            proxy = None if self._in_network or external else self._proxy_command(target, jump)
            leads_pod = target.worker == 0 and workers[target.machine.name] == 1 and has_tf_pod(target.machine)
            exports = machine_exports(snapshot.document, target.machine) + target.exports
            hosts.append(
                Host(
                    target.label, external or worker.internal or "", self._port, login_user(pool), target.alias,
                    keys[target.alias], self.known.path, proxy,
                    exports + WHOLE_POD_EXPORT * leads_pod,
                )
            )  # fmt: skip
        return hosts, [target for target in targets if target.alias not in keys]

    @property
    def _port(self) -> int:
        if self.fleet.provider_name == "rehearsal":
            from tpuswarm.cloud.rehearsal.machines.root import SSH_PORT

            return SSH_PORT
        return 22

    # Keys.

    def accepts_own_key(self, document: Document) -> bool:
        """Whether this computer's key may log in on all machines; `snapshot` admits it."""
        key = public_key()
        return key is not None and all(add_ssh_key(pool, key) is pool for pool in document.desired.pools)

    def note_new_key(self, document: Document) -> None:
        """Before a change stores this computer's key: note that existing machines do not know it."""
        if not self.accepts_own_key(document):
            self._admitted.reset()

    @property
    def _admitted(self) -> AdmittedMachines:
        return AdmittedMachines(self.fleet.folder / "admitted.json")

    def _admit_key(self, document: Document, listing: Listing) -> Document:
        """Let this computer's key log in on all machines, now and later.

        Admitted machines are recorded: an interrupted command continues the next time, and a machine that was being
        created receives the key when it is ready.
        """
        key = make_key()

        def add_key(found: Document | None) -> Document:
            if found is None:
                raise InputError(f"{self._store.where} was deleted")
            pools = tuple(add_ssh_key(pool, key) for pool in found.desired.pools)
            return replace(found, desired=replace(found.desired, pools=pools))

        admitted = self._admitted
        if not self.accepts_own_key(document):
            self.note_new_key(document)
            document = self._store.change(add_key)
        ready = [machine for machine in document.desired.own(listing.machines) if machine.state == "ready"]
        if lacking := [machine for machine in ready if admitted.lacks(machine)]:
            document = self._store.load() or document  # another computer may have added its key since
            keys = {pool.name: pool.spec.metadata.get(SSH_KEYS) for pool in document.desired.pools}
            with ThreadPoolExecutor(MAX_THREADS) as threads:
                results = threads.map(lambda machine: self._add_key(machine, keys.get(machine.pool or "")), lacking)
                admitted.add([machine for machine, added in zip(lacking, results, strict=True) if added])
        return document

    def _add_key(self, machine: Machine, keys: str | None) -> bool:
        """Replace the keys of the fleet's user; return whether the machine took them, else its login says why not."""
        if keys is None:
            return True
        try:
            user, _, _ = keys.strip().partition(":")
            own = (machine.metadata or {}).get(SSH_KEYS, "").splitlines()
            others = [line for line in own if line.strip().partition(":")[0] != user]
            lines = dict.fromkeys((*others, *keys.splitlines()))
            self.set_metadata(machine, {SSH_KEYS: "\n".join(lines)})
        except (CloudError, RunFailed):
            return False
        return True

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> None:
        """Set metadata of a machine and wait until it is set. Raise CloudError or RunFailed."""
        operation = self._cloud.set_metadata(machine, metadata)
        deadline = time.monotonic() + METADATA_TIMEOUT_S
        while not (outcome := self._cloud.outcome(operation)).done:
            if time.monotonic() > deadline:
                raise RunFailed(f"the metadata of {machine.name} has not changed after {METADATA_TIMEOUT_S:g} s")
            time.sleep(0.2)
        if outcome.error is not None:
            raise outcome.error

    def _host_keys(self, snapshot: Snapshot, targets: Sequence[Target]) -> Mapping[str, tuple[str, ...]]:
        """Return host keys by alias; read unknown ones from the machines' guest attributes."""
        known = self.known.keys()
        new = [target for target in targets if target.alias not in known]
        if not new:
            return known
        with ThreadPoolExecutor(MAX_THREADS) as threads:
            published = list(
                threads.map(lambda to: self._cloud.guest_attributes(to.machine, to.worker, HOST_KEYS_PATH), new)
            )
        keys = {
            target.alias: [f"{kind} {value}" for kind, value in attributes.items()]
            for target, attributes in zip(new, published, strict=True)
            if attributes
        }
        listed = {target.alias for machine in snapshot.own_machines for target in list_workers(machine)}
        return self.known.add(keys, None if snapshot.listing.unreachable else listed)

    # From outside the machines' network.

    def _find_jump_host(self, snapshot: Snapshot, targets: Sequence[Target]) -> Host | None:
        """Return a VM of the fleet that leads to machines without an external address, if one is needed."""
        if all(target.machine.workers[target.worker].external for target in targets):
            return None
        vms = {pool.name for pool in snapshot.document.desired.pools if isinstance(pool.spec, VmSpec)}
        for machine in snapshot.own_machines:
            is_reachable = machine.pool in vms and unreachable_reason(machine, vms) is None
            if is_reachable and machine.workers[0].external:
                return self.route_to(snapshot, [Target(machine, 0)])[0]
        return None

    def _proxy_command(self, target: Target, jump: Host | None) -> str:
        """Return the command that connects to a machine without an external address."""
        machine = target.machine
        if jump is not None:
            return shlex.join([*openssh_command(jump, self.key), "-W", "%h:%p", f"{jump.user}@{jump.address}"])
        if machine.is_instance:
            return shlex.join(
                ["gcloud", "compute", "start-iap-tunnel", machine.name, "%p", "--listen-on-stdin", "--zone",
                 machine.zone, "--project", self._cloud.project]
            )  # fmt: skip
        raise InputError(
            f"{machine.name} has no external address, and no [[vm]] or [head] of the fleet has one to reach it "
            "through: add one, or run the command on such a machine"
        )


def _no_host_key(target: Target) -> str:
    return (
        f"{target.label} has not published its SSH host key yet, so its identity cannot be checked: a new machine "
        "needs a minute; enable-guest-attributes in its metadata must stay TRUE"
    )


def open_routes(fleet: Fleet) -> Routes:
    """Open the routes to a fleet; contacts nothing yet."""
    cloud = fleet.provider()
    return Routes(fleet, cloud, fleet.store(cloud))


def _is_google_vm() -> bool:
    try:
        return PRODUCT_NAME_FILE.read_text().strip() == "Google Compute Engine"
    except OSError:
        return False

"""The cloud's record of its hosts: addresses, boots, power. The package `machines` runs their processes."""

import json
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.records import Records, Table, to_json
from tpuswarm.cloud.rehearsal.common.timetable import Timetable

SHORTEST_BOOT_S, LONGEST_BOOT_S = 20, 40
"""From the cloud's READY to the host key and SSH."""


@dataclass
class RehearsedHost:
    """One VM: a TPU's worker, or a plain VM."""

    id: str
    """Names its folder, stands in the environment of its processes, and is never used again."""
    owner: str
    """The path of the node or instance that it belongs to."""
    number: int
    """Its worker number."""
    internal: str
    external: str | None
    chips: int = 0
    devices: int = 0
    """JAX devices of its chips."""
    vfio: bool = False
    """Whether its chips are files /dev/vfio/N instead of /dev/accelN."""
    type: str = ""
    """The slice's type in the TPU API."""
    boot: int = 1
    """How many times it has started."""
    on: bool = True
    has_booted: bool = True
    """Whether it has published its host key and accepts SSH connections."""
    leaving: bool = False
    """Whether it is being preempted."""


class Facts(NamedTuple):
    """The facts about a machine that its hosts' metadata servers publish."""

    project: str
    zone: str
    machine_type: str
    attributes: Mapping[str, str]
    tags: list[str]
    is_spot: bool
    account: str
    """Email address of the service account."""


class Hosts:
    """All hosts; every change is reported to `on_change`."""

    def __init__(self, records: Records, timetable: Timetable, network: str):
        """`network`: the first two numbers of all addresses; external ones come from its upper half."""
        self._timetable = timetable
        self._network = network
        timetable.register("host-booted", self._finish_boot)
        self._table: Table[RehearsedHost] = records.table("host", _load, lambda host: to_json(asdict(host)))
        self.on_change: Callable[[str], None] = lambda host_id: None
        """Called with the id of a host that is new, changed or gone."""
        self.on_preemption_notice: Callable[[str], None] = lambda host_id: None
        """Called with the id of a host whose processes must get SIGTERM."""

    def get(self, host_id: str) -> RehearsedHost | None:
        return self._table.get(host_id)

    def all(self) -> list[RehearsedHost]:
        return self._table.values()

    def list_workers(self, owner: str) -> list[RehearsedHost]:
        """Return the hosts of a machine in the order of their numbers."""
        return sorted((host for host in self._table.values() if host.owner == owner), key=lambda host: host.number)

    def add(self, owner: str, number: int, has_external: bool, tpu: Accelerator | None = None) -> None:
        """Add a host, which starts at once."""
        host = RehearsedHost(
            id=f"{owner.rsplit('/', 1)[-1]}-{number}-{secrets.token_hex(3)}",
            owner=owner,
            number=number,
            internal=self._new_address(),
            external=self._new_address(is_external=True) if has_external else None,
        )
        if tpu is not None:
            host.chips, host.devices = tpu.chips_per_host, tpu.devices // tpu.hosts
            host.vfio, host.type = tpu.generation.name not in ("v2", "v3", "v4"), tpu.api_name or tpu.name
        self._start_boot(host)

    def _start_boot(self, host: RehearsedHost) -> None:
        host.has_booted = False
        duration_s = random.uniform(SHORTEST_BOOT_S, LONGEST_BOOT_S)
        self._timetable.schedule(duration_s, "host-booted", host.id, host.boot)
        self._put(host)

    def _finish_boot(self, host_id: str, boot: int) -> None:
        host = self._table.get(host_id)
        if host is not None and host.on and host.boot == boot:
            host.has_booted = True
            self._put(host)

    def _put(self, host: RehearsedHost) -> None:
        self._table.put(host.id, host)
        self.on_change(host.id)

    def give_notice(self, owner: str) -> None:
        """Tell a machine's hosts and processes that it is about to be preempted."""
        for host in self.list_workers(owner):
            host.leaving = True
            self._put(host)
            self.on_preemption_notice(host.id)

    def turn_off(self, owner: str) -> None:
        for host in self.list_workers(owner):
            host.on = False
            self._put(host)

    def boot(self, owner: str, has_new_external: bool = False) -> None:
        for host in self.list_workers(owner):
            host.boot += 1
            host.on, host.leaving = True, False
            if has_new_external and host.external:
                host.external = self._new_address(is_external=True)
            self._start_boot(host)

    def set_external(self, owner: str, has_external: bool) -> None:
        for host in self.list_workers(owner):
            if has_external != (host.external is not None):
                host.external = self._new_address(is_external=True) if has_external else None
                self._put(host)

    def remove(self, owner: str) -> None:
        for host in self.list_workers(owner):
            self._table.pop(host.id)
            self.on_change(host.id)

    def _new_address(self, is_external: bool = False) -> str:
        used = {address for host in self._table.values() for address in (host.internal, host.external)}
        # .0 and .255 are not host addresses; x.0.1 is the server's own.
        for third in range(128, 256) if is_external else range(1, 128):
            for fourth in range(1, 255):
                address = f"{self._network}.{third}.{fourth}"
                if address not in used:
                    return address
        raise OverflowError(f"all addresses of {self._network}.0.0/16 are used")


def _load(body: bytes) -> RehearsedHost:
    return RehearsedHost(**json.loads(body))

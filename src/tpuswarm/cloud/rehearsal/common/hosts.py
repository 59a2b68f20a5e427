"""Hosts of machines as the cloud keeps them: addresses, boots, whether they run. `machines` makes them real."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.records import Records, Table, to_json


@dataclass
class RehearsedHost:
    """One VM: a TPU's worker, or a plain one."""

    id: str
    """Its folder's name, and what its processes carry in their environment. Never used again."""
    owner: str
    """The resource that it belongs to."""
    number: int
    """Which of the owner's workers."""
    internal: str
    external: str | None
    chips: int = 0
    devices: int = 0
    """What JAX sees of the chips."""
    vfio: bool = False
    """Where the chips are: /dev/vfio/N instead of /dev/accelN."""
    type: str = ""
    """The TPU API's name of the slice."""
    boot: int = 1
    """How often it was started."""
    on: bool = True
    leaving: bool = False
    """It is being preempted: its metadata server says so, its processes have got SIGTERM."""


class Facts(NamedTuple):
    """What the cloud says of the machine that a host belongs to."""

    project: str
    zone: str
    machine_type: str
    attributes: Mapping[str, str]
    """Its metadata, with what the cloud adds for a TPU's worker."""
    tags: list[str]
    spot: bool


class Hosts:
    """All hosts; whoever changes one says so by `put`, `reboot` or `remove`."""

    def __init__(self, records: Records, block: int):
        """`block`: addresses are in 127.BLOCK.0.0/16, external ones in its upper half."""
        self._block = block
        self._table: Table[RehearsedHost] = records.table("host", _load, lambda host: to_json(asdict(host)))
        self.changed: Callable[[str], None] = lambda host: None
        """Called with the id of a host that is new, other than before, or gone."""
        self.notice: Callable[[str], None] = lambda host: None
        """Called with the id of a host whose processes are to get SIGTERM."""

    def get(self, host: str) -> RehearsedHost | None:
        """None: there is none (any more)."""
        return self._table.get(host)

    def all(self) -> list[RehearsedHost]:
        """Every one."""
        return self._table.values()

    def of(self, owner: str) -> list[RehearsedHost]:
        """Those of a machine, in the order of their numbers."""
        return sorted((host for host in self._table.values() if host.owner == owner), key=lambda host: host.number)

    def add(self, owner: str, number: int, external: bool, tpu: Accelerator | None = None) -> RehearsedHost:
        """A new one, which starts at once."""
        host = RehearsedHost(
            id=f"{owner.rsplit('/', 1)[-1]}-{number}-{secrets.token_hex(3)}",
            owner=owner,
            number=number,
            internal=self._address(upper=False),
            external=self._address(upper=True) if external else None,
        )
        if tpu is not None:
            host.chips, host.devices = tpu.chips_per_host, tpu.devices // tpu.hosts
            host.vfio, host.type = tpu.generation.name not in ("v2", "v3", "v4"), tpu.api_name or tpu.name
        self.put(host)
        return host

    def put(self, host: RehearsedHost) -> None:
        """It is other than before."""
        self._table.put(host.id, host)
        self.changed(host.id)

    def announce(self, host: RehearsedHost) -> None:
        """It is about to be taken away."""
        host.leaving = True
        self.put(host)
        self.notice(host.id)

    def turn_off(self, host: RehearsedHost) -> None:
        """Its processes end; its folder stays."""
        host.on = False
        self.put(host)

    def boot(self, host: RehearsedHost, new_external: bool = False) -> None:
        """It starts (again)."""
        host.boot += 1
        host.on, host.leaving = True, False
        if new_external and host.external:
            host.external = self._address(upper=True)
        self.put(host)

    def expose(self, host: RehearsedHost, external: bool) -> None:
        """Give it an external address, or take it away."""
        if external != (host.external is not None):
            host.external = self._address(upper=True) if external else None
            self.put(host)

    def remove(self, owner: str) -> None:
        """All hosts of a machine, with everything on them."""
        for host in self.of(owner):
            self._table.pop(host.id)
            self.changed(host.id)

    def _address(self, upper: bool) -> str:
        used = {address for host in self._table.values() for address in (host.internal, host.external)}
        # .0 and .255 look like no host's; x.0.1 is the server's own.
        for third in range(128, 256) if upper else range(1, 128):
            for fourth in range(1, 255):
                address = f"127.{self._block}.{third}.{fourth}"
                if address not in used:
                    return address
        raise OverflowError("the local cloud has no address left: it has as many hosts as 127.x.0.0/16 takes")


def _load(body: bytes) -> RehearsedHost:
    return RehearsedHost(**json.loads(body))

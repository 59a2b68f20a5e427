"""Ask hosts for maintenance that Google has announced, and report each announcement once."""

import time
from collections.abc import Iterable, Sequence

from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.hosts.targets import Target
from tpuswarm.fleet.store.document import Document
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.train.process.metadata import format_maintenance

INTERVAL_S = 600.0
"""How often all hosts are asked; maintenance is announced days before."""
HOST_TIMEOUT_S = 30.0

TargetHosts = Sequence[tuple[Target, Host]]


class MaintenanceNotices:
    """The announcements that were stored as events."""

    def __init__(self) -> None:
        self._read_at = -INTERVAL_S
        self._stored: set[tuple[str, str]] = set()
        """Machine and text; the document keeps only the last events."""

    async def read(self, connections: Connections, document: Document, hosts: TargetHosts, now: float) -> list[Event]:
        """Return an event for each machine with a new announcement; ask no host before its time."""
        if time.monotonic() - self._read_at < INTERVAL_S:
            return []
        self._read_at = time.monotonic()
        known = self._stored | {(event.machine, event.text) for event in document.events}
        answers = await fan_out(
            [host for _, host in hosts],
            lambda host: Supervisor(connections, host).maintenance(),
            time_out_s=HOST_TIMEOUT_S,
        )
        events = []
        for (target, _), answer in zip(hosts, answers, strict=True):
            notice = target.machine.name, format_maintenance(answer if isinstance(answer, str) else None)
            if notice[1] and notice not in known:
                known.add(notice)
                events.append(Event(now, target.machine.pool or "", target.machine.name, "maintenance", notice[1]))
        return events

    def add_stored(self, events: Iterable[Event]) -> None:
        """Remember events of `read` that the document has now."""
        self._stored |= {(event.machine, event.text) for event in events}

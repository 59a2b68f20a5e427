"""Follow the changes of the cloud's hosts."""

import asyncio
import logging
from collections.abc import Collection, Coroutine
from typing import Protocol

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost


class Backend(Protocol):
    """Runs hosts."""

    def list_ids(self) -> set[str]:
        """Return the ids of hosts that have run."""

    async def run(self, host: RehearsedHost) -> None:
        """Run a host, with its recorded addresses and boot; idempotent."""

    async def give_notice(self, host_id: str) -> None:
        """Tell a host's processes that it is about to be preempted."""

    async def end(self, *host_ids: str) -> None:
        """End all that runs on hosts; their disks stay."""

    async def delete(self, host_id: str) -> None:
        """End a host and delete its disk."""

    async def shut_down(self, hosts: Collection[RehearsedHost]) -> None:
        """End hosts, which boot when the cloud runs again."""


class Machines:
    """Passes changes of the cloud's hosts on, one change of a host after the other."""

    def __init__(self, cloud: Cloud, backend: Backend):
        self._cloud, self._backend = cloud, backend
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Future[object]] = set()

    async def start(self) -> None:
        """Run the cloud's hosts, and delete others."""
        self._cloud.hosts.on_change = lambda host_id: self._start_task(self._apply(host_id))
        self._cloud.hosts.on_preemption_notice = lambda host_id: self._start_task(self._backend.give_notice(host_id))
        for host_id in self._backend.list_ids() | {host.id for host in self._cloud.hosts.all()}:
            self._cloud.hosts.on_change(host_id)
        await self._settle()

    async def stop(self) -> None:
        """End everything on the machines; they boot when the cloud starts again."""
        self._cloud.hosts.on_change = self._cloud.hosts.on_preemption_notice = lambda host_id: None
        await self._settle()
        await self._backend.shut_down(self._cloud.hosts.all())

    async def _settle(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _start_task(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _apply(self, host_id: str) -> None:
        """Run or end a host as the cloud's record says."""
        async with self._locks.setdefault(host_id, asyncio.Lock()):
            host = self._cloud.hosts.get(host_id)
            try:
                if host is None:
                    await self._backend.delete(host_id)
                    self._cloud.guests.forget(host_id)
                    self._cloud.records.commit()
                    self._locks.pop(host_id, None)
                elif host.on:
                    await self._backend.run(host)
                else:
                    await self._backend.end(host_id)
            except Exception:
                logging.exception("machine %s", host_id)

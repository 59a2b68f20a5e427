"""Hosts that say again and again what their chips are at: one connection and one program on each."""

import asyncio
import json
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.connect import Connections, on_host
from tpuswarm.remote.host import Host, NoWay
from tpuswarm.remote.modules import boot, sent

EVERY = 2.0
"""Seconds between two samples of a host."""
AGAIN = 5.0
"""Seconds until a host that was lost is tried again."""
MODULES = "tpuswarm.doctor.processes", "tpuswarm.watch.chips"
"""What is sent: the last one runs."""


class Sample(NamedTuple):
    """What a host has said last, or why it says nothing."""

    at: float
    """Unix seconds, of this computer."""
    said: dict[str, Any] | None
    """As watch/chips.py prints it."""
    why: str = ""


class Follower:
    """Follows hosts that come and go."""

    def __init__(self, connections: Connections):
        self._connections = connections
        self._hosts: dict[str, Host] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.samples: dict[str, Sample] = {}
        """The last of each host, by its label; of those that have said something."""

    def follow(self, hosts: Iterable[Host]) -> None:
        """These from now on."""
        wanted = {each.label: each for each in hosts}
        for label, host in list(self._hosts.items()):
            if wanted.get(label) != host:  # gone, or a machine that came back in its place
                self._tasks.pop(label).cancel()
                self.samples.pop(label, None)
                del self._hosts[label]
        for label in set(wanted) - set(self._hosts):
            self._hosts[label] = wanted[label]
            self._tasks[label] = asyncio.ensure_future(self._keep(wanted[label]))

    async def close(self) -> None:
        """Follow none of them any longer."""
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, host: Host) -> None:
        while True:
            try:
                await self._hear(host)
            except TpuswarmError as error:
                self.samples[host.label] = Sample(time.time(), None, str(error).removeprefix(f"{host.label} "))
            await asyncio.sleep(AGAIN)

    async def _hear(self, host: Host) -> None:
        connection = await self._connections.to(host)

        async def go() -> None:
            line = shlex.join(["python3", "-c", boot(MODULES[-1]), str(EVERY)])
            process = await connection.create_process(shlex.join(["/bin/bash", "-c", f"exec {line}"]), encoding=None)
            try:
                process.stdin.write(sent(*MODULES))
                async for said in process.stdout:
                    if said.endswith(b"\n"):  # else it was ended while it wrote
                        self.samples[host.label] = Sample(time.time(), _read(host, said))
                last = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            finally:
                process.close()
            raise NoWay(host, f"says nothing: {last or 'its program was ended'}")

        with suppress(BrokenPipeError):  # it ended before it had read the program; the next try says why
            await on_host(host, go)


def _read(host: Host, said: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError as error:  # a login script that prints, for example
        raise NoWay(host, f"says something else: {said.decode(errors='replace').strip()[:80]}") from error
    return found

"""Sample the chips of hosts continuously, with one connection and one program on each."""

import asyncio
import json
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.connect import Connections, marked, on_host, skip_login_output
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.remote.modules import bootstrap, pack_modules

SAMPLE_INTERVAL_S = 2.0
RETRY_S = 5.0
"""After a host was lost."""
MODULES = "tpuswarm.doctor.processes", "tpuswarm.doctor.collect", "tpuswarm.watch.chips"
"""Sent to a host; the last one runs."""


class Sample(NamedTuple):
    """The last sample of a host, or why there is none."""

    at: float
    """Unix time of this computer."""
    data: dict[str, Any] | None
    """The output of watch/chips.py."""
    why: str = ""


class Follower:
    """Follows hosts that come and go."""

    def __init__(self, connections: Connections):
        self._connections = connections
        self._hosts: dict[str, Host] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.samples: dict[str, Sample] = {}
        """By label; only of hosts that answered or failed."""

    def follow(self, hosts: Iterable[Host]) -> None:
        """Follow these hosts, and no others."""
        wanted = {host.label: host for host in hosts}
        for label, host in list(self._hosts.items()):
            if wanted.get(label) != host:  # gone, or replaced by another machine
                self._tasks.pop(label).cancel()
                self.samples.pop(label, None)
                del self._hosts[label]
        for label in set(wanted) - set(self._hosts):
            self._hosts[label] = wanted[label]
            self._tasks[label] = asyncio.ensure_future(self._sample_forever(wanted[label]))

    async def close(self) -> None:
        """Stop following all hosts."""
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_forever(self, host: Host) -> None:
        while True:
            try:
                await self._sample(host)
            except TpuswarmError as error:
                self.samples[host.label] = Sample(time.time(), None, str(error).removeprefix(f"{host.label} "))
            await asyncio.sleep(RETRY_S)

    async def _sample(self, host: Host) -> None:
        connection = await self._connections.to(host)

        async def read_samples() -> None:
            command = shlex.join(["python3", "-c", bootstrap(MODULES[-1]), str(SAMPLE_INTERVAL_S)])
            process = await connection.create_process(marked(f"exec {command}"), encoding=None)
            try:
                process.stdin.write(pack_modules(*MODULES))
                await skip_login_output(process.stdout)
                async for line in process.stdout:
                    if line.endswith(b"\n"):  # else it ended while writing
                        self.samples[host.label] = Sample(time.time(), _parse_sample(host, line))
                last = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            finally:
                process.close()
            raise HostUnreachable(host, f"stopped answering: {last or 'its program ended'}")

        with suppress(BrokenPipeError):  # it ended before it read the program; the next try reports why
            await on_host(host, read_samples)


def _parse_sample(host: Host, line: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise HostUnreachable(host, f"sent no sample: {line.decode(errors='replace').strip()[:80]}") from error
    return found

"""What the cloud says of its hosts becomes so: folders, servers, processes."""

import asyncio
import logging
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.hosts import Facts, RehearsedHost
from tpuswarm.cloud.rehearsal.machines import metrics, ports, processes, ssh
from tpuswarm.cloud.rehearsal.machines.metadata import Metadata
from tpuswarm.cloud.rehearsal.machines.root import METADATA_PORT, Root
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.cloud.rehearsal.wire.web import Web

STAND_INS = Path(__file__).parent / "stand_ins"
ALIASES = {
    "apt": "apt-get", "swapoff": "swapon", "umount": "mount", "poweroff": "reboot", "shutdown": "reboot",
    "mkswap": "fallocate", "blkid": "lsblk", "wipefs": "lsblk", "mkfs.ext4": "lsblk",
}  # fmt: skip


def put_stand_ins(place: Place) -> None:
    """The programs that machines find first: they act under the machine's root folder."""
    shutil.copytree(STAND_INS, place.stand_ins, dirs_exist_ok=True)
    for program in STAND_INS.iterdir():
        (place.stand_ins / program.name).chmod(0o755)
    for name, meant in ALIASES.items():
        link = place.stand_ins / name
        link.unlink(missing_ok=True)
        link.symlink_to(meant)


@dataclass
class Up:
    """A host whose servers answer."""

    host: RehearsedHost
    metadata: asyncio.Server
    ssh: dict[str, asyncssh.SSHAcceptor]
    """By address."""
    ports: socket.socket | None
    """Holds its range of ports; None: there was none left."""
    metrics: Any | None
    """libtpu's, where it has chips."""


class Machines:
    """Follows the cloud's hosts. One that changes again while it is being followed is followed again afterwards."""

    def __init__(
        self, place: Place, cloud: Cloud, web: Web, storage: str, facts: Callable[[RehearsedHost], Facts | None]
    ):
        self._place, self._cloud, self._web, self._storage, self._facts = place, cloud, web, storage, facts
        self._up: dict[str, Up] = {}
        self._usage = metrics.Usage(place.machines)
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Future[object]] = set()
        self._scripts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """As the cloud has it now; what other machines have left is deleted."""
        put_stand_ins(self._place)
        self._place.machines.mkdir(exist_ok=True)
        self._cloud.hosts.changed, self._cloud.hosts.notice = self._follow, self._warn
        left = {each.name for each in self._place.machines.iterdir()}
        for host in left | {host.id for host in self._cloud.hosts.all()}:
            self._follow(host)
        await self.settled()

    async def stop(self) -> None:
        """End everything that runs on them; their folders stay, and they boot when the cloud is there again."""
        self._cloud.hosts.changed = self._cloud.hosts.notice = lambda host: None
        await self.settled()
        hosts = self._cloud.hosts.all()
        await self._end(*(host.id for host in hosts))
        for host in hosts:
            self.root(host).unplug()

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def environment(self, host: RehearsedHost, user: str) -> dict[str, str]:
        """What a process of `user` starts with."""
        return self.root(host).environment(user, self._storage)

    def root(self, host: RehearsedHost) -> Root:
        """Its folder."""
        return Root(self._place, host)

    def _follow(self, host: str) -> None:
        self._begin(self._make_so(host))

    def _warn(self, host: str) -> None:
        self._begin(asyncio.to_thread(processes.send, [host], signal.SIGTERM))

    def _begin(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_so(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            host = self._cloud.hosts.get(name)
            try:
                if host is None:
                    await self._end(name)
                    await asyncio.to_thread(shutil.rmtree, self._place.machines / name, ignore_errors=True)
                    self._cloud.guests.forget(name)
                    self._cloud.records.commit()
                    self._locks.pop(name, None)
                elif not host.on:
                    await self._end(name)
                else:
                    await self._run(host)
            except Exception:
                logging.exception("machine %s", name)

    async def _run(self, host: RehearsedHost) -> None:
        root = self.root(host)
        new = not root.booted
        if new:
            await self._end(host.id)
            root.boot()
        await self._serve(host, root)
        if new:
            await self._start_up(host, root)

    async def _serve(self, host: RehearsedHost, root: Root) -> None:
        """Its SSH server, on the addresses that it has now, and its metadata server."""
        key = ssh.host_key(root)
        if host.id not in self._up:
            get_host = partial(self._cloud.hosts.get, host.id)
            app = Metadata(get_host, self._facts, f"{self._place.token()}~{host.id}", self._cloud.guests, root.planted)
            metadata = await self._web.listen(host.internal, METADATA_PORT, app)
            held = ports.hold()
            root.give_ports(held[0] if held else None)
            libtpu = None
            if held and host.devices:
                libtpu = await metrics.serve(get_host, ports.metrics(held[0]), self._usage)
            self._up[host.id] = Up(host, metadata, {}, held[1] if held else None, libtpu)
            kind, value = key.export_public_key().decode().split()[:2]
            self._cloud.guests.write(host.id, f"hostkeys/{kind}", value)
            self._cloud.records.commit()
        up = self._up[host.id]
        addresses = {address for address in (host.internal, host.external) if address}
        for address in set(up.ssh) - addresses:
            up.ssh.pop(address).close()
        for address in addresses - set(up.ssh):
            keys = partial(self._keys, host.id)
            up.ssh[address] = await ssh.listen(
                root, address, key, keys, self._storage, on=partial(self._up.__contains__, host.id)
            )

    async def _end(self, *hosts: str) -> None:
        ended = [self._up.pop(host) for host in hosts if host in self._up]
        for up in ended:
            for server in up.ssh.values():
                server.close()
        await asyncio.to_thread(processes.kill, hosts)
        for up in ended:  # what was begun last may have asked whether its machine is being taken away
            up.metadata.close()
            if up.metrics:
                await up.metrics.stop(None)
            if up.ports:
                up.ports.close()

    async def _start_up(self, host: RehearsedHost, root: Root) -> None:
        """At every boot: enabled services, then the start-up script, as root would run it."""
        await self._enter(host, root)
        facts = self._facts(host)
        script = facts.attributes.get("startup-script") if facts else None
        if not script:
            return
        file = root.path / "run" / "startup-script"
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        file.chmod(0o700)
        with root.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                file,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(host, "root"),
                cwd=root.path,
                start_new_session=True,
            )
        noting = asyncio.create_task(self._note_end(process, root))
        self._scripts.add(noting)
        noting.add_done_callback(self._scripts.discard)

    async def _enter(self, host: RehearsedHost, root: Root) -> None:
        """Start what systemd would, where a machine has been told to."""
        if (root.path / "etc" / "systemd" / "enabled").exists():
            process = await asyncio.create_subprocess_exec(
                *(self._place.stand_ins / "systemctl", "default"), env=self.environment(host, "root"), cwd=root.path
            )
            await process.wait()

    async def _note_end(self, process: asyncio.subprocess.Process, root: Root) -> None:
        code = await process.wait()
        if root.log.exists():
            with root.log.open("a") as log:
                log.write(f"startup-script exit status {code}\n")

    def _keys(self, host: str) -> str:
        found = self._cloud.hosts.get(host)
        facts = self._facts(found) if found else None
        return facts.attributes.get("ssh-keys", "") if facts else ""

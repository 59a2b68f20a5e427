"""Make the cloud's hosts real: folders, servers and processes."""

import asyncio
import logging
import shutil
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.connect import CloudFolder
from tpuswarm.cloud.rehearsal.machines import metrics, processes, ssh
from tpuswarm.cloud.rehearsal.machines.metadata import MetadataServer
from tpuswarm.cloud.rehearsal.machines.root import METADATA_PORT, Root, metrics_port, reserve_ports
from tpuswarm.cloud.rehearsal.wire.http import HttpServer

STAND_INS = Path(__file__).parent / "stand_ins"
ALIASES = {
    "apt": "apt-get", "swapoff": "swapon", "umount": "mount", "poweroff": "reboot", "shutdown": "reboot",
    "mkswap": "fallocate", "blkid": "lsblk", "wipefs": "lsblk", "mkfs.ext4": "lsblk",
}  # fmt: skip


def install_stand_ins(folder: CloudFolder) -> None:
    """Install the programs that act under a machine's root folder, first on its PATH."""
    shutil.copytree(STAND_INS, folder.stand_ins, dirs_exist_ok=True)
    for program in STAND_INS.iterdir():
        (folder.stand_ins / program.name).chmod(0o755)
    for name, target in ALIASES.items():
        link = folder.stand_ins / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


@dataclass
class Servers:
    """The servers of a running host."""

    metadata: asyncio.Server
    ssh: dict[str, asyncssh.SSHAcceptor]
    """By address."""
    ports: socket.socket | None
    """Holds the host's range of ports."""
    metrics: Any | None
    """libtpu's metrics, if the host has chips."""


class Machines:
    """Follows the changes of the cloud's hosts, one change of a host after the other."""

    def __init__(self, folder: CloudFolder, cloud: Cloud, http: HttpServer, storage: str):
        """`storage`: the URL of the cloud's buckets."""
        self._folder, self._cloud, self._http, self._storage = folder, cloud, http, storage
        self._servers: dict[str, Servers] = {}
        self._usage = metrics.Usage(folder.machines)
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Future[object]] = set()
        self._scripts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Run the cloud's hosts, and delete the folders of others."""
        install_stand_ins(self._folder)
        self._folder.machines.mkdir(exist_ok=True)
        self._cloud.hosts.on_change = self._follow
        self._cloud.hosts.on_preemption_notice = self._terminate
        existing = {path.name for path in self._folder.machines.iterdir()}
        for host_id in existing | {host.id for host in self._cloud.hosts.all()}:
            self._follow(host_id)
        await self._settle()

    async def stop(self) -> None:
        """End everything on the machines; their folders stay, and they boot when the cloud starts again."""
        self._cloud.hosts.on_change = self._cloud.hosts.on_preemption_notice = lambda host_id: None
        await self._settle()
        hosts = self._cloud.hosts.all()
        await self._end(*(host.id for host in hosts))
        for host in hosts:
            self.root(host).shut_down()

    async def _settle(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def environment(self, host: RehearsedHost, user: str) -> dict[str, str]:
        return self.root(host).environment(user, self._storage)

    def root(self, host: RehearsedHost) -> Root:
        return Root(self._folder, host)

    def _follow(self, host_id: str) -> None:
        self._start_task(self._apply(host_id))

    def _terminate(self, host_id: str) -> None:
        self._start_task(asyncio.to_thread(processes.send, [host_id], signal.SIGTERM))

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
                    await self._end(host_id)
                    await asyncio.to_thread(shutil.rmtree, self._folder.machines / host_id, ignore_errors=True)
                    self._cloud.guests.forget(host_id)
                    self._cloud.records.commit()
                    self._locks.pop(host_id, None)
                elif not host.on:
                    await self._end(host_id)
                else:
                    await self._run(host)
            except Exception:
                logging.exception("machine %s", host_id)

    async def _run(self, host: RehearsedHost) -> None:
        root = self.root(host)
        is_new = not root.has_booted
        if is_new:
            await self._end(host.id)
            root.boot()
        await self._serve(host, root)
        if is_new:
            await self._start_enabled_services(host, root)
            await self._start_script(host, root)

    async def _serve(self, host: RehearsedHost, root: Root) -> None:
        """Start a host's servers, and its SSH server also at new addresses."""
        key = ssh.host_key(root)
        if host.id not in self._servers:
            get_host = partial(self._cloud.hosts.get, host.id)
            token = f"{self._folder.token()}~{host.id}"
            app = MetadataServer(get_host, self._cloud.facts, token, self._cloud.guests, root.read_faulty_metadata)
            metadata = await self._http.listen(host.internal, METADATA_PORT, app)
            first_port, listener = reserve_ports() or (None, None)
            root.write_ports(first_port)
            libtpu = None
            if first_port is not None and host.devices:
                libtpu = await metrics.serve(get_host, metrics_port(first_port), self._usage)
            self._servers[host.id] = Servers(metadata, {}, listener, libtpu)
            kind, value = key.export_public_key().decode().split()[:2]
            self._cloud.guests.write(host.id, f"hostkeys/{kind}", value)
            self._cloud.records.commit()
        acceptors = self._servers[host.id].ssh
        addresses = {address for address in (host.internal, host.external) if address}
        for address in acceptors.keys() - addresses:
            acceptors.pop(address).close()
        for address in addresses - acceptors.keys():
            keys, is_on = partial(self._authorized_keys, host.id), partial(self._servers.__contains__, host.id)
            acceptors[address] = await ssh.listen(root, address, key, keys, self._storage, is_on=is_on)

    async def _end(self, *host_ids: str) -> None:
        ended = [self._servers.pop(host_id) for host_id in host_ids if host_id in self._servers]
        for servers in ended:
            for acceptor in servers.ssh.values():
                acceptor.close()
        await asyncio.to_thread(processes.kill, host_ids)
        for servers in ended:  # until now, processes may ask whether their machine is being preempted
            servers.metadata.close()
            if servers.metrics:
                await servers.metrics.stop(None)
            if servers.ports:
                servers.ports.close()

    async def _start_enabled_services(self, host: RehearsedHost, root: Root) -> None:
        if (root.path / "etc" / "systemd" / "enabled").exists():
            process = await asyncio.create_subprocess_exec(
                *(self._folder.stand_ins / "systemctl", "default"), env=self.environment(host, "root"), cwd=root.path
            )
            await process.wait()

    async def _start_script(self, host: RehearsedHost, root: Root) -> None:
        facts = self._cloud.facts(host)
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
        task = asyncio.create_task(self._log_exit_status(process, root))
        self._scripts.add(task)
        task.add_done_callback(self._scripts.discard)

    async def _log_exit_status(self, process: asyncio.subprocess.Process, root: Root) -> None:
        code = await process.wait()
        if root.log.exists():
            with root.log.open("a") as log:
                log.write(f"startup-script exit status {code}\n")

    def _authorized_keys(self, host_id: str) -> str:
        host = self._cloud.hosts.get(host_id)
        facts = self._cloud.facts(host) if host else None
        return facts.attributes.get("ssh-keys", "") if facts else ""

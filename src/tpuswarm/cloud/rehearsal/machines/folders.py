"""Hosts as folders, servers and processes of this computer."""

import asyncio
import shutil
import signal
import socket
from collections.abc import Collection
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


class Folders:
    """A backend of Machines: runs hosts without root and containers."""

    def __init__(self, folder: CloudFolder, cloud: Cloud, http: HttpServer, storage: str):
        """`storage`: the URL of the cloud's buckets."""
        self._folder, self._cloud, self._http, self._storage = folder, cloud, http, storage
        self._servers: dict[str, Servers] = {}
        self._usage = metrics.Usage(folder.machines)
        self._scripts: set[asyncio.Task[None]] = set()
        install_stand_ins(folder)
        folder.machines.mkdir(exist_ok=True)

    def list_ids(self) -> set[str]:
        return {path.name for path in self._folder.machines.iterdir()}

    async def give_notice(self, host_id: str) -> None:
        await asyncio.to_thread(processes.send, [host_id], signal.SIGTERM)

    async def delete(self, host_id: str) -> None:
        await self.end(host_id)
        await asyncio.to_thread(shutil.rmtree, self._folder.machines / host_id, ignore_errors=True)

    async def end(self, *host_ids: str) -> None:
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

    async def shut_down(self, hosts: Collection[RehearsedHost]) -> None:
        await self.end(*(host.id for host in hosts))
        for host in hosts:
            Root(self._folder, host).shut_down()

    async def run(self, host: RehearsedHost) -> None:
        root = Root(self._folder, host)
        is_new = not root.has_booted
        if is_new:
            await self.end(host.id)
            root.boot()
        await self._serve(host, root)
        if is_new:
            await self._start_enabled_services(host, root)
            await self._start_script(host, root)

    async def _serve(self, host: RehearsedHost, root: Root) -> None:
        """Start a host's servers; once it has booted, publish its host key and start SSH at its addresses."""
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
        if not host.has_booted:
            return
        key = ssh.host_key(root)
        acceptors = self._servers[host.id].ssh
        if not acceptors:
            kind, value = key.export_public_key().decode().split()[:2]
            self._cloud.guests.write(host.id, f"hostkeys/{kind}", value)
            self._cloud.records.commit()
        addresses = {address for address in (host.internal, host.external) if address}
        for address in acceptors.keys() - addresses:
            acceptors.pop(address).close()
        for address in addresses - acceptors.keys():
            keys, is_on = partial(self._authorized_keys, host.id), partial(self._servers.__contains__, host.id)
            acceptors[address] = await ssh.listen(root, address, key, keys, self._storage, is_on=is_on)

    async def _start_enabled_services(self, host: RehearsedHost, root: Root) -> None:
        if (root.path / "etc" / "systemd" / "enabled").exists():
            process = await asyncio.create_subprocess_exec(
                *(self._folder.stand_ins / "systemctl", "default"),
                env=root.environment("root", self._storage),
                cwd=root.path,
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
                env=root.environment("root", self._storage),
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

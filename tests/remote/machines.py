"""Machines for tests without a cloud: SSH servers on loopback, each with a folder and real processes."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import asyncssh

from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.connect import CloudFolder
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.cloud.rehearsal.machines import ssh as served
from tpuswarm.cloud.rehearsal.machines.folders import install_stand_ins
from tpuswarm.cloud.rehearsal.machines.root import SSH_PORT, Root
from tpuswarm.cloud.rehearsal.server import reserve_block
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host

USER = "me"
T = TypeVar("T")


class Machine(NamedTuple):
    host: Host
    root: Path
    """The folder that stands for its `/`."""
    id: str

    @property
    def home(self) -> Path:
        return self.root / "home" / USER


class Machines(list[Machine]):
    def __init__(self, key: Path, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self.key, self.loop = key, loop
        self.acceptors: dict[str, asyncssh.SSHAcceptor] = {}
        self.start_server: list[Callable[[str], Coroutine[Any, Any, asyncssh.SSHAcceptor]]] = []
        """By machine: start its server at an address."""

    @property
    def hosts(self) -> list[Host]:
        return [machine.host for machine in self]

    def connections(self) -> Connections:
        return Connections(self.key)

    def run(self, work: Callable[[Connections], Coroutine[Any, Any, T]]) -> T:
        async def inside() -> T:
            async with self.connections() as connections:
                return await work(connections)

        return asyncio.run(inside())

    def run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def disconnect(self, number: int) -> None:
        """Break every connection to a machine; it accepts new ones."""

        async def close() -> None:
            for connection in list(CONNECTED.get(number, ())):
                connection.abort()
            CONNECTED.pop(number, None)

        self.run_in_loop(close())

    def move(self, number: int, address: str) -> None:
        """Give a machine another address; the old one refuses connections."""
        before = self[number].host.address
        self.acceptors[address] = self.run_in_loop(self.start_server[number](address))
        self.loop.call_soon_threadsafe(self.acceptors.pop(before).close)
        self.disconnect(number)


CONNECTED: dict[int, set[asyncssh.SSHServerConnection]] = {}


class NotedServer(served.Server):
    def __init__(self, keys: served.Keys, number: int):
        super().__init__(keys)
        self._number = number

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        CONNECTED.setdefault(self._number, set()).add(connection)


@contextmanager
def start_machines(folder: Path, count: int) -> Iterator[Machines]:
    """Start machines; at the end kill everything on them."""
    place = CloudFolder(folder / "cloud")
    place.make()
    place.machines.mkdir()
    install_stand_ins(place)
    number, held = reserve_block(folder, None)
    key, key_file = asyncssh.generate_private_key("ssh-ed25519"), folder / "key"
    key.write_private_key(key_file)
    key_file.chmod(0o600)
    allowed = f"{USER}:{key.export_public_key().decode()}"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    machines = Machines(key_file, loop)
    try:
        for index in range(count):
            address = f"127.{number}.1.{index + 1}"
            described = RehearsedHost(f"m{index}-{folder.name}-{os.getpid()}", "owner", index, address, None, chips=4)
            root = Root(place, described)
            root.boot()
            ours, server = served.host_key(root), partial(NotedServer, number=index)
            machines.start_server.append(
                partial(served.listen, root, key=ours, keys=lambda: allowed, storage="", server=server)
            )
            machines.acceptors[address] = machines.run_in_loop(machines.start_server[index](address))
            public = " ".join(ours.export_public_key().decode().split()[:2])
            alias, known = f"node-{index}.0", folder / "known_hosts"
            with known.open("a") as lines:
                lines.write(f"{alias} {public}\n")
            host = Host(f"node-{index}/0", address, SSH_PORT, USER, alias, (public,), known)
            machines.append(Machine(host, root.path, described.id))
            root.home(USER)
        yield machines
    finally:
        for acceptor in machines.acceptors.values():
            loop.call_soon_threadsafe(acceptor.close)
        processes.kill([machine.id for machine in machines])
        machines.run_in_loop(asyncio.sleep(0.05))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        held.close()

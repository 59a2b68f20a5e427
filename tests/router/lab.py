"""A client, a router and 256 targets in network namespaces, which end with the test.

The router also has a mount namespace. /etc and the kernel settings without a namespace are copies in memory.
"""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarks.report import Skipped

from tests.processes import Forked, finish
from tests.router.namespaces import Space

ROUTER, CLIENT, STRANGER, TARGET_HOST = "10.1.0.1", "10.1.0.2", "10.1.0.3", "10.9.0.2"
TARGETS = 256
IN_NAMESPACES = str(Path(__file__).with_name("in_namespaces.py"))

SET_UP_ROUTER = """
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/etc /run/etc-work /run/core
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/etc-work overlay /etc
mkdir -p /etc/systemd/system
for name in somaxconn netdev_max_backlog rmem_max wmem_max; do echo 1000 > /run/core/$name; done
mount --bind /run/core /proc/sys/net/core
for name in bbr reno; do echo $name > /proc/sys/net/ipv4/tcp_congestion_control; done
nft list ruleset
ip link set lo up
"""
CONNECT_ROUTER = f"""
ip link add eth0 type veth peer name c0 netns $CLIENT
ip link add eth1 type veth peer name t0 netns $TARGETS
ip address add {ROUTER}/24 dev eth0
ip address add 10.9.0.1/24 dev eth1
ip link set eth0 up
ip link set eth1 up
ip route add 10.48.0.0/16 via {TARGET_HOST}
ip route add 10.49.0.0/16 via {TARGET_HOST}
"""
SET_UP_CLIENT = f"""
ip link set lo up
ip address add {CLIENT}/24 dev c0
ip address add {STRANGER}/24 dev c0
ip link set c0 up
"""
SET_UP_TARGETS = f"""
ip link set lo up
ip address add {TARGET_HOST}/24 dev t0
ip link set t0 up
ip route add local 10.48.0.0/16 dev lo
ip route add local 10.49.0.0/16 dev lo
"""


class Machine(Space):
    """Namespaces, and a thread in their network."""

    def __init__(self, *kinds: str) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=self.join)
        try:
            super().__init__(*kinds)
        except Skipped as reason:
            pytest.skip(str(reason))

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in this network; sockets that it makes stay there."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


class Lab:
    """The three machines, connected. Every address of 10.48.0.0/16 and 10.49.0.0/16 answers at port 8470."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root may make network namespaces")
        for program in ("ip", "nft", "unshare"):
            if not shutil.which(program):
                pytest.skip(f"there is no {program} on this machine")
        self._servers: list[socket.socket] = []
        self.router = Machine("--net", "--mount")
        self.client, self.targets = Machine("--net"), Machine("--net")
        try:
            self.router.sh(SET_UP_ROUTER)
        except RuntimeError as error:
            self.close()
            pytest.skip(f"this machine does not allow what a test's router needs: {error}")
        self.router.sh(CONNECT_ROUTER, CLIENT=str(self.client.pid), TARGETS=str(self.targets.pid))
        self.client.sh(SET_UP_CLIENT)
        self.targets.sh(SET_UP_TARGETS)
        self.serve(self.targets, 8470)
        self.serve(self.router, 5001)

    def serve(self, machine: Machine, port: int) -> None:
        """Answer each message at a port with the address and port that it reached."""
        server: socket.socket = machine.call(lambda: socket.create_server(("0.0.0.0", port), backlog=4096))

        def answer(connection: socket.socket) -> None:
            address, port = connection.getsockname()
            with connection, suppress(OSError):
                while connection.recv(64):
                    connection.sendall(f"{address}:{port}\n".encode())

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        self._servers.append(server)

    def connect(self, port: int, source: str = CLIENT, address: str = ROUTER) -> socket.socket:
        """Connect the client to a port of the router, or of another address."""
        connection: socket.socket = self.client.call(
            lambda: socket.create_connection((address, port), timeout=20, source_address=(source, 0))
        )
        return connection

    def target(self, port: int) -> str:
        with self.connect(port) as connection:
            return identify(connection)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return Forked(
            [IN_NAMESPACES, str(self.router.pid), "router", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tpuswarm(self, *words: str, code: int = 0) -> str:
        """Run `tpuswarm router …` on the router; return its stdout, or its stderr if it is to fail with `code`."""
        out, err = finish(self.start(*words), code)
        return err if code else out

    def rules(self) -> str:
        return self.router.sh("nft -s list ruleset")

    def settings(self) -> str:
        """Return every setting of the router's network; those left out count, are random or belong to all machines."""
        return self.router.sh(
            "grep -r . /proc/sys/net 2>/dev/null | grep -v -e nf_conntrack_ -e /route/ -e stable_secret | sort"
        )

    def files(self) -> list[str]:
        return self.router.sh("find /run/etc ! -type d | sort").splitlines()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            server.close()
        for machine in (self.router, self.client, self.targets):
            machine.close()


def identify(connection: socket.socket) -> str:
    """Return which target is at the other end."""
    connection.sendall(b"?")
    return connection.recv(64).decode().strip()

"""A client, a router and its targets in network namespaces of their own, which vanish with the process that made them.

The router has a mount namespace too: what it writes under /etc and /var/lib, and those settings of the kernel that are
not a namespace's own, are copies in memory.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarks.namespaces import Space
from benchmarks.report import Skipped

DOOR, CLIENT, STRANGER, BEHIND = "10.1.0.1", "10.1.0.2", "10.1.0.3", "10.9.0.2"
TARGETS = 256
PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))

ROUTER = """
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/etc /run/etc-work /run/lib /run/lib-work /run/core
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/etc-work overlay /etc
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/lib,workdir=/run/lib-work overlay /var/lib
mkdir -p /etc/systemd/system /etc/security/limits.d
rm -rf /var/lib/tpuswarm
for name in somaxconn netdev_max_backlog rmem_max wmem_max; do echo 1000 > /run/core/$name; done
mount --bind /run/core /proc/sys/net/core
for name in bbr reno; do echo $name > /proc/sys/net/ipv4/tcp_congestion_control; done
nft list ruleset
ip link set lo up
"""
WIRES = f"""
ip link add eth0 type veth peer name c0 netns $CLIENT
ip link add eth1 type veth peer name t0 netns $TARGETS
ip address add {DOOR}/24 dev eth0
ip address add 10.9.0.1/24 dev eth1
ip link set eth0 up
ip link set eth1 up
ip route add 10.48.0.0/16 via {BEHIND}
ip route add 10.49.0.0/16 via {BEHIND}
"""
ADDRESSES = {
    "client": f"""
ip link set lo up
ip address add {CLIENT}/24 dev c0
ip address add {STRANGER}/24 dev c0
ip link set c0 up
""",
    "targets": f"""
ip link set lo up
ip address add {BEHIND}/24 dev t0
ip link set t0 up
ip route add local 10.48.0.0/16 dev lo
ip route add local 10.49.0.0/16 dev lo
""",
}


class Machine(Space):
    """Namespaces, and a thread in them that makes sockets."""

    def __init__(self, *kinds: str) -> None:
        self._threads = ThreadPoolExecutor(1, initializer=self.join)
        try:
            super().__init__(*kinds)
        except Skipped as reason:
            pytest.skip(str(reason))

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function gives in this network; the sockets it makes stay there."""
        return self._threads.submit(function).result()

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class Lab:
    """The three of them, wired; every address of 10.48.0.0/16 and 10.49.0.0/16 answers at port 8470 with its name."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root may make network namespaces")
        for program in ("ip", "nft", "unshare", "nsenter"):
            if not shutil.which(program):
                pytest.skip(f"there is no {program} on this machine")
        self._servers: list[socket.socket] = []
        self.router = Machine("--net", "--mount")
        self.client, self.targets = Machine("--net"), Machine("--net")
        pids = {"CLIENT": str(self.client.pid), "TARGETS": str(self.targets.pid)}
        try:
            self.router.sh(ROUTER)
        except RuntimeError as error:
            self.close()
            pytest.skip(f"this machine does not allow what a test's router needs: {error}")
        self.router.sh(WIRES, **pids)
        self.client.sh(ADDRESSES["client"])
        self.targets.sh(ADDRESSES["targets"])
        self.serve(self.targets, 8470)
        self.serve(self.router, 5001)

    def serve(self, space: Machine, port: int) -> None:
        """Answer there."""
        server: socket.socket = space.call(lambda: socket.create_server(("0.0.0.0", port), backlog=4096))
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        self._servers.append(server)

    @staticmethod
    def _accept(server: socket.socket) -> None:
        """Answer every line with the address that was reached; a thread for each connection."""

        def answer(reached: socket.socket) -> None:
            with reached, suppress(OSError):
                while reached.recv(64):
                    reached.sendall(b"%s:%d\n" % (reached.getsockname()[0].encode(), reached.getsockname()[1]))

        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    def open(self, port: int, source: str = CLIENT) -> socket.socket:
        """A connection of the client's to a port of the router."""
        connection: socket.socket = self.client.call(
            lambda: socket.create_connection((DOOR, port), timeout=20, source_address=(source, 0))
        )
        return connection

    def reach(self, port: int, source: str = CLIENT) -> str:
        """Which target answers at a port of the router."""
        with self.open(port, source) as connection:
            return ask(connection)

    def tpuswarm(self, *words: str, code: int = 0) -> str:
        """What `tpuswarm router …` prints on the router; on stderr, if it is to end with another code than 0."""
        done = self.popen(*words)
        out, err = done.communicate(timeout=120)
        assert done.returncode == code, f"exit {done.returncode}, not {code}: {out}\n{err}"
        return err if code else out

    def popen(self, *words: str) -> subprocess.Popen[str]:
        """`tpuswarm router …` on the router, in a process group of its own."""
        return subprocess.Popen(
            [*self.router.enter, PROGRAM, "router", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def rules(self) -> str:
        """All rules of the router, without counters."""
        return self.router.sh("nft -s list ruleset")

    def settings(self) -> str:
        """Every setting of the router's network and every file of /etc and /var/lib that it may write."""
        return self.router.sh(
            # Those named here count or draw lots, or belong to the machine.
            "grep -r . /proc/sys/net 2>/dev/null | grep -v -e nf_conntrack_ -e /route/ -e stable_secret | sort;"
            "grep . /sys/class/net/*/tx_queue_len; find /run/etc /run/lib ! -type d | sort; find /var/lib/tpuswarm || :"
        )

    def close(self) -> None:
        for server in self._servers:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            server.close()
        for space in (self.router, self.client, self.targets):
            space.close()


def ask(connection: socket.socket) -> str:
    """Which target is at the other end."""
    connection.sendall(b"?")
    return connection.recv(64).decode().strip()

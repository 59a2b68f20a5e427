"""The TCP ports of a machine on which its Ray listens: a range that a firewall can be told, where one was asked for."""

import re
from typing import NamedTuple

from tpuswarm.config.units import MAX_PORT
from tpuswarm.errors import InputError

SERVICES = ("gcs-server", "node-manager", "object-manager", "agent-grpc", "agent-http", "runtime-env-agent", "metrics")
"""Those of Ray that listen, in the order of their ports; the first is what machines join at, of the head alone."""
LEAST = 40
"""Ports of a range: these services, and a process for each aggregator, its successor and what Ray keeps in reserve."""


class Ports(NamedTuple):
    """A range, both ends included."""

    first: int
    last: int

    @property
    def workers(self) -> int:
        """Processes that find a port in it."""
        return self.last - self.first + 1 - len(SERVICES)

    def of(self, service: str) -> int:
        """The port of one of SERVICES."""
        return self.first + SERVICES.index(service)

    def of_head(self) -> dict[str, int]:
        """For Ray's parameters of a cluster that begins here, but for `metrics`, which ray.init takes itself."""
        names = {
            "gcs_server_port": "gcs-server", "node_manager_port": "node-manager",
            "object_manager_port": "object-manager", "metrics_agent_port": "agent-grpc",
            "dashboard_agent_listen_port": "agent-http", "runtime_env_agent_port": "runtime-env-agent",
        }  # fmt: skip
        return {name: self.of(service) for name, service in names.items()} | self._of_workers("_")

    def of_node(self) -> list[str]:
        """For the command line of `ray start` on a machine that joins."""
        flags = {
            "node-manager-port": "node-manager", "object-manager-port": "object-manager",
            "dashboard-agent-grpc-port": "agent-grpc", "dashboard-agent-listen-port": "agent-http",
            "runtime-env-agent-port": "runtime-env-agent", "metrics-export-port": "metrics",
        }  # fmt: skip
        found = {name: self.of(service) for name, service in flags.items()} | self._of_workers("-")
        return [word for name, port in found.items() for word in (f"--{name}", str(port))]

    def _of_workers(self, between: str) -> dict[str, int]:
        names = (between.join((which, "worker", "port")) for which in ("min", "max"))
        return dict(zip(names, (self.first + len(SERVICES), self.last), strict=True))


def parse_ports(text: str | None) -> Ports | None:
    """The range that `20000-20999` means; None for None. Raises InputError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip())
    found = Ports(int(match[1]), int(match[2])) if match else None
    if not found or not 1024 <= found.first <= found.last - LEAST + 1 or found.last > MAX_PORT:
        raise InputError(
            f"--ports is FIRST-LAST such as 20000-20999, {LEAST} ports or more from 1024 to {MAX_PORT}, not {text!r}"
        )
    return found

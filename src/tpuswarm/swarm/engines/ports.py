"""The TCP ports on which a machine's Ray listens: any, or a range that a firewall can allow."""

import re
from typing import NamedTuple

from tpuswarm.config.units import MAX_PORT
from tpuswarm.errors import InputError

SERVICES = ("gcs-server", "node-manager", "object-manager", "agent-grpc", "agent-http", "runtime-env-agent", "metrics")
"""Ray's listening services, in the order of their ports. Only the head has the first, to which machines connect."""
MIN_PORT_COUNT = 40
"""Enough for these services, each aggregator and its successor, and Ray's reserve."""


class Ports(NamedTuple):
    """A range, inclusive."""

    first: int
    last: int

    @property
    def workers(self) -> int:
        """Number of processes that find a port in it."""
        return self.last - self.first + 1 - len(SERVICES)

    def port_of(self, service: str) -> int:
        return self.first + SERVICES.index(service)

    def head_parameters(self) -> dict[str, int]:
        """Return Ray's parameters for a new cluster, except `metrics`, which ray.init takes itself."""
        names = {
            "gcs_server_port": "gcs-server", "node_manager_port": "node-manager",
            "object_manager_port": "object-manager", "metrics_agent_port": "agent-grpc",
            "dashboard_agent_listen_port": "agent-http", "runtime_env_agent_port": "runtime-env-agent",
        }  # fmt: skip
        return {name: self.port_of(service) for name, service in names.items()} | self._worker_range("_")

    def node_flags(self) -> list[str]:
        """Return the flags of `ray start` for a machine that joins."""
        flags = {
            "node-manager-port": "node-manager", "object-manager-port": "object-manager",
            "dashboard-agent-grpc-port": "agent-grpc", "dashboard-agent-listen-port": "agent-http",
            "runtime-env-agent-port": "runtime-env-agent", "metrics-export-port": "metrics",
        }  # fmt: skip
        found = {name: self.port_of(service) for name, service in flags.items()} | self._worker_range("-")
        return [word for name, port in found.items() for word in (f"--{name}", str(port))]

    def _worker_range(self, between: str) -> dict[str, int]:
        names = (between.join((which, "worker", "port")) for which in ("min", "max"))
        return dict(zip(names, (self.first + len(SERVICES), self.last), strict=True))


def parse_ports(text: str | None) -> Ports | None:
    """Parse a range such as `20000-20999`; None for None. Raise InputError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip())
    found = Ports(int(match[1]), int(match[2])) if match else None
    if not found or not 1024 <= found.first <= found.last - MIN_PORT_COUNT + 1 or found.last > MAX_PORT:
        raise InputError(
            f"--ports is FIRST-LAST such as 20000-20999, {MIN_PORT_COUNT} ports or more from 1024 to {MAX_PORT}, not "
            f"{text!r}"
        )
    return found

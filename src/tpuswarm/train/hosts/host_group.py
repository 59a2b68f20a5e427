"""Which of several hosts a process is, as it was asked; read before JAX is loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError

PORT = 8490
"""Where host 0 listens if nobody says; the TPU's own software uses ports from 8470 on, JAX 8482."""


@dataclass(frozen=True)
class HostGroup:
    """Which of several hosts this process is."""

    count: int
    index: int
    at: str
    """HOST:PORT where host 0 listens for the others."""


def parse_host_group(
    count: int | None, index: int | None, at: str | None, environment: Mapping[str, str] = os.environ
) -> HostGroup | None:
    """What was asked, completed by what GKE and JAX's users set on the workers of a slice; None for one host.

    Raises InputError where something is missing.
    """
    if count is None:
        if index is not None or at is not None:
            raise InputError("--host and --hosts-at need --hosts")
        return None
    if count < 1:
        raise InputError(f"hosts must be 1 or more, not {count}")
    number = environment.get("TPU_WORKER_ID", "")
    first = environment.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0]
    index = int(number) if index is None and number.isdigit() else index
    at = f"{first}:{PORT}" if at is None and first else at
    if index is None or at is None:
        missing = [name for name, value in (("--host", index), ("--hosts-at", at)) if value is None]
        raise InputError(f"a run over {count} hosts also needs {' and '.join(missing)}")
    host_0(at, count, index)
    return HostGroup(count, index, at) if count > 1 else None


def host_0(address: str, count: int, index: int) -> tuple[str, int]:
    """Its name and port; InputError for what is no address, and for a host that is not of `count`."""
    place = parse_address(address, "the address of host 0")
    if not 0 <= index < count:
        raise InputError(f"there is no host {index} of {count}: hosts are numbered from 0")
    return place

"""Find the position of this process among the hosts of a run, before JAX is loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError

PORT = 8590
"""Default port of host 0. JAX's own is 8482 (jax/_src/clusters/cloud_tpu_cluster.py), libtpu's metrics use 8431."""


@dataclass(frozen=True)
class HostGroup:
    """The position of this process among the hosts of a run."""

    count: int
    index: int
    address: str
    """HOST:PORT where host 0 listens for the others."""


def parse_host_group(
    count: int | None, index: int | None, address: str | None, environment: Mapping[str, str] = os.environ
) -> HostGroup | None:
    """Return the group from the options, and the variables of a slice's workers; None for one host.

    Raise InputError if an option is missing or wrong.
    """
    if count is None:
        if index is not None or address is not None:
            raise InputError("--host and --hosts-at need --hosts")
        return None
    if count < 1:
        raise InputError(f"hosts must be 1 or more, not {count}")
    worker = environment.get("TPU_WORKER_ID", "")
    first_worker = environment.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0]
    if index is None and worker.isdigit():
        index = int(worker)
    if address is None and first_worker:
        address = f"{first_worker}:{PORT}"
    if index is None or address is None:
        missing = [name for name, value in (("--host", index), ("--hosts-at", address)) if value is None]
        raise InputError(f"a run over {count} hosts also needs {' and '.join(missing)}")
    parse_host_0(address, count, index)
    return HostGroup(count, index, address) if count > 1 else None


def parse_host_0(address: str, count: int, index: int) -> tuple[str, int]:
    """Return the name and port of host 0; raise InputError for a bad address or an index outside the group."""
    name_and_port = parse_address(address, "the address of host 0")
    if not 0 <= index < count:
        raise InputError(f"there is no host {index} of {count}: hosts are numbered from 0")
    return name_and_port

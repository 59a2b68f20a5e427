"""Find the position of this process among the hosts of a run, before JAX is loaded."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError
from tpuswarm.train.process import platform
from tpuswarm.train.process.metadata import metadata_host, read_local_machine
from tpuswarm.train.process.terminal import echo

PORT = 8590
"""Default port of host 0. JAX's own is 8482 (jax/_src/clusters/cloud_tpu_cluster.py), libtpu's metrics use 8431."""


@dataclass(frozen=True)
class HostGroup:
    """The position of this process among the hosts of a run."""

    count: int
    index: int
    address: str
    """HOST:PORT where host 0 listens for the others."""


class SliceWorker(NamedTuple):
    """The place of this machine in a slice of several workers."""

    number: int
    names: tuple[str, ...]
    """Host names or addresses of all workers."""


def find_slice_worker(environment: Mapping[str, str] = os.environ) -> SliceWorker | None:
    """Return the place of this machine in its slice; None if it is the only worker, or no worker.

    `tpuswarm exec`, jobs and GKE set variables; elsewhere Google's metadata server knows it.
    """
    number, names = environment.get("TPU_WORKER_ID", ""), environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    worker = SliceWorker(int(number), tuple(names)) if number.isdigit() and names[0] else None
    if worker is None and (platform.has_tpu() or "GCE_METADATA_HOST" in environment) and metadata_host():
        machine = read_local_machine()
        worker = SliceWorker(machine.number, machine.hosts) if machine else None
    return worker if worker and len(worker.names) > 1 else None


def find_host_group(
    count: int | None,
    index: int | None,
    address: str | None,
    *,
    run: str | Path | None,
    devices: str | int | list[int] = "all",
    is_dev_run: bool = False,
) -> HostGroup | None:
    """Return the group from the options; without any, that of this machine's slice. None for one host.

    Print whether a worker of a slice joins the others without being told to. Raise InputError like `parse_host_group`.
    """
    if count is not None or index is not None or address is not None:
        return parse_host_group(count, index, address)
    worker = find_slice_worker()
    if worker is None:
        return None
    place = f"this is worker {worker.number} of a slice of {len(worker.names)} workers"
    if reason := _reason_to_stay_alone(run, devices, is_dev_run):
        echo(f"{place}; it trains alone: {reason}", err=True)
        return None
    echo(f"{place}, which train together; --hosts 1 (hosts=1) trains on this one alone", err=True)
    return parse_host_group(len(worker.names), worker.number, f"{worker.names[0]}:{PORT}")


def _reason_to_stay_alone(run: str | Path | None, devices: str | int | list[int], is_dev_run: bool) -> str:
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return "JAX has started before"
    if is_dev_run:
        return "a fast dev run uses one host"
    if devices != "all":
        return f"devices={devices} selects devices of one host"
    if run is None:
        return "it needs a run (--run, run=) in a bucket or on a disk that all workers share to join them"
    return ""


def parse_host_group(
    count: int | None, index: int | None, address: str | None, environment: Mapping[str, str] = os.environ
) -> HostGroup | None:
    """Return the group from the options, completed by this machine's slice; None for one host.

    Raise InputError if an option is missing or wrong.
    """
    if count is None:
        if index is not None or address is not None:
            raise InputError("--host and --hosts-at need --hosts")
        return None
    if count < 1:
        raise InputError(f"hosts must be 1 or more, not {count}")
    if count == 1:
        return None
    if (index is None or address is None) and (worker := find_slice_worker(environment)):
        index = worker.number if index is None else index
        address = f"{worker.names[0]}:{PORT}" if address is None else address
    if index is None or address is None:
        missing = [name for name, value in (("--host", index), ("--hosts-at", address)) if value is None]
        raise InputError(f"a run over {count} hosts also needs {' and '.join(missing)}")
    parse_host_0(address, count, index)
    return HostGroup(count, index, address)


def parse_host_0(address: str, count: int, index: int) -> tuple[str, int]:
    """Return the name and port of host 0; raise InputError for a bad address or an index outside the group."""
    name_and_port = parse_address(address, "the address of host 0")
    if not 0 <= index < count:
        raise InputError(f"there is no host {index} of {count}: hosts are numbered from 0")
    return name_and_port

"""Training on the CPU of a machine that has a TPU, without having been told to."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
from jax._src import xla_bridge

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.process.platform import tpu_chips

SIGNS = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")
"""Variables that the set-up of a slice or of Kubernetes leaves. TPU_NAME is none: people set it for gcloud at home."""


@dataclass(frozen=True)
class Machine:
    """What can be seen of a machine without touching its chips."""

    chips: Sequence[str]
    """Device files of TPU chips."""
    environ: Mapping[str, str]
    asked: str
    """The platforms that the user chose, such as `cpu`; empty where the choice was left to JAX or to us."""
    libtpu: bool
    """Whether libtpu is installed."""
    error: str
    """Why JAX's TPU backend did not start; empty where it was not tried."""
    holders: Sequence[int]
    """Other processes that have the chips open, as far as this user may see."""


def this_machine() -> Machine:
    """What is seen now, after JAX's backends have started."""
    chips = tpu_chips()
    errors = getattr(xla_bridge, "_backend_errors", {})
    return Machine(
        chips=[str(chip) for chip in chips],
        environ=os.environ,
        # without chips, train/process/platform.py may have chosen
        asked=os.environ.get("JAX_PLATFORMS") or (chips and jax.config.values["jax_platforms"]) or "",
        libtpu=importlib.util.find_spec("libtpu") is not None,
        error=str(errors.get("tpu", "")),
        holders=holders(chips),
    )


def cpu_fallback(platform: str, machine: Machine) -> Finding | None:
    """The cause, where devices are CPUs although this is a TPU machine by its chips or its environment."""
    asked = machine.asked
    wanted = "tpu" in asked.split(",")
    signs = [] if asked else [name for name in SIGNS if machine.environ.get(name)]
    if platform != "cpu" or not (machine.chips or signs or wanted):
        return None
    if wanted:
        cause = f"JAX_PLATFORMS={asked} puts another platform first; use JAX_PLATFORMS=tpu,cpu"
    elif not machine.chips:
        cause = (
            f"{signs[0]}={machine.environ[signs[0]]} says TPU, but /dev has no accel* and no vfio/N; "
            "in a container, pass the devices through (docker run --privileged)"
        )
    elif asked:
        cause = f"JAX_PLATFORMS={asked} keeps JAX away from {machine.chips[0]}; unset it, or use JAX_PLATFORMS=tpu"
    elif not machine.libtpu:
        cause = f"{machine.chips[0]} exists, but libtpu is not installed; pip install 'tpuswarm[tpu]'"
    elif machine.holders:
        cause = (
            f"{machine.chips[0]} is used by process {machine.holders[0]}: only one process at a time can use a TPU; "
            "stop it (a notebook kernel counts too), then start again"
        )
    else:
        reason = machine.error.splitlines()[0] if machine.error else "JAX's TPU backend did not start"
        cause = (
            f"{machine.chips[0]} exists, but {reason}; if no process uses it (sudo lsof -w {machine.chips[0]}), "
            "remove /tmp/libtpu_lockfile"
        )
    return Finding("cpu-fallback", f"training on CPU, not on a TPU: {cause}", {"chips": len(machine.chips)})


def look(device: jax.Device) -> list[Finding]:
    """The finding for this machine, training on `device`."""
    if device.platform != "cpu":
        return []
    found = cpu_fallback(device.platform, this_machine())
    return [found] if found else []


def holders(files: Sequence[Path]) -> list[int]:
    """Other processes of this user (of everyone, for root) that have one of the files open."""
    wanted, found = {str(file) for file in files}, set()
    for link in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        with suppress(OSError):  # the process is gone, or not ours to look at
            if str(link.readlink()) in wanted:
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})

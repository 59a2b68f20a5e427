"""Find faults of the machine: CPU training beside a TPU, and environment variables without effect."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
from jax._src import xla_bridge

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.process.platform import tpu_device_files

TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")
"""Set on a slice or by Kubernetes. TPU_NAME is not among them: people set it for gcloud at home."""

XRT = "XRT, PyTorch/XLA's first runtime, is gone (pytorch/xla PR 5240); libtpu finds the chips itself: unset it"
HALF = "it belonged to PyTorch/XLA (deprecated in pytorch/xla PR 7150); use --precision bf16, the default on TPU"
MESH = "libtpu no longer reads it, and the hosts of a slice find each other through jax.distributed: unset it"
COLAB = "Colab's remote TPU nodes ended with JAX 0.4 (jax commit 85a84fd); a TPU VM needs no address: unset it"
DEAD_VARIABLES = {
    "XLA_USE_BF16": HALF,
    "XLA_DOWNCAST_BF16": HALF,
    "XLA_USE_FP16": HALF,
    "XLA_DOWNCAST_FP16": HALF,
    "XLA_USE_32BIT_LONG": "it belonged to PyTorch/XLA; integers are 32-bit here unless JAX_ENABLE_X64=1: unset it",
    "XLA_IR_DEBUG": "it belonged to PyTorch/XLA; --profile shows what runs on the devices",
    "XLA_HLO_DEBUG": "it belonged to PyTorch/XLA; --profile shows what runs on the devices",
    "PJRT_DEVICE": "it belongs to PyTorch/XLA; JAX reads JAX_PLATFORMS=tpu",
    "TPU_NUM_DEVICES": "it belongs to PyTorch/XLA; use --devices 8, or TPU_VISIBLE_CHIPS to choose what a process sees",
    "TPU_MESH_CONTROLLER_ADDRESS": MESH,
    "TPU_MESH_CONTROLLER_PORT": MESH,
    "COLAB_TPU_ADDR": COLAB,
    "TPU_DRIVER_MODE": COLAB,
}
"""Variables that jax, jaxlib and libtpu do not contain (a test checks it), and their replacements."""


@dataclass(frozen=True)
class Machine:
    """A machine, as a process sees it without touching the chips."""

    chips: Sequence[str]
    """Device files of TPU chips."""
    environ: Mapping[str, str]
    chosen_platforms: str
    """The platforms that the user chose, such as `cpu`; empty if the user chose none."""
    has_libtpu: bool
    error: str
    """Why JAX's TPU backend did not start; empty if JAX did not try."""
    holders: Sequence[int]
    """Other processes that have the chips open."""


def this_machine() -> Machine:
    """Return the state of this machine after JAX's backends have started."""
    chips = tpu_device_files()
    errors = getattr(xla_bridge, "_backend_errors", {})
    return Machine(
        chips=[str(chip) for chip in chips],
        environ=os.environ,
        # without chips, train/process/platform.py may have set jax_platforms
        chosen_platforms=os.environ.get("JAX_PLATFORMS") or (chips and jax.config.values["jax_platforms"]) or "",
        has_libtpu=importlib.util.find_spec("libtpu") is not None,
        error=str(errors.get("tpu", "")),
        holders=holders(chips),
    )


def cpu_fallback(platform: str, machine: Machine | None = None) -> list[Finding]:
    """Explain why the devices are CPUs although the machine has a TPU; machine: None for this one."""
    if platform != "cpu":
        return []
    machine = machine or this_machine()
    chosen = machine.chosen_platforms
    wants_tpu = "tpu" in chosen.split(",")
    variables = [] if chosen else [name for name in TPU_VARIABLES if machine.environ.get(name)]
    if not (machine.chips or variables or wants_tpu):
        return []
    if wants_tpu:
        cause = f"JAX_PLATFORMS={chosen} puts another platform first; use JAX_PLATFORMS=tpu,cpu"
    elif not machine.chips:
        cause = (
            f"{variables[0]}={machine.environ[variables[0]]} says TPU, but /dev has no accel* and no vfio/N; "
            "in a container, pass the devices through (docker run --privileged)"
        )
    elif chosen:
        cause = f"JAX_PLATFORMS={chosen} keeps JAX away from {machine.chips[0]}; unset it, or use JAX_PLATFORMS=tpu"
    elif not machine.has_libtpu:
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
    return [Finding("cpu-fallback", f"training on CPU, not on a TPU: {cause}", {"chips": len(machine.chips)})]


def holders(files: Sequence[Path]) -> list[int]:
    """Return other processes of this user (of everyone, for root) that have one of the files open."""
    paths, processes = {str(file) for file in files}, set()
    for link in Path("/proc").glob("[0-9]*/fd/*") if paths else ():
        with suppress(OSError):  # the process is gone, or belongs to another user
            if str(link.readlink()) in paths:
                processes.add(int(link.parts[2]))
    return sorted(processes - {os.getpid()})


def dead_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return one finding for each reason, with the variables that are set to no effect."""
    names_by_reason: dict[str, list[str]] = {}
    for name in sorted(environ):
        reason = XRT if name.startswith("XRT_") else DEAD_VARIABLES.get(name)
        if reason:
            names_by_reason.setdefault(reason, []).append(name)
    return [
        Finding("environment", f"{', '.join(names)} has no effect: {reason}", {"variables": names})
        for reason, names in names_by_reason.items()
    ]

"""Look at NVIDIA GPUs and their driver without opening them; refuse those that cannot train.

JAX's own errors appear after it has opened the GPUs, and some only at the first step:

- without a driver it uses the CPU silently (jax/_src/xla_bridge.py, `has_visible_nvidia_gpu`);
- CUDA 13 needs driver 580 and compute capability 7.5, CUDA 12 driver 525 and 5.2
  (docs.jax.dev/en/latest/installation.html, "NVIDIA GPU");
- it reserves 75% of each GPU's memory (docs.jax.dev/en/latest/gpu_memory_allocation.html).
"""

import ctypes
import importlib.util
import math
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpuswarm.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY_SHARE, OLD_MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The share of a GPU's memory that a process reserves; JAX refuses both at once (jaxlib/xla_client.py)."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ACCEPTED_SHARE = 0.9
"""XLA's allocator asks for its whole share, then for this part of it (kBackpedalFactor in tsl's bfc_allocator.cc)."""

MIN_DRIVERS = {12: "525", 13: "580"}
MIN_CAPABILITIES = {12: (5, 2), 13: (7, 5)}
OLDEST_CARDS = {12: "GTX 900", 13: "T4, RTX 20"}
"""By the CUDA version of JAX's plugin."""
CUDA_12 = "pip uninstall jax-cuda13-plugin jax-cuda13-pjrt and pip install 'tpuswarm[cuda12]'"

QUERY = "index,uuid,name,compute_cap,memory.total,memory.free"
NO_GPU = "train on the CPU with JAX_PLATFORMS=cpu"


class Card(NamedTuple):
    """One GPU, as nvidia-smi describes it; fields that it does not know are None."""

    number: str
    uuid: str
    name: str
    capability: tuple[int, int] | None
    total_bytes: int | None
    free_bytes: int | None

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"


def plugin_cuda_version() -> int | None:
    """Return the CUDA version of JAX's plugin; None if there is no plugin."""
    return next((version for version in (13, 12) if importlib.util.find_spec(f"jax_cuda{version}_plugin")), None)


def has_driver(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is there; WSL has it from Windows, without the usual device files."""
    is_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return is_wsl or (root / "dev/nvidiactl").exists()


def require_driver(asks_for_gpu: bool) -> None:
    """Raise InputError if JAX's plugin cannot use this machine's GPUs: without a driver, or with an old one.

    asks_for_gpu: JAX_PLATFORMS names GPUs, so that there must be one.
    """
    needed = plugin_cuda_version()
    if needed is None:
        return
    install = f"install NVIDIA's driver {MIN_DRIVERS[needed]} or later"
    if not has_driver():
        if _has_gpu_on_bus():
            raise InputError(
                f"this machine has an NVIDIA GPU and no driver for it: {install}, start a container with "
                f"--gpus all, or {NO_GPU}"
            )
        if asks_for_gpu:
            raise InputError(f"JAX_PLATFORMS asks for a GPU and there is no NVIDIA driver here: {install}, or {NO_GPU}")
        return
    supported = _driver_cuda_version()
    if supported and supported < (needed, 0):
        install += f", {CUDA_12}" if supported >= (12, 0) else ""
        raise InputError(
            f"NVIDIA's driver supports CUDA {_dotted(supported)} and JAX's plugin needs {needed}.0: {install}, "
            f"or {NO_GPU}"
        )


def _has_gpu_on_bus(root: Path = Path("/")) -> bool:
    for device in (root / "sys/bus/pci/devices").glob("*"):
        facts = [(device / name).read_text().strip() for name in ("vendor", "class")]
        if facts[0] == "0x10de" and facts[1].startswith("0x03"):  # NVIDIA, display controllers
            return True
    return False


def _driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver supports, with NVIDIA's packages for forward compatibility."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    failed = library.cuDriverGetVersion(ctypes.byref(version))
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def list_cards() -> list[Card]:
    """Return all GPUs, in the order of PCI addresses; none if nvidia-smi, which belongs to the driver, is missing."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    cards = [_parse_card(line) for line in done.stdout.splitlines() if line.count(",") == QUERY.count(",")]
    if done.returncode and not cards:  # it also fails for one lost card of several, or a warning
        reason = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
        raise InputError(f"NVIDIA's driver does not work: {reason.rstrip('.')}; correct that, or {NO_GPU}")
    return cards


def _parse_card(line: str) -> Card:
    number, uuid, name, capability, total, free = (field.strip() for field in line.split(","))
    sizes = (int(size) * 2**20 if size.isdigit() else None for size in (total, free))
    return Card(number, uuid, name, parse_capability(capability), *sizes)


def parse_capability(text: str) -> tuple[int, int] | None:
    """Return the compute capability of NVIDIA's form 7.5; None for AMD's architectures."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def select_cards(names: Sequence[str]) -> list[Card]:
    """Return the GPUs with these indices or UUIDs, as CUDA_VISIBLE_DEVICES names them; leave out unknown ones."""
    cards = list_cards() if names else []
    return [card for name in names for card in cards if name == card.number or card.uuid.startswith(name)]


def require_capability(cards: Sequence[Card]) -> None:
    """Raise InputError for a GPU that is too old for the CUDA of JAX's plugin."""
    for card in cards:
        if card.capability and (lack := capability_lack(card.capability)):
            raise InputError(f"{card} has {lack}, choose another GPU with {VISIBLE}, or {NO_GPU}")


def capability_lack(capability: tuple[int, int]) -> str:
    """Return why a compute capability is too low for the CUDA of JAX's plugin, and a way out; empty if it is not."""
    cuda = plugin_cuda_version() or max(MIN_CAPABILITIES)
    if capability >= MIN_CAPABILITIES[cuda]:
        return ""
    way_out = CUDA_12 if capability >= MIN_CAPABILITIES[12] else "no CUDA of JAX supports it"
    return (
        f"compute capability {_dotted(capability)}, and CUDA {cuda} needs {_dotted(MIN_CAPABILITIES[cuda])} or later "
        f"({OLDEST_CARDS[cuda]}): {way_out}"
    )


def require_free_memory(cards: Sequence[Card]) -> None:
    """Raise InputError for a GPU without room for what JAX reserves, because another process uses it."""
    reserves = os.environ.get(PREALLOCATE) not in ("false", "False", "0")
    if not reserves or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return
    share = memory_share()
    if share > 1:  # in memory that the GPU and the host share
        return
    accepted = ACCEPTED_SHARE * share
    for card in cards:
        if card.total_bytes and card.free_bytes is not None and card.free_bytes < accepted * card.total_bytes:
            possible = math.floor(90 * card.free_bytes / card.total_bytes) / 100
            less = f", or reserve less with {_memory_variable()}={possible}" if possible else ""
            raise InputError(
                f"{card} has {card.free_bytes / 2**30:.1f} of {card.total_bytes / 2**30:.1f} GiB free and JAX reserves "
                f"{share:.0%} at once: stop the process that uses it (see nvidia-smi), choose another GPU with "
                f"{VISIBLE}{less}"
            )


def memory_share() -> float:
    """Return the share of a GPU's memory that a process reserves. Raise InputError for a wrong variable."""
    text = os.environ.get(_memory_variable()) or "0.75"
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_memory_variable()} is a share of a GPU's memory such as 0.5, not {text!r}") from None


def _memory_variable() -> str:
    return OLD_MEMORY_SHARE if os.environ.get(OLD_MEMORY_SHARE) else MEMORY_SHARE


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

"""Configure JAX before its backends start; find devices and cache folders.

Functions import JAX themselves, so that commands which need only a cache folder start fast.
"""

import ctypes
import importlib.util
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError
from tpuswarm.train.process import nvidia
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    import jax

NICENESS = 10
"""A tenth of the CPU share of a normal process."""

VISIBLE = {"tpu": "TPU_VISIBLE_CHIPS", "gpu": nvidia.VISIBLE}

JAX_ADVICE = re.compile(r" \((set JAX_PLATFORMS|you may need to uninstall).*\)$")
"""The end of JAX's error for a backend that does not start (jax/_src/xla_bridge.py, `backends`)."""
PLUGIN_FAILS = "its CUDA plugin does not load, for the reason that it logs above"

_default_platforms = ""
"""JAX's platforms, if `configure_jax` chose them."""


def cache_folder(name: str) -> Path:
    """Return a folder in `$TPUSWARM_CACHE` or `~/.cache/tpuswarm`; if that cannot be written, in a temporary folder."""
    usual = os.environ.get("TPUSWARM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tpuswarm"
    base = Path(os.path.expanduser(usual))  # noqa: PTH111  # keeps ~ if this user has no home
    if not _may_create(base):
        base = _temporary_cache()
        echo(f"note: {usual} cannot be written, so the cache is {base}; TPUSWARM_CACHE names another", err=True)
        os.environ["TPUSWARM_CACHE"] = str(base)  # for this process and those that it starts
        os.environ.setdefault("MPLCONFIGDIR", str(base / "matplotlib"))
    return base / name


def _may_create(folder: Path) -> bool:
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and folder.parts[0] != "~"


def _temporary_cache() -> Path:
    """Return the same private folder each time, or a new one if somebody else has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"tpuswarm-cache-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_ours else Path(tempfile.mkdtemp(prefix="tpuswarm-cache-"))


def tpu_device_files(root: Path = Path("/")) -> list[Path]:
    """Return the device files of the TPU chips: /dev/accelN (v2 to v4) or /dev/vfio/N (v5e and later).

    The folder /dev/vfio, with a file vfio, exists on machines without chips too.
    """
    return sorted([*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")])


def count_tpu_chips(root: Path = Path("/")) -> int:
    """Count chips by PCI address: one of TPU7x has two device files, for its two functions (ray-project/ray 65105)."""
    chips = set()
    for file in tpu_device_files(root):
        addresses = sorted((root / f"sys/kernel/iommu_groups/{file.name}/devices").glob("*"))
        chips.add(addresses[0].name.rpartition(".")[0] if addresses else file.name)
    return len(chips)


def has_tpu() -> bool:
    return bool(tpu_device_files())


def has_gpu() -> bool:
    """Whether an NVIDIA device and its JAX plugin are present."""
    return nvidia.plugin_cuda_version() is not None and nvidia.has_driver()


def count_gpus(root: Path = Path("/")) -> int:
    """Count GPUs by their device files, or, as WSL has none, by nvidia-smi."""
    if not has_gpu():
        return 0
    return len(list((root / "dev").glob("nvidia[0-9]*"))) or len(nvidia.list_cards()) or 1


def visible_devices(kind: str, count: int) -> list[str]:
    """Return the names of the devices that the variable of their library leaves visible; of GPUs also UUIDs.

    Raise InputError for a number that does not exist, and if all GPUs are hidden.
    """
    value = os.environ.get(VISIBLE[kind])
    if value is None or not count or (kind == "tpu" and not value):
        return [str(index) for index in range(count)]
    names = [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]
    if wrong := [name for name in names if name.isdigit() and int(name) >= count]:
        raise InputError(f"{VISIBLE[kind]}={value}: this machine has {count}, numbered from 0, and no {wrong[0]}")
    if not names:
        hidden = "this machine's GPU" if count == 1 else f"all {count} GPUs of this machine"
        raise InputError(f"{VISIBLE[kind]}={value} hides {hidden}: unset it, or {nvidia.NO_GPU}")
    return names


def require_gpus(names: Sequence[str]) -> list[nvidia.Card]:
    """Return what is known about these GPUs. Raise InputError if JAX cannot use them."""
    cards = nvidia.select_cards(names)
    nvidia.require_capability(cards)
    return cards


def load_jax() -> None:
    """Import JAX; InputError if it or XLA rejects an environment variable."""
    if "jax" in sys.modules:
        return
    with _checked_xla_flags():
        _import_jax()


@contextmanager
def _checked_xla_flags() -> Iterator[None]:
    """Raise InputError for flags on which XLA would end this process; another one tries them meanwhile."""
    if not os.environ.get("XLA_FLAGS"):
        yield
        return
    words = [sys.executable, "-c", "import jaxlib.xla_client as client; client.make_cpu_client()"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trial:
        yield
        if rejected := re.search(r"\] (.*XLA_FLAGS.*)", trial.communicate()[1]):
            raise InputError(f"XLA does not take an environment variable: {rejected[1]}; correct or unset it")


def _import_jax() -> None:
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not (has_tpu() or has_gpu()):
        keep_freed_memory()  # before a second thread starts
    try:
        with waiting("loading JAX", delay_s=0.0):
            import jax  # noqa: F401
    except ValueError as error:
        raise InputError(f"JAX does not take an environment variable: {error}; correct or unset it") from error


def configure_jax(deterministic: bool = False) -> None:
    """Choose JAX's platforms, enable its persistent compilation cache, tune memory allocation; idempotent.

    Without a TPU an installed libtpu prints errors, so JAX must not look for one. JAX_PLATFORMS takes precedence.
    deterministic: GPU kernels repeat bit for bit.
    """
    global _default_platforms
    load_jax()
    import jax

    if has_gpu():
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that numbers are those of nvidia-smi
    if deterministic and "--xla_gpu_deterministic_ops" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    if not jax.config.values["jax_platforms"] and importlib.util.find_spec("libtpu") and not has_tpu():
        _default_platforms = "cuda,cpu" if has_gpu() else "cpu"
        jax.config.update("jax_platforms", _default_platforms)
    if jax.config.values["jax_platforms"] == "cpu" or not (has_tpu() or has_gpu()):
        keep_freed_memory()  # before XLA's threads allocate
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def lower_priority() -> None:
    """On Linux, yield to other processes of this session if this one trains on CPUs.

    Linux keeps a niceness for each thread; new threads inherit it. Where it divides CPUs between sessions first
    (sched(7), autogroup), this session keeps its share beside the others: with less, its coordinator and a member that
    returns would wait for whatever else the machine does.
    """
    import jax

    if jax.default_backend() != "cpu":
        return
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # the thread has ended
            number = int(thread.name)
            os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory instead of returning it to the system; no effect without mallopt.

    XLA on CPU allocates the temporaries of each step anew. Otherwise a step of gpt2-tiny takes 13,000 page faults and
    a third more time (docs/benchmarks.md). Blocks above 128 MiB still return: their gaps would double the memory of a
    large model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8  # malloc.h
        mallopt(mmap_threshold, 128 * 2**20)
        mallopt(trim_threshold, 512 * 2**20)
        mallopt(arena_max, 1)


def local_devices() -> "list[jax.Device]":
    """Return the devices of this process; InputError if the chosen platform does not start."""
    import jax

    configure_jax()
    platforms = jax.config.values["jax_platform_name"] or jax.config.values["jax_platforms"]
    is_chosen = platforms and platforms != _default_platforms
    wants_gpu = platforms.split(",")[0] in ("cuda", "gpu") if is_chosen else not has_tpu()
    if wants_gpu:
        nvidia.require_driver(bool(is_chosen))
        require_gpus(visible_devices("gpu", count_gpus()))
    no_gpu = f"see nvidia-smi for its state and its processes, or {nvidia.NO_GPU}"
    try:
        devices = list(jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # AssertionError: the plugin is not installed
        reason = str(error).splitlines()[0] if str(error) else "that platform is not installed here"
        if wants_gpu and has_gpu():
            reason = PLUGIN_FAILS if "known backends" in reason else JAX_ADVICE.sub("", reason)
            raise InputError(f"JAX cannot start this machine's GPU ({reason}): {no_gpu}") from error
        raise InputError(f"JAX finds no devices (JAX_PLATFORMS={platforms}): {reason}; correct or unset it") from error
    if wants_gpu and has_gpu() and devices[0].platform == "cpu":  # JAX goes on without its plugin
        raise InputError(f"JAX cannot start this machine's GPU ({PLUGIN_FAILS}): {no_gpu}")
    return devices


def require_free_memory(devices: "Sequence[jax.Device]") -> None:
    """Raise InputError for a GPU that other processes use, unless this one has allocated memory there."""
    gpus = {device.local_hardware_id: device.memory_stats() for device in devices if device.platform == "gpu"}
    unused = [number for number, stats in gpus.items() if stats and not stats.get("num_allocs")]
    names = visible_devices("gpu", count_gpus()) if unused else []
    nvidia.require_free_memory(nvidia.select_cards([names[number] for number in unused if number < len(names)]))

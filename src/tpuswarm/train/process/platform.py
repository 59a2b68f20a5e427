"""What must be set before JAX starts its backends, and where this user's caches live.

JAX is imported where it is needed: who asks for a cache's folder does not wait for it.
"""

import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    import jax

NICENESS = 10
"""Of a process that trains on processors which others may need: a tenth of the weight of one that does not."""


def cache_folder(name: str) -> Path:
    """A folder of this user's cache: `$TPUSWARM_CACHE` or `~/.cache/tpuswarm`."""
    base = os.environ.get("TPUSWARM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tpuswarm"
    return Path(base).expanduser() / name


def tpu_chips() -> list[Path]:
    """Device files of this machine's TPU chips: /dev/accel* (v2 to v4) or /dev/vfio/N (v5e and later)."""
    return sorted([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def has_tpu() -> bool:
    """Whether this machine shows TPU chips."""
    return bool(tpu_chips())


def has_gpu() -> bool:
    """Whether there is an NVIDIA device and JAX's plugin for it."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return plugin and Path("/dev/nvidiactl").exists()


def load_jax() -> None:
    """Import JAX, which reads its settings then; InputError for one that it does not take."""
    if "jax" in sys.modules:
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not (has_tpu() or has_gpu()):
        keep_freed_memory()  # before there is a second thread
    try:
        with waiting("loading JAX", short=0.0):
            import jax  # noqa: F401
    except ValueError as error:
        raise InputError(f"JAX does not take an environment variable: {error}; correct or unset it") from error


def configure_jax(deterministic: bool = False) -> None:
    """Choose JAX's platforms, turn on its persistent compilation cache, set up the memory; nothing changes twice.

    An installed libtpu prints errors on a machine without a TPU unless JAX is told not to look for one; a platform
    chosen by the user (JAX_PLATFORMS) stands. `deterministic` makes GPU kernels repeat bit for bit.
    """
    load_jax()
    import jax

    if deterministic and "--xla_gpu_deterministic_ops" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    if not jax.config.values["jax_platforms"] and importlib.util.find_spec("libtpu") and not has_tpu():
        jax.config.update("jax_platforms", "cuda,cpu" if has_gpu() else "cpu")
    if jax.config.values["jax_platforms"] == "cpu" or not (has_tpu() or has_gpu()):
        keep_freed_memory()  # before XLA's threads allocate
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def lower_priority() -> None:
    """Let everything else on this machine go first, if this process trains on its processors; Linux.

    A member that comes back beside others on the same cores starts in half the time (docs/benchmarks.md), and whoever
    works on the machine meanwhile notices less of it. Linux keeps a niceness for each thread, which new ones inherit,
    and where it shares processors out among sessions first, one for each session (sched(7), autogroup): this session's
    is changed unless a terminal is its own, whose other programs would be slowed down as well.
    """
    import jax

    if jax.default_backend() != "cpu":
        return
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # it has ended since
            number = int(thread.name)
            os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:  # no terminal
        with suppress(OSError):  # a Linux without it
            Path("/proc/self/autogroup").write_text(str(NICENESS))


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed for the next allocation; does nothing where the C library has no mallopt.

    XLA on CPU allocates a step's temporaries anew at every step, and glibc gives blocks that large back to the system
    each time: a step of gpt2-tiny then takes 13,000 page faults and a third longer (docs/benchmarks.md). Blocks above
    128 MiB still go back: kept, they would leave gaps that double the memory of a large model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8  # malloc.h
        mallopt(mmap_threshold, 128 * 2**20)
        mallopt(trim_threshold, 512 * 2**20)
        mallopt(arena_max, 1)


def local_devices() -> "list[jax.Device]":
    """This process's devices; InputError in one sentence where the chosen platform does not start."""
    import jax

    configure_jax()
    try:
        return list(jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # a platform whose plugin is not installed fails an assertion
        reason = str(error).splitlines()[0] if str(error) else "that platform is not installed here"
        raise InputError(
            f"JAX finds no devices (JAX_PLATFORMS={jax.config.values['jax_platforms']}): {reason}; correct or unset it"
        ) from error

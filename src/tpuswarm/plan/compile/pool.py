"""Compile several requests in parallel, each in a separate process with a time limit."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpuswarm.catalog import Gpu
from tpuswarm.errors import InputError
from tpuswarm.plan.compile.cache import PlanCache, cache_key
from tpuswarm.plan.compile.request import CompileRequest, CompileResult
from tpuswarm.train.process.nvidia import capability_lack, parse_capability, plugin_cuda_version
from tpuswarm.train.settings import check_batch

COMPILE_TIMEOUT_S = 3600.0
"""GPT-2 1558M with its largest batch takes a few minutes."""
COMPILE_MEMORY_BYTES = 2.5 * 2**30
"""Peak of one compilation of a large program (docs/plan.md)."""
EXIT_GRACE_S = 5.0
MAX_COMPILATIONS = 8
WITHOUT_GPU = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Autotuning needs a GPU. XLA's own products are poor without it, so cuBLAS computes all."""
NEEDS_COMPILER = "whether it fits, its largest micro-batch, its memory and its hazards are unknown"

Report = Callable[[CompileRequest, str], None]


class CompilePool:
    """Takes results from the cache, or compiles."""

    def __init__(self, cache: PlanCache, report: Report, timeout_s: float = COMPILE_TIMEOUT_S):
        self._cache, self._report, self._timeout_s = cache, report, timeout_s
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_cancelled = False
        self.cache_error = ""
        """Why results could not be cached."""

    def results(self, requests: Sequence[CompileRequest]) -> Iterator[tuple[CompileRequest, CompileResult]]:
        """Yield each request with its result as results arrive.

        Raise InputError if all fail alike: a wrong recipe, or a batch that no slice can divide.
        """
        problems = [_batch_problem(request) for request in requests]
        if all(problems):
            raise InputError(problems[0])
        pending = []
        for request, problem in zip(requests, problems, strict=True):
            key = cache_key(request, _environment(request))
            result = CompileResult(None, problem=problem) if problem else self._cache.get(key)
            if result is None:
                pending.append((request, key))
            else:
                yield request, result
        pool = ThreadPoolExecutor(max_parallel(len(pending)))
        try:
            futures = {pool.submit(self._compile, request, key): request for request, key in pending}
            for done in as_completed(futures):
                yield futures[done], done.result()
        finally:
            self._is_cancelled = True
            for process in list(self._running):
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _compile(self, request: CompileRequest, key: str | None) -> CompileResult:
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpuswarm.plan.compile.process"],  # -P: import nothing from this folder
                env=_environment(request), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
            self._running.add(process)
            self._report(request, "compiling")
            timed_out = threading.Event()

            def stop() -> None:
                timed_out.set()
                process.kill()

            timer = threading.Timer(self._timeout_s, stop)
            timer.start()
            try:
                answer = {} if self._is_cancelled else self._listen(process, request)
                if not answer and not self._is_cancelled:
                    with suppress(subprocess.TimeoutExpired):  # wait for its own exit code
                        process.wait(EXIT_GRACE_S)
            finally:
                timer.cancel()
                process.kill()
                code = process.wait()
                with suppress(BrokenPipeError), process:  # close its pipes; one may hold an unread request
                    pass
                self._running.discard(process)
            if "refused" in answer:
                raise InputError(answer["refused"])
            if "failed" in answer:
                return CompileResult(None, problem=answer["failed"])
            if "result" not in answer:
                log.seek(0)
                output = log.read().decode(errors="replace")
                return CompileResult(None, problem=_exit_reason(code, timed_out.is_set(), self._timeout_s, output))
        result = CompileResult.from_json(answer["result"])
        try:
            self._cache.put(key, result, answer["dependencies"])
        except OSError as error:
            self.cache_error = f"the answers could not be cached: {error}"
        return result

    def _listen(self, process: "subprocess.Popen[bytes]", request: CompileRequest) -> dict[str, Any]:
        """Return the answer of a process; empty if it ends without one."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            process.stdin.flush()  # and stays open: the process ends when it closes
        except BrokenPipeError:
            return {}
        for line in process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "progress" not in answer:
                return answer
            self._report(request, answer["progress"])
        return {}


def _batch_problem(request: CompileRequest) -> str:
    """Return why the slice cannot divide the requested batch, if so."""
    options = request.options
    if options.batch is None:
        return ""
    try:
        check_batch(options.batch, request.target.devices, options.accumulate or 1, can_use_fewer=False)
    except InputError as error:
        return str(error)
    return ""


def max_parallel(requests: int) -> int:
    """Return how many compilations cores and free memory allow at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux, where libtpu does not exist either
        free = int(cores * COMPILE_MEMORY_BYTES)
    return max(1, min(requests, cores, MAX_COMPILATIONS, int(free // COMPILE_MEMORY_BYTES)))


def no_compiler() -> str:
    """Return why nothing can be compiled for TPU here, if so, and what helps."""
    if importlib.util.find_spec("libtpu"):
        return ""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return f"libtpu, the TPU compiler, is not installed: {NEEDS_COMPILER}; pip install 'tpuswarm[plan]'"
    return (
        f"libtpu, the TPU compiler, does not exist for {platform.system()} on {platform.machine()}, only for Linux on "
        f"x86_64: {NEEDS_COMPILER}"
    )


def no_gpu_compiler(gpu: Gpu) -> str:
    """Return why nothing can be compiled for a GPU here, if so, and what helps."""
    if plugin_cuda_version() is not None:
        capability = parse_capability(gpu.compute_capability)
        return capability_lack(capability) if capability else ""
    return "JAX's CUDA plugin, the GPU compiler, is not installed: on Linux, pip install 'tpuswarm[cuda]' (5 GB)"


def other_libtpu() -> str:
    """Return a warning if the installed libtpu is not the one that jax requires."""
    try:
        installed = importlib.metadata.version("libtpu")
        required = next(line for line in importlib.metadata.requires("jax") or () if line.startswith("libtpu"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return ""
    pin = re.match(r"libtpu\s*==\s*([\d.]+?)(\.\*)?\s*(;|$)", required)
    if pin is None or installed == pin[1] or (pin[2] and f"{installed}.".startswith(f"{pin[1]}.")):
        return ""
    jax, version = importlib.metadata.version("jax"), f"{pin[1]}{pin[2] or ''}"
    return (
        f"libtpu {installed} is installed but jax {jax} needs {version}: these answers come from another compiler and "
        f"may not hold on a TPU; pip install 'libtpu=={version}'"
    )


def _environment(request: CompileRequest) -> dict[str, str]:
    """Return the environment of a compiling process: it uses no TPU or GPU and no lock, and logs little."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(request.target.devices if request.lower_only else 1),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # else JAX's note about filtering hides the error
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if request.target.platform == "cuda":
        environment |= {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # without a driver
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {WITHOUT_GPU}".strip(),
        }
    return environment


def _exit_reason(code: int, timed_out: bool, timeout_s: float, output: str) -> str:
    """Explain why a process gave no answer."""
    if timed_out:
        return f"the compiler was stopped after {timeout_s:,.0f} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = f"; its last output: {lines[-1][:300]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"the compiler was killed (signal 9), as Linux does when memory runs out{last}"
    if code < 0:
        return f"the compiler crashed ({signal.Signals(-code).name}){last}"
    return f"the compiler ended with status {code} and no answer{last}"

"""Compilations in processes of their own, several at a time, each with its time, its memory and its last words."""

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

from tpuswarm.errors import InputError
from tpuswarm.plan.cache import Cache, question
from tpuswarm.plan.order import Found, Order
from tpuswarm.train.settings import check_batch

SECONDS = 3600.0
"""One slice may take so long; GPT-2 1558M with its largest batch takes a few minutes."""
BYTES = 2.5 * 2**30
"""What one compilation of a large program takes at its worst (docs/plan.md)."""
ENDING = 5.0
"""Seconds for a process without an answer to end by itself."""
MOST = 8
"""Compilations at the same time; each keeps one core or two busy."""
MISSING = "whether it fits, its largest micro-batch, its memory and its hazards are unknown"
"""What only the compiler says."""

Say = Callable[[Order, str], None]


class Children:
    """Answers orders from the cache, or by processes that end when they are done, too slow, or no longer wanted."""

    def __init__(self, cache: Cache, say: Say, seconds: float = SECONDS):
        self._cache, self._say, self._seconds = cache, say, seconds
        self._running: set[subprocess.Popen[bytes]] = set()
        self._unwanted = False
        self.unkept = ""
        """Why answers could not be kept, in words."""

    def answers(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Found]]:
        """Each order with its answer, in the order in which they come.

        Raises InputError for what is wrong with all of them: a recipe that does not import or trace, a batch that the
        devices of none of them divide.
        """
        wrong = [_indivisible(order) for order in orders]
        if all(wrong):
            raise InputError(wrong[0])
        waiting = []
        for order, problem in zip(orders, wrong, strict=True):
            key = question(order, _environment(order))
            found = Found(None, problem=problem) if problem else self._cache.get(key)
            if found is None:
                waiting.append((order, key))
            else:
                yield order, found
        pool = ThreadPoolExecutor(workers(len(waiting)))
        try:
            answered = {pool.submit(self._compile, order, key): order for order, key in waiting}
            for done in as_completed(answered):
                yield answered[done], done.result()
        finally:
            self._unwanted = True
            for process in list(self._running):
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _compile(self, order: Order, key: str) -> Found:
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpuswarm.plan.child"],  # -P: what lies here is no library
                env=_environment(order), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
            )  # fmt: skip
            self._running.add(process)
            self._say(order, "compiling")
            late = threading.Event()

            def stop() -> None:
                late.set()
                process.kill()

            slow = threading.Timer(self._seconds, stop)
            slow.start()
            try:
                answer = {} if self._unwanted else self._listen(process, order)
                if not answer and not self._unwanted:
                    with suppress(subprocess.TimeoutExpired):  # killed on its way out, it would seem to lack memory
                        process.wait(ENDING)
            finally:
                slow.cancel()
                process.kill()
                code = process.wait()
                with suppress(BrokenPipeError), process:  # closes its pipes; in one may be an order that nobody read
                    pass
                self._running.discard(process)
            if "refused" in answer:
                raise InputError(answer["refused"])
            if "failed" in answer:
                return Found(None, problem=answer["failed"])
            if "found" not in answer:
                words.seek(0)
                last = words.read().decode(errors="replace")
                return Found(None, problem=_ended(code, late.is_set(), self._seconds, last))
        found = Found.of(answer["found"])
        try:
            self._cache.put(key, found, answer["rests"])
        except OSError as error:
            self.unkept = f"the answers could not be cached: {error}"
        return found

    def _listen(self, process: "subprocess.Popen[bytes]", order: Order) -> dict[str, Any]:
        """The answer of a process; empty if it ends without one."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            process.stdin.flush()  # and left open: the child ends when it closes
        except BrokenPipeError:
            return {}
        for line in process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "say" not in answer:
                return answer
            self._say(order, answer["say"])
        return {}


def _indivisible(order: Order) -> str:
    """Why the batch that was asked for cannot be split over the slice's devices; empty where it can."""
    asked = order.asked
    if asked.batch is None:
        return ""
    try:
        check_batch(asked.batch, order.place.devices, asked.accumulate or 1, fewer=False)
    except InputError as error:
        return str(error)
    return ""


def workers(orders: int) -> int:
    """How many compilations run at the same time: what cores and free memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: there is nothing to compile with either
        free = int(cores * BYTES)
    return max(1, min(orders, cores, MOST, int(free // BYTES)))


def no_compiler() -> str:
    """Why nothing can be compiled for TPU here, and what helps; empty where it can."""
    if importlib.util.find_spec("libtpu"):
        return ""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return f"libtpu, the TPU compiler, is not installed: {MISSING}; pip install 'tpuswarm[plan]'"
    return (
        f"libtpu, the TPU compiler, does not exist for {platform.system()} on {platform.machine()}, only for Linux on "
        f"x86_64: {MISSING}"
    )


def other_libtpu() -> str:
    """A sentence where the libtpu that is installed is not the one that jax asks for; else empty."""
    try:
        have = importlib.metadata.version("libtpu")
        wants = next(each for each in importlib.metadata.requires("jax") or () if each.startswith("libtpu"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return ""
    wanted = re.match(r"libtpu\s*==\s*([\d.]+?)(\.\*)?\s*(;|$)", wants)
    if wanted is None or have == wanted[1] or (wanted[2] and f"{have}.".startswith(f"{wanted[1]}.")):
        return ""
    jax, pin = importlib.metadata.version("jax"), f"{wanted[1]}{wanted[2] or ''}"
    return (
        f"libtpu {have} is installed but jax {jax} needs {pin}: these answers come from another compiler and may not "
        f"hold on a TPU; pip install 'libtpu=={pin}'"
    )


def _environment(order: Order) -> dict[str, str]:
    """A compiling process's: it looks for no TPU, needs no lock, and keeps quiet."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(order.place.devices if order.lower_only else 1),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # a note of JAX's about filtering would be its last words
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _ended(code: int, late: bool, seconds: float, words: str) -> str:
    """What became of a process that gave no answer."""
    if late:
        return f"the compiler was stopped after {seconds:,.0f} s"
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    last = f"; its last output: {lines[-1][:300]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"the compiler was killed (signal 9), as Linux does when memory runs out{last}"
    if code < 0:
        return f"the compiler crashed ({signal.Signals(-code).name}){last}"
    return f"the compiler ended with status {code} and no answer{last}"

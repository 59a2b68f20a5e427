"""Run one command on many hosts at once: stream their output, log it, and report how it ended on each."""

import asyncio
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.remote_process import RemoteProcess

MAX_LINE_BYTES = 1 << 20
MAX_LOG_FOLDERS = 20
KILL_TIMEOUT_S = 3.0
"""After the second Ctrl-C, wait this long for the hosts."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OnLines = Callable[[str, list[bytes], bool], None]
"""Called with a host's label, whole lines without their ends, and whether they are standard error."""


class LineBuffer:
    """Splits the bytes of a stream into lines; splits lines above `MAX_LINE_BYTES`."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete now."""
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            self._rest += head
            yield from bytes(self._rest).split(b"\n")
            self._rest = bytearray(tail)
        else:
            self._rest += data
        while len(self._rest) > MAX_LINE_BYTES:
            yield bytes(self._rest[:MAX_LINE_BYTES])
            del self._rest[:MAX_LINE_BYTES]

    def end(self) -> Iterator[bytes]:
        """Yield the last line if it has no end."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()


@dataclass(frozen=True)
class HostResult:
    """How the command ended on a host."""

    host: Host
    code: int | None
    """None if the command may still run."""
    reason: str
    """`exit 1`, or an error."""


@dataclass(frozen=True)
class CommandResult:
    """How the command ended on all hosts."""

    hosts: Sequence[HostResult]
    is_interrupted: bool

    @property
    def code(self) -> int:
        """The exit code that all hosts share, else 1."""
        codes = {result.code for result in self.hosts}
        return codes.pop() or 0 if len(codes) == 1 and None not in codes else 1

    def summary(self) -> str:
        """Return `7/8 ok · node-3/1: exit 1`, with hosts grouped by their error."""
        failed = [result for result in self.hosts if result.code != 0]
        parts = [f"{len(self.hosts) - len(failed)}/{len(self.hosts)} ok"]
        for reason, count in Counter(result.reason for result in failed).items():
            labels = [result.host.label for result in failed if result.reason == reason]
            more = f" and {count - 3} more" if count > 3 else ""
            parts.append(f"{', '.join(labels[:3])}{more}: {reason}")
        return " · ".join(parts)


def make_log_folder(base: Path) -> Path:
    """Create a folder for the logs of one command; delete the oldest ones."""
    base.mkdir(parents=True, exist_ok=True)
    for old in sorted(base.iterdir())[: -MAX_LOG_FOLDERS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=base))


class ParallelCommand:
    """One command on all hosts. Ctrl-C ends it on all of them, a second Ctrl-C at once."""

    def __init__(self, key: Path, logs: Path, on_lines: OnLines, notify: Callable[[str], None]):
        """notify: prints our own messages."""
        self._key, self._logs, self._on_lines, self._notify = key, logs, on_lines, notify
        self.waiting: dict[str, None] = {}
        """Labels of hosts where it has not ended."""
        self._running: dict[str, RemoteProcess] = {}
        self._stops = 0

    async def run(
        self, hosts: Sequence[Host], line: Callable[[Host], str], time_out_s: float | None = None
    ) -> CommandResult:
        """Run each host's line. time_out_s: for each host; then the command is ended there."""
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        self.waiting.update(dict.fromkeys(host.label for host in hosts))
        results: dict[Host, int | TpuswarmError] = {}
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            async with Connections(self._key) as connections:

                async def run_one(host: Host) -> None:
                    results[host] = await self._run_one(connections, host, line(host))

                self._work = asyncio.ensure_future(fan_out(hosts, run_one, time_out_s=time_out_s))
                with suppress(asyncio.CancelledError):  # by a second Ctrl-C
                    for host, error in zip(hosts, await self._work, strict=True):
                        if error is not None:
                            results[host] = error
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        return CommandResult([_host_result(host, results.get(host)) for host in hosts], self._stops > 0)

    async def _run_one(self, connections: Connections, host: Host, line: str) -> int:
        path = self._logs / f"{host.label.replace('/', '.')}.log"
        log: IO[bytes] | None = None
        is_full = False
        buffers = {False: LineBuffer(), True: LineBuffer()}

        def on_output(data: bytes, is_error: bool) -> None:
            nonlocal log, is_full
            try:
                if not is_full:
                    log = log or path.open("ab", buffering=0)
                    log.write(data)
            except OSError as error:
                is_full = True
                self._notify(f"{path} ends here: {error.strerror}")
            if lines := list(buffers[is_error].feed(data)):
                self._on_lines(host.label, lines, is_error)

        process = self._running[host.label] = RemoteProcess(connections, host, line)
        if self._stops:
            process.end(now=self._stops > 1)
        try:
            return await process.run(on_output)
        finally:
            for is_error, buffer in buffers.items():
                if last := list(buffer.end()):
                    self._on_lines(host.label, last, is_error)
            if log is not None:
                log.close()
            del self._running[host.label]
            self.waiting.pop(host.label, None)

    def stop(self) -> None:
        """Handle a Ctrl-C: end the command, the second time at once, the third time without waiting for hosts."""
        self._stops += 1
        for process in self._running.values():
            process.end(now=self._stops > 1)
        count = len(self.waiting)
        if self._stops == 1:
            self._notify(f"asked it to end on {count} host{'s' * (count != 1)}; Ctrl-C again ends it at once")
        elif self._stops == 2:
            asyncio.get_running_loop().call_later(KILL_TIMEOUT_S, self._work.cancel)
        else:
            self._work.cancel()


def _host_result(host: Host, result: int | TpuswarmError | None) -> HostResult:
    if result is None:
        return HostResult(host, None, "no longer answers; the command may still run there")
    if isinstance(result, TpuswarmError):
        return HostResult(host, None, str(result).removeprefix(f"{host.label} ({host.address}) "))
    is_signal = result > 128 and result - 128 in set(signal.Signals)
    name = f" ({signal.Signals(result - 128).name})" if is_signal else ""
    return HostResult(host, result, f"exit {result}{name}")

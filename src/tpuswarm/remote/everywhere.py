"""One command on many hosts at once: what all of them print, as it comes, and how it ended on each."""

import asyncio
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.attended import Attended
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.lines import Lines

KEPT = 20
"""Folders with logs; those of older commands are deleted."""
ENDS = 3.0
"""Seconds that hosts have to end a command at once, before we go."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str, list[bytes], bool], None]
"""Takes a host's label, whole lines without their ends, and whether they are standard error's."""


@dataclass(frozen=True)
class Ending:
    """How it ended on a host."""

    host: Host
    code: int | None
    """None: it is not known."""
    why: str
    """`exit 1`, or what went wrong."""


@dataclass(frozen=True)
class Endings:
    """How it ended on all."""

    each: Sequence[Ending]
    interrupted: bool

    @property
    def code(self) -> int:
        """What the command is to end with: the code that all hosts have in common, else 1."""
        codes = {ending.code for ending in self.each}
        return codes.pop() or 0 if len(codes) == 1 and None not in codes else 1

    def summary(self) -> str:
        """`7/8 ok · node-3/1: exit 1`; what many hosts have in common is counted."""
        bad = [ending for ending in self.each if ending.code != 0]
        parts = [f"{len(self.each) - len(bad)}/{len(self.each)} ok"]
        alike = Counter(ending.why for ending in bad)
        for why, count in alike.items():
            named = [ending.host.label for ending in bad if ending.why == why]
            more = f" and {count - 3} more" if count > 3 else ""
            parts.append(f"{', '.join(named[:3])}{more}: {why}")
        return " · ".join(parts)


class Log:
    """What one host printed, byte by byte, in a file. A disk that is full ends the file, not the command."""

    def __init__(self, path: Path, trouble: Callable[[str], None]):
        self._path, self._trouble = path, trouble
        self._file: BinaryIO | None = None
        self._full = False

    def write(self, data: bytes) -> None:
        """More of it."""
        try:
            if self._file is None and not self._full:
                self._file = self._path.open("ab", buffering=0)
            if self._file is not None:
                self._file.write(data)
        except OSError as error:
            self._full = True
            self.close()
            self._trouble(f"{self._path} ends here: {error.strerror}")

    def close(self) -> None:
        """No more comes."""
        if self._file is not None:
            self._file.close()
            self._file = None


def log_folder(base: Path) -> Path:
    """A new folder for the logs of one command; those of the oldest are deleted."""
    base.mkdir(parents=True, exist_ok=True)
    for old in sorted(base.iterdir())[: -KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    stem = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1_000):
        folder = base / (f"{stem}-{number}" if number else stem)
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


class Everywhere:
    """One command on all hosts. Ctrl-C asks it to end on all of them, Ctrl-C again ends it at once."""

    def __init__(self, key: Path, logs: Path, say: Say, tell: Callable[[str], None]):
        """`tell`: takes what we have to say ourselves."""
        self._key, self._logs, self._say, self._tell = key, logs, say, tell
        self.waiting: dict[str, None] = {}
        """Labels of hosts on which it has not ended."""
        self._running: dict[str, Attended] = {}
        self._asked = 0

    async def run(self, hosts: Sequence[Host], line: Callable[[Host], str], time_out_s: float | None = None) -> Endings:
        """Run the line of each host. `time_out_s`: for each, after which it is ended there."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # it then goes as far as it goes
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.waiting.update(dict.fromkeys(host.label for host in hosts))
        ended: dict[Host, int | TpuswarmError] = {}
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            async with Connections(self._key) as connections:

                async def one(host: Host) -> None:
                    ended[host] = await self._one(connections, host, line(host))

                self._work = asyncio.ensure_future(fan_out(hosts, one, time_out_s=time_out_s))
                with suppress(asyncio.CancelledError):  # by the second Ctrl-C
                    for host, error in zip(hosts, await self._work, strict=True):
                        if error is not None:
                            ended[host] = error
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return Endings([_ending(host, ended.get(host)) for host in hosts], self._asked > 0)

    async def _one(self, connections: Connections, host: Host, line: str) -> int:
        log = Log(self._logs / f"{host.label.replace('/', '.')}.log", self._tell)
        lines = {False: Lines(), True: Lines()}

        def take(data: bytes, is_error: bool) -> None:
            log.write(data)
            if whole := list(lines[is_error].feed(data)):
                self._say(host.label, whole, is_error)

        attended = self._running[host.label] = Attended(connections, host, line)
        if self._asked:
            attended.end(now=self._asked > 1)
        try:
            return await attended.run(take)
        finally:
            for is_error, rest in lines.items():
                if last := list(rest.end()):
                    self._say(host.label, last, is_error)
            log.close()
            del self._running[host.label]
            self.waiting.pop(host.label, None)

    def stop(self) -> None:
        """As Ctrl-C does: the first time it is asked to end on all hosts, the second time it has to."""
        self._asked += 1
        now = self._asked > 1
        for each in self._running.values():
            each.end(now)
        count = len(self.waiting)
        if not now:
            self._tell(f"asked it to end on {count} host{'s' * (count != 1)}; Ctrl-C again ends it at once")
        elif self._asked == 2:
            asyncio.get_running_loop().call_later(ENDS, self._work.cancel)
        else:
            self._work.cancel()


def _ending(host: Host, found: int | TpuswarmError | None) -> Ending:
    if found is None:
        return Ending(host, None, "did not answer any more: it may still run there")
    if isinstance(found, TpuswarmError):
        return Ending(host, None, str(found).removeprefix(f"{host.label} ({host.address}) "))
    name = f" ({signal.Signals(found - 128).name})" if found > 128 and found - 128 in set(signal.Signals) else ""
    return Ending(host, found, f"exit {found}{name}")

"""Goodput of a swarm whose processes are killed, or cut off: the share of processed tokens that is applied."""

import os
import random
import signal
import socket
import socketserver
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from tests.processes import ONE_DEVICE, PROGRAM, Forked
from tests.swarm.chaos import SMALL, Kill, Swarm, torment

from benchmarks.report import Settings, Table
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

MEMBER_COUNT, CYCLE, KILL_SEED = 4, 20, 0
KILL_MINUTES, PAUSE_S = 15.0, 60.0
QUIET_MINUTES = 3.0
GUEST_COUNT, GUEST_MINUTES, CUT_S = 20, 8.0, 30.0
"""Members that dial in, each by a link of its own."""
ARGUMENTS = (
    "gpt2-tiny", "--data", "fake", *SMALL, "--steps", "10M",
    "--members", str(MEMBER_COUNT), "--cycle", str(CYCLE), "--outer", "average",
)  # fmt: skip
COLUMNS = (
    "swarm", "minutes", "kills", "commits", "processed", "applied", "lost", "goodput", "tokens/s",
    "back after s, median (max)", "ledger",
)  # fmt: skip


def run(settings: Settings) -> Table:
    minutes, quiet = (1.0, 0.5) if settings.quick else (KILL_MINUTES, QUIET_MINUTES)
    pause = 20.0 if settings.quick else PAUSE_S
    rows = [
        ("no kills", *measure(quiet * 60, None, "").row()),
        (f"a kill -9 of a member every {pause:.0f} s", *measure(minutes * 60, pause, "m").row()),
    ]
    count, minutes = (3, 1.0) if settings.quick else (GUEST_COUNT, GUEST_MINUTES)
    label = f"{count} that dialled in; every {pause:.0f} s one is killed, or cut off for {CUT_S:.0f} s"
    rows.append((label, *measure_guests(minutes * 60, pause, count).row()))
    notes = [
        f"{MEMBER_COUNT} members, cycle {CYCLE}, gpt2-tiny with {' '.join(SMALL)}, average, kills by seed {KILL_SEED}",
        "goodput: applied / (processed - outstanding); back: from the kill to the lease of the member's new process",
    ]
    return Table("Goodput under kills", COLUMNS, rows, notes)


@dataclass(frozen=True)
class Measured:
    """Progress of a swarm of local processes, in tokens. problems: findings of `ledger verify`."""

    elapsed_s: float
    kills: list[Kill]
    newest: int
    processed: int
    applied: int
    lost: int
    settled: int
    problems: list[str]

    @property
    def goodput(self) -> float:
        """The share of settled tokens that is applied."""
        return self.applied / max(self.settled, 1)

    def row(self) -> tuple[str, ...]:
        back = [kill.back for kill in self.kills]
        return (
            f"{self.elapsed_s / 60:.1f}",
            str(len(self.kills)),
            str(self.newest),
            f"{self.processed:,}",
            f"{self.applied:,}",
            f"{self.lost:,}",
            f"{self.goodput:.2%}",
            f"{self.applied / self.elapsed_s:,.0f}",
            f"{statistics.median(back):.1f} ({max(back):.1f})" if any(back) else "–",
            f"{len(self.problems)} problems: {self.problems[0]}" if self.problems else "sound",
        )


def measure(seconds: float, pause: float | None, names: str, arguments: Sequence[str] = ARGUMENTS) -> Measured:
    """Run a swarm. pause: mean seconds between kills of processes whose names begin with a letter in `names`."""
    rnd = random.Random(KILL_SEED)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder) / "run", arguments)
        swarm.start()
        kills: list[Kill] = []
        try:
            swarm.wait(lambda: (swarm.status().get("version") or 0) >= 2)
            began, before = time.monotonic(), swarm.status()["tokens"]
            if pause is None:
                time.sleep(seconds)
            else:
                kills = torment(swarm, rnd, seconds, lambda: rnd.uniform(0.5, 1.5) * pause, names)
            elapsed, after = time.monotonic() - began, swarm.status()["tokens"]
        finally:
            swarm.end()
        return _compare(swarm, elapsed, kills, before, after)


def _compare(
    swarm: Swarm, elapsed_s: float, kills: list[Kill], before: dict[str, int], after: dict[str, int]
) -> Measured:
    """Compare the tokens of two statuses, and verify the ledger."""
    report = verify(Store(swarm.run), lambda text: None)
    processed, applied, lost = (after[name] - before[name] for name in ("processed", "applied", "lost"))
    settled = processed - (after["outstanding"] - before["outstanding"])
    return Measured(elapsed_s, kills, report.newest or 0, processed, applied, lost, settled, report.problems)


class Link(socketserver.ThreadingTCPServer):
    """A member's way to the internet: an HTTP proxy that can be cut."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.cut_until = 0.0
        self.open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """End all connections, and let none through for some seconds."""
        self.cut_until = time.monotonic() + seconds
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Tunnel(socketserver.StreamRequestHandler):
    server: Link

    def handle(self) -> None:
        host, _, port = self.rfile.readline().split()[1].decode().rpartition(":")
        while self.rfile.readline().strip():
            pass
        with suppress(OSError):  # the head is away
            if time.monotonic() > self.server.cut_until:
                self._forward(host, int(port))

    def _forward(self, host: str, port: int) -> None:
        with socket.create_connection((host, port)) as head:
            pair = {self.connection, head}
            self.server.open |= pair
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pipe, args=(head, self.connection))
            back.start()
            _pipe(self.connection, head)
            back.join()
            self.server.open -= pair


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def _guest(swarm: Swarm, invite: str, name: str, folder: Path) -> Iterator[Link]:
    """Let a member dial in from a machine of its own; all share the compiled program."""
    with Link() as link:
        proxy = f"http://127.0.0.1:{link.server_address[1]}"
        cache = {"TPUSWARM_CACHE": str(folder / "cache"), "HTTPS_PROXY": proxy, "NO_PROXY": ""}
        with (folder / f"{name}.log").open("wb") as log:
            command = [PROGRAM, "join", "-", "--name", name]
            join = Forked(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **ONE_DEVICE, **cache}
            )
        assert join.stdin is not None
        join.stdin.write(f"{invite}\n".encode())
        join.stdin.flush()
        try:
            yield link
        finally:
            with suppress(psutil.NoSuchProcess):
                for process in [psutil.Process(join.pid), *psutil.Process(join.pid).children(recursive=True)]:
                    process.kill()
            join.communicate()
            link.shutdown()


def measure_guests(seconds: float, pause: float, count: int) -> Measured:
    """Run a swarm of members that dial in. pause: mean seconds until one of them is killed or cut off."""
    rnd = random.Random(KILL_SEED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*ARGUMENTS, "--members", "0", "--listen", f"127.0.0.1:{port}", "--address", "127.0.0.1"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        swarm = Swarm(folder / "run", arguments)
        swarm.start()
        kills: list[Kill] = []
        try:
            swarm.wait((swarm.run / "invites.json").exists)
            done = subprocess.run([PROGRAM, "invite", swarm.run, "ada"], capture_output=True, text=True, check=True)
            links = {
                f"ada-{number}": stack.enter_context(_guest(swarm, done.stdout.strip(), str(number), folder))
                for number in range(count)
            }
            swarm.wait(lambda: len(links.keys() & swarm.pids().keys()) == count, 1200.0)
            began, before = time.monotonic(), swarm.status()["tokens"]
            while (now := time.monotonic() - began) < seconds:
                time.sleep(min(rnd.uniform(0.5, 1.5) * pause, seconds - now))
                name, is_cut, pids = rnd.choice(sorted(links)), rnd.random() < 0.5, swarm.pids()
                at = time.monotonic() - began
                if name not in pids or at > seconds - 1:
                    continue
                if is_cut:
                    links[name].cut(CUT_S)
                else:
                    os.kill(pids[name], signal.SIGKILL)
                kills.append(Kill(name, at, 0.0))
            elapsed, after = time.monotonic() - began, swarm.status()["tokens"]
        finally:
            swarm.end()
        return _compare(swarm, elapsed, kills, before, after)

"""Measure programs on many machines: `true` on 256 SSH servers, a flood from 16, a job after a preemption.

Limits: cold as fast as parallel-ssh, twice as fast over open connections, five times as fast as ssh in sequence; every
line of the flood arrives whole, without memory growth; a job restarts within 5 s of its machine's return. Servers and
clients share the machine. A few minutes.
"""

import asyncio
import getpass
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Settings, Table, median, verdict
from tpuswarm.cloud.rehearsal.connect import CloudFolder, send_command
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host, openssh_command
from tpuswarm.remote.remote_process import RemoteProcess
from tpuswarm.remote.run_on_hosts import ParallelCommand

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
REPEAT_COUNT, SEQUENTIAL_COUNT = 3, 16
LINE_BYTES = 110
"""Of the flood, with the line break."""
RESTART_LIMIT_S = 5.0
SWARM = """\
name = "bench"
provider = "rehearsal"

[storage]
bucket = "rehearsal-bench"
region = "us-central1"

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f"]
count = 1
network = "tpuswarm-bench"
"""


def run(settings: Settings) -> Table:
    servers, flooded, total = (16, 4, 8 << 20) if settings.quick else (256, 16, 1 << 30)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name, _servers(Path(name), servers) as hosts:
        cold, warm = zip(*(asyncio.run(_fan_out(Path(name) / "user", hosts)) for _ in range(REPEAT_COUNT)), strict=True)
        ssh = _ssh_in_sequence(Path(name) / "user", hosts[:SEQUENTIAL_COUNT]) * servers / min(SEQUENTIAL_COUNT, servers)
        peer = _parallel_ssh(Path(name) / "user", hosts)
        cold_limit = f"at most {peer:.2f}, parallel-ssh's" if peer else "parallel-ssh is not installed"
        rows += [
            (
                f"`true` on {servers}, cold, s", median(cold).show(".2f"), cold_limit,
                _verdict(peer, median(cold).middle),
            ),
            (
                f"`true` on {servers} over open connections, s", median(warm).show(".2f"),
                f"at most {peer / 2:.2f}" if peer else "parallel-ssh is not installed",
                _verdict(peer and peer / 2, median(warm).middle),
            ),
            (
                f"the same by ssh in sequence, s (from {min(SEQUENTIAL_COUNT, servers)})", f"{ssh:.1f}",
                "5 times the cold one", verdict(ssh >= 5 * median(cold).middle),
            ),
        ]  # fmt: skip
        seconds, wrong, grown = _flood(Path(name), hosts[:flooded], total)
        rows.append(
            (f"{total / 2**20:,.0f} MiB from {flooded} hosts, s", f"{seconds:.1f}", "no line lost or broken",
             f"{wrong:,} are" if wrong else "met")
        )  # fmt: skip
        rows.append(("memory growth, MiB", f"{grown:.0f}", "at most 100", verdict(grown <= 100)))
    restarts = _restart_jobs(1 if settings.quick else REPEAT_COUNT)
    rows.append(
        ("from a new machine ready to its job running, s", median(restarts).show(".1f"), f"at most {RESTART_LIMIT_S:g}",
         verdict(max(restarts) <= RESTART_LIMIT_S))
    )  # fmt: skip
    share = 1 - median(warm).middle / median(cold).middle
    notes = (
        f"{REPEAT_COUNT} runs each, range; {share:.0%} of the cold run is key exchange and log-in at both ends",
        "the servers run our command's shell and its watcher; for ssh and parallel-ssh a plain `true`",
    )
    return Table("Programs on many machines", ("", "figure", "limit", ""), rows, notes)


def _verdict(limit: float | None, seconds: float) -> str:
    return "" if limit is None else verdict(seconds <= limit)


@contextmanager
def _servers(folder: Path, count: int) -> Iterator[list[Host]]:
    # Without -W ignore, asyncssh warns about unfinished queues when a connection ends.
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ssh_servers", str(folder), str(count)]
    process = subprocess.Popen(command)
    try:
        while not (folder / "ready").exists():
            assert process.poll() is None, "the servers have ended"
            time.sleep(0.05)
        ports = json.loads((folder / "ready").read_text())
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        known = folder / "known_hosts"
        known.write_text("".join(f"h{n} {key}\n" for n in range(len(ports))))
        user = getpass.getuser()
        yield [Host(f"h{n}/0", "127.0.0.1", port, user, f"h{n}", (key,), known) for n, port in enumerate(ports)]
    finally:
        process.kill()
        process.wait()


async def _fan_out(key: Path, hosts: Sequence[Host]) -> tuple[float, float]:
    """Return the seconds of `true` on all hosts, cold and over open connections."""
    async with Connections(key) as connections:

        async def one(host: Host) -> int:
            return await RemoteProcess(connections, host, "true").run(lambda data, is_error: None)

        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            codes = await fan_out(hosts, one)
            seconds.append(time.perf_counter() - start)
            assert codes == [0] * len(hosts), [code for code in codes if code != 0][:3]
        return seconds[0], seconds[1]


def _ssh_in_sequence(key: Path, hosts: Sequence[Host]) -> float:
    start = time.perf_counter()
    for host in hosts:
        words = [*openssh_command(host, key), "-o", "LogLevel=ERROR", f"{host.user}@{host.address}", "true"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def _parallel_ssh(key: Path, hosts: Sequence[Host]) -> float | None:
    """Return the seconds of `true` on all hosts by parallel-ssh, cold; None if it is not installed."""
    try:
        from pssh.clients import ParallelSSHClient  # type: ignore[import-not-found]
        from pssh.config import HostConfig  # type: ignore[import-not-found]
    except ImportError:
        return None
    start = time.perf_counter()
    configs = [HostConfig(port=host.port, user=host.user, private_key=str(key)) for host in hosts]
    client = ParallelSSHClient(["127.0.0.1"] * len(hosts), host_config=configs, pool_size=64)
    client.join(client.run_command("true"))
    return time.perf_counter() - start


def _flood(folder: Path, hosts: Sequence[Host], total: int) -> tuple[float, int, float]:
    """Return the seconds, the number of lost or broken lines, and this process's growth in MiB."""
    count = total // len(hosts) // LINE_BYTES
    tail = b"x" * (LINE_BYTES - 10)
    received = {host.label: 0 for host in hosts}
    wrong = 0

    def check_lines(label: str, lines: list[bytes], is_error: bool) -> None:
        nonlocal wrong
        number = received[label]
        for line in lines:
            number += 1
            wrong += line != b"%09d%b" % (number, tail)
        received[label] = number

    (folder / "logs").mkdir()
    before = _resident()
    command = ParallelCommand(folder / "user", folder / "logs", check_lines, print)
    start = time.perf_counter()
    result = asyncio.run(command.run(hosts, lambda host: f"seq -f '%09.0f{tail.decode()}' 1 {count}"))
    seconds = time.perf_counter() - start
    wrong += sum(abs(count - lines) for lines in received.values()) + sum(host.code != 0 for host in result.hosts)
    written = sum(log.stat().st_size for log in (folder / "logs").iterdir())
    wrong += abs(written - count * LINE_BYTES * len(hosts))
    return seconds, wrong, (_resident() - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _restart_jobs(times: int) -> list[float]:
    """Preempt a machine; return the seconds from its return to the restart of its job."""
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), CloudFolder(Path(name) / "cloud")
        environment = {**os.environ, "HOME": name, "XDG_STATE_HOME": name, "TPUSWARM_REHEARSAL": str(place.path)}
        (folder / "swarm.toml").write_text(SWARM)

        def run_command(*words: str) -> None:
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

        run_command("rehearsal", "start", "--speed", "300")
        keeper = None
        try:
            run_command("init", "--yes")
            run_command("up", "--yes", "--paid")
            keeper = subprocess.Popen([PROGRAM, "keep"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
            starts = folder / "starts"
            run_command("exec", "small", "--detach", "--name", "again", "--", f"echo >>{starts}; sleep 1000")
            seconds = []
            for number in range(1, times + 1):
                while _count_lines(starts) < number:
                    time.sleep(0.02)
                (machine,) = [row for row in send_command(place, "status")["machines"] if row["state"] == "READY"]
                send_command(place, "preempt", name=machine["name"], ending="gone")
                for is_ready in (False, True):
                    while any(row["state"] == "READY" for row in send_command(place, "status")["machines"]) != is_ready:
                        time.sleep(0.02)
                ready = time.perf_counter()
                while _count_lines(starts) <= number:
                    time.sleep(0.02)
                seconds.append(time.perf_counter() - ready)
            return seconds
        finally:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
            run_command("rehearsal", "stop")


def _count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0

"""Programs on many machines: `true` on 256 SSH servers, a flood from 16, a job after a preemption. A few minutes.

Limits: cold no slower than parallel-ssh, twice as fast over open connections, five times as fast as ssh one after the
other; no line of the flood lost or broken, and memory flat; a job runs again within 5 s of its machine being ready.
Servers and clients share the machine, so that starting processes on the servers' side counts too.
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
TIMES, ONE_BY_ONE = 3, 16
LINE = 110
"""Bytes of a line of the flood, its end included."""
AGAIN_S = 5.0
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
    """All three, one after the other."""
    servers, flooded, total = (16, 4, 8 << 20) if settings.quick else (256, 16, 1 << 30)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name, _servers(Path(name), servers) as hosts:
        cold, warm = zip(*(asyncio.run(_fan_out(Path(name) / "user", hosts)) for _ in range(TIMES)), strict=True)
        ssh = _one_by_one(Path(name) / "user", hosts[:ONE_BY_ONE]) * servers / min(ONE_BY_ONE, servers)
        peer = _parallel_ssh(Path(name) / "user", hosts)
        known = f"at most {peer:.2f}, parallel-ssh's" if peer else "parallel-ssh is not installed"
        rows += [
            (f"`true` on {servers}, cold, s", median(cold).show(".2f"), known, _said(peer, median(cold).middle)),
            (
                f"`true` on {servers} over open connections, s", median(warm).show(".2f"),
                f"at most {peer / 2:.2f}" if peer else "parallel-ssh is not installed",
                _said(peer and peer / 2, median(warm).middle),
            ),
            (
                f"the same by ssh one after the other, s (from {min(ONE_BY_ONE, servers)})", f"{ssh:.1f}",
                "5 times the cold one", verdict(ssh >= 5 * median(cold).middle),
            ),
        ]  # fmt: skip
        seconds, wrong, grown = _flood(Path(name), hosts[:flooded], total)
        rows.append(
            (f"{total / 2**20:,.0f} MiB from {flooded} hosts, s", f"{seconds:.1f}", "no line lost or broken",
             f"{wrong:,} are" if wrong else "met")
        )  # fmt: skip
        rows.append(("memory that this has taken, MiB", f"{grown:.0f}", "at most 100", verdict(grown <= 100)))
    again = _job_again(1 if settings.quick else TIMES)
    rows.append(
        ("from a new machine ready to its job running, s", median(again).show(".1f"), f"at most {AGAIN_S:g}",
         verdict(max(again) <= AGAIN_S))
    )  # fmt: skip
    share = 1 - median(warm).middle / median(cold).middle
    notes = (
        f"{TIMES} times each, range; of the cold one, {share:.0%} is connecting: key exchange and log-in of both sides",
        "what runs on the servers: our command's own shell and its watcher; for ssh and parallel-ssh a plain `true`",
    )
    return Table("Programs on many machines", ("", "figure", "limit", ""), rows, notes)


def _said(limit: float | None, found: float) -> str:
    return "" if limit is None else verdict(found <= limit)


@contextmanager
def _servers(folder: Path, count: int) -> Iterator[list[Host]]:
    # asyncssh warns of queues that it has not waited for where a connection ends.
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.ssh_servers", str(folder), str(count)]
    process = subprocess.Popen(words)
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
    """Seconds for `true` on all, from nothing and over open connections, as `exec` runs it."""
    async with Connections(key) as connections:

        async def one(host: Host) -> int:
            return await RemoteProcess(connections, host, "true").run(lambda data, is_error: None)

        found = []
        for _ in range(2):
            start = time.perf_counter()
            codes = await fan_out(hosts, one)
            found.append(time.perf_counter() - start)
            assert codes == [0] * len(hosts), [each for each in codes if each != 0][:3]
        return found[0], found[1]


def _one_by_one(key: Path, hosts: Sequence[Host]) -> float:
    start = time.perf_counter()
    for host in hosts:
        words = [*openssh_command(host, key), "-o", "LogLevel=ERROR", f"{host.user}@{host.address}", "true"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def _parallel_ssh(key: Path, hosts: Sequence[Host]) -> float | None:
    """Seconds for `true` on all by parallel-ssh, from nothing; None: it is not installed."""
    try:
        from pssh.clients import ParallelSSHClient  # type: ignore[import-not-found]
        from pssh.config import HostConfig  # type: ignore[import-not-found]
    except ImportError:
        return None
    start = time.perf_counter()
    configs = [HostConfig(port=each.port, user=each.user, private_key=str(key)) for each in hosts]
    client = ParallelSSHClient(["127.0.0.1"] * len(hosts), host_config=configs, pool_size=64)
    client.join(client.run_command("true"))
    return time.perf_counter() - start


def _flood(folder: Path, hosts: Sequence[Host], total: int) -> tuple[float, int, float]:
    """Seconds, lines that are not the next of their host, MiB by which this process has grown."""
    count = total // len(hosts) // LINE
    tail = b"x" * (LINE - 10)
    at = {each.label: 0 for each in hosts}
    wrong = 0

    def say(label: str, lines: list[bytes], is_error: bool) -> None:
        nonlocal wrong
        number = at[label]
        for line in lines:
            number += 1
            wrong += line != b"%09d%b" % (number, tail)
        at[label] = number

    (folder / "logs").mkdir()
    before = _resident()
    command = ParallelCommand(folder / "user", folder / "logs", say, print)
    start = time.perf_counter()
    result = asyncio.run(command.run(hosts, lambda host: f"seq -f '%09.0f{tail.decode()}' 1 {count}"))
    seconds = time.perf_counter() - start
    wrong += sum(abs(count - each) for each in at.values()) + sum(host.code != 0 for host in result.hosts)
    written = sum(each.stat().st_size for each in (folder / "logs").iterdir())
    wrong += abs(written - count * LINE * len(hosts))
    return seconds, wrong, (_resident() - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _job_again(times: int) -> list[float]:
    """Seconds from a machine's being ready after a preemption to its job's running again."""
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), CloudFolder(Path(name) / "cloud")
        environment = {**os.environ, "HOME": name, "XDG_STATE_HOME": name, "TPUSWARM_REHEARSAL": str(place.path)}
        (folder / "swarm.toml").write_text(SWARM)

        def do(*words: str) -> None:
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

        do("rehearsal", "start", "--speed", "300")
        keeper = None
        try:
            do("init", "--yes")
            do("up", "--yes", "--paid")
            keeper = subprocess.Popen([PROGRAM, "keep"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
            began = folder / "began"
            do("exec", "small", "--detach", "--name", "again", "--", f"echo >>{began}; sleep 1000")
            found = []
            for number in range(1, times + 1):
                while _count(began) < number:
                    time.sleep(0.02)
                (machine,) = [each for each in send_command(place, "status")["machines"] if each["state"] == "READY"]
                send_command(place, "preempt", name=machine["name"], ending="gone")
                for there in (False, True):  # it goes, and another one comes
                    while any(each["state"] == "READY" for each in send_command(place, "status")["machines"]) != there:
                        time.sleep(0.02)
                ready = time.perf_counter()
                while _count(began) <= number:
                    time.sleep(0.02)
                found.append(time.perf_counter() - ready)
            return found
        finally:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
            do("rehearsal", "stop")


def _count(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0

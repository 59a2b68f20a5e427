"""Measure `init`, `up`, `list` and `down` with a hundred machines of the local cloud. About a minute.

Limits: `up` within 60 s, 3 GiB in all when idle, `list` within 1 s. The cloud's fast clock hides its waiting times.
Memory is the PSS of all processes of the cloud and its machines.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Settings, Table, median, verdict

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
MACHINE_COUNT, CLOCK_FACTOR, LIST_COUNT = 100, 600, 7
UP_LIMIT_S, LIST_LIMIT_S, MAX_IDLE_GIB = 60.0, 1.0, 3.0
IDLE_S = 10.0
INIT = [
    "init",
    "--yes",
    "--provider",
    "rehearsal",
    "--project",
    "hundred-1",
    "--type",
    "v2-8",
    "--zone",
    "us-central1-f",
]


def run(settings: Settings) -> Table:
    machines, lists = (4, 2) if settings.quick else (MACHINE_COUNT, LIST_COUNT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "HOME": name, "TPUSWARM_REHEARSAL": f"{name}/cloud"}

        def seconds(*words: str) -> float:
            start = time.perf_counter()
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - start

        seconds("rehearsal", "start", "--speed", str(CLOCK_FACTOR))
        try:
            seconds(*INIT)
            file = folder / "swarm.toml"
            file.write_text(file.read_text().replace("count = 1", f"count = {machines}"))
            up = seconds("up", "--yes", "--paid")
            ready = up + _until_all_answer(environment)
            before_lists = _children_cpu_s()
            list_s = median([seconds("list") for _ in range(lists)])
            list_cpu_s = (_children_cpu_s() - before_lists) / lists
            server = json.loads((folder / "cloud" / "server.json").read_text())["pid"]
            before = _cpu_s(server)
            time.sleep(IDLE_S)
            idle, memory = (_cpu_s(server) - before) / IDLE_S, _memory(environment["TPUSWARM_REHEARSAL"], server)
            down = seconds("down", "--yes")
        finally:
            seconds("rehearsal", "stop")
    rows = [
        ("`up` to the end", f"{up:.1f} s", f"at most {UP_LIMIT_S:.0f}", verdict(up <= UP_LIMIT_S)),
        ("until all SSH servers answer", f"{ready:.1f} s", f"at most {UP_LIMIT_S:.0f}", verdict(ready <= UP_LIMIT_S)),
        ("memory when idle", f"{memory:.2f} GiB", f"at most {MAX_IDLE_GIB:.0f}", verdict(memory <= MAX_IDLE_GIB)),
        ("share of a core when idle", f"{idle:.1%}", "", ""),
        ("`list`", f"{list_s.show('.2f')} s, {list_cpu_s:.2f} s of CPU", f"at most {LIST_LIMIT_S:.0f}",
         verdict(list_s.middle <= LIST_LIMIT_S)),
        ("`down` to the end", f"{down:.1f} s", "", ""),
    ]  # fmt: skip
    notes = [f"the cloud's clock runs {CLOCK_FACTOR} times as fast as ours; {lists} runs of `list`, one of the others"]
    return Table(f"{machines} machines of the local cloud", ("", "", "limit", ""), rows, notes)


def _until_all_answer(environment: dict[str, str]) -> float:
    start = time.perf_counter()
    status = subprocess.run(
        [PROGRAM, "rehearsal", "status", "--json"], env=environment, check=True, capture_output=True
    )
    for machine in json.loads(status.stdout)["machines"]:
        while True:
            try:
                with socket.create_connection((machine["workers"][0]["external"], 2222), 5) as connection:
                    if connection.recv(4) == b"SSH-":
                        break
            except OSError:
                time.sleep(0.05)
    return time.perf_counter() - start


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _memory(cloud: str, server: int) -> float:
    """Return the GiB of the server and all processes of its machines."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = int(process.name) == server or f"TPUSWARM_REHEARSAL={cloud}\0".encode() in (
                (process / "environ").read_bytes()
            )
            if ours and int(process.name) != os.getpid():
                total += int((process / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
        except (OSError, IndexError):
            continue  # ended, or another user's
    return total / 2**20

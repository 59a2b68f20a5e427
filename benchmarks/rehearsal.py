"""Measure `init`, `up`, `list` and `down` with a hundred spot TPUs of the local cloud, through both of Google's APIs.

Limits: `up` within 60 s, 3 GiB in all when idle, `list` within 1 s. The cloud's fast clock hides its waiting times.
Memory is the PSS of all processes of the cloud and its machines. About two minutes.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Median, Settings, Table, median, verdict

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
MACHINE_COUNT, CLOCK_FACTOR, LIST_COUNT = 100, 600, 7
UP_LIMIT_S, LIST_LIMIT_S, MAX_IDLE_GIB = 60.0, 1.0, 3.0
IDLE_S = 10.0
INIT = ["init", "--yes", "--provider", "rehearsal", "--project", "hundred-1"]
TPUS = {"tpu": ["--type", "v2-8", "--zone", "us-central1-f"], "compute": ["--type", "v6e-8", "--zone", "us-east5-a"]}
"""By API."""


class Measured(NamedTuple):
    up_s: float
    all_answer_s: float
    memory_gib: float
    idle_share: float
    list_s: Median
    list_cpu_s: float
    down_s: float


def run(settings: Settings) -> Table:
    machines, lists = (4, 2) if settings.quick else (MACHINE_COUNT, LIST_COUNT)
    results = [measure(api, machines, lists) for api in TPUS]
    lines: list[tuple[str, Callable[[Measured], str], str, bool | None]] = [
        ("`up` to the end, s", lambda one: f"{one.up_s:.1f}", f"{UP_LIMIT_S:.0f}",
         all(one.up_s <= UP_LIMIT_S for one in results)),
        ("until all SSH servers answer, s", lambda one: f"{one.all_answer_s:.1f}", f"{UP_LIMIT_S:.0f}",
         all(one.all_answer_s <= UP_LIMIT_S for one in results)),
        ("memory when idle, GiB", lambda one: f"{one.memory_gib:.2f}", f"{MAX_IDLE_GIB:.0f}",
         all(one.memory_gib <= MAX_IDLE_GIB for one in results)),
        ("share of a core when idle", lambda one: f"{one.idle_share:.1%}", "", None),
        ("`list`, s", lambda one: one.list_s.show(".2f"), f"{LIST_LIMIT_S:.0f}",
         all(one.list_s.middle <= LIST_LIMIT_S for one in results)),
        ("`list`, s of CPU", lambda one: f"{one.list_cpu_s:.2f}", "", None),
        ("`down` to the end, s", lambda one: f"{one.down_s:.1f}", "", None),
    ]  # fmt: skip
    rows = [
        (name, *map(show, results), limit, "" if is_met is None else verdict(is_met))
        for name, show, limit, is_met in lines
    ]
    notes = [f"the cloud's clock runs {CLOCK_FACTOR} times as fast as ours; {lists} runs of `list`, one of the others"]
    columns = ("", "TPU API: v2-8", "Compute Engine: v6e-8", "at most", "")
    return Table(f"{machines} spot TPUs of the local cloud", columns, rows, notes)


def measure(api: str, machines: int, lists: int) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "HOME": name, "TPUSWARM_REHEARSAL": f"{name}/cloud"}
        environment.pop("XDG_STATE_HOME", None)

        def seconds(*words: str) -> float:
            start = time.perf_counter()
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - start

        seconds("rehearsal", "start", "--speed", str(CLOCK_FACTOR))
        try:
            seconds(*INIT, *TPUS[api])
            file = folder / "swarm.toml"
            file.write_text(file.read_text().replace("count = 1", f'count = {machines}\napi = "{api}"'))
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
    return Measured(up, ready, memory, idle, list_s, list_cpu_s, down)


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

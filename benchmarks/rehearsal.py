"""A hundred machines of the local cloud, as a person gets them: `init`, `up`, `list`, `down`. About a minute.

Limits: up within 60 s, 3 GiB in all when idle, `list` within 1 s. The clock of the cloud goes so fast that its own
waiting hardly counts. Memory is that of all processes of the cloud and its machines; what they share counts once (PSS).
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
MACHINES, SPEED, LISTS = 100, 600, 7
UP_S, LIST_S, GIB = 60.0, 1.0, 3.0
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
    """In a folder, a home and a cloud of its own."""
    machines, lists = (4, 2) if settings.quick else (MACHINES, LISTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "HOME": name, "TPUSWARM_REHEARSAL": f"{name}/cloud"}

        def seconds(*words: str) -> float:
            start = time.perf_counter()
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - start

        seconds("rehearsal", "start", "--speed", str(SPEED))
        try:
            seconds(*INIT)
            file = folder / "swarm.toml"
            file.write_text(file.read_text().replace("count = 1", f"count = {machines}"))
            up = seconds("up", "--yes", "--paid")
            reached = up + _until_all_answer(environment)
            before_lists = _cpu_of_children()
            shown = median([seconds("list") for _ in range(lists)])
            computed = (_cpu_of_children() - before_lists) / lists
            server = json.loads((folder / "cloud" / "server.json").read_text())["pid"]
            before = _cpu(server)
            time.sleep(IDLE_S)
            idle, memory = (_cpu(server) - before) / IDLE_S, _memory(environment["TPUSWARM_REHEARSAL"], server)
            down = seconds("down", "--yes")
        finally:
            seconds("rehearsal", "stop")
    rows = [
        ("`up` to the end", f"{up:.1f} s", f"at most {UP_S:.0f}", verdict(up <= UP_S)),
        ("and every SSH server answers", f"{reached:.1f} s", f"at most {UP_S:.0f}", verdict(reached <= UP_S)),
        ("memory when idle", f"{memory:.2f} GiB", f"at most {GIB:.0f}", verdict(memory <= GIB)),
        ("of one core when idle", f"{idle:.1%}", "", ""),
        (
            "`list`",
            f"{shown.show('.2f')} s, {computed:.2f} s of CPU",
            f"at most {LIST_S:.0f}",
            verdict(shown.middle <= LIST_S),
        ),
        ("`down` to the end", f"{down:.1f} s", "", ""),
    ]
    notes = [f"the cloud's clock goes {SPEED} times as fast as ours; {lists} times `list`, one time the others"]
    return Table(f"{machines} machines of the local cloud", ("", "", "limit", ""), rows, notes)


def _until_all_answer(environment: dict[str, str]) -> float:
    start = time.perf_counter()
    said = subprocess.run([PROGRAM, "rehearsal", "status", "--json"], env=environment, check=True, capture_output=True)
    for machine in json.loads(said.stdout)["machines"]:
        while True:
            try:
                with socket.create_connection((machine["workers"][0]["external"], 2222), 5) as connection:
                    if connection.recv(4) == b"SSH-":
                        break
            except OSError:
                time.sleep(0.05)
    return time.perf_counter() - start


def _cpu_of_children() -> float:
    """Seconds that the commands of this process have computed so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu(pid: int) -> float:
    """Seconds that a process has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _memory(cloud: str, server: int) -> float:
    """GiB of the server and of all that runs on its machines."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = int(process.name) == server or f"TPUSWARM_REHEARSAL={cloud}\0".encode() in (
                (process / "environ").read_bytes()
            )
            if ours and int(process.name) != os.getpid():
                found += int((process / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
        except (OSError, IndexError):
            continue  # it has ended, or is another user's
    return found / 2**20

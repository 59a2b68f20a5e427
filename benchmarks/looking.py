"""`doctor` and `top` over many machines of the local cloud: what they take of this computer and of a host.

Limits: `doctor all` within 10 s; `top` 5% of a core of the computer that shows it, and 1% of one of each host. All
machines, their servers and the clients share the two or more processors of one computer.
"""

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.report import Settings, Table, median, verdict
from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS
from tpuswarm.cloud.rehearsal.place import VARIABLE

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
DOCTOR_S, HERE, HOST = 10.0, 0.05, 0.01
TIMES, MACHINES = 3, 64
TICKS = os.sysconf("SC_CLK_TCK")
SWARM = """\
name = "bench"
provider = "rehearsal"

[storage]
bucket = "rehearsal-bench"
region = "us-central1"

[[pool]]
name = "many"
type = "v2-8"
zones = ["us-central1-f"]
count = {count}
network = "tpuswarm-bench"
"""


def run(settings: Settings) -> Iterable[Table]:
    """In a folder, a home and a cloud of its own."""
    count, seconds = (4, 10.0) if settings.quick else (MACHINES, 60.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "swarm.toml").write_text(SWARM.format(count=count))
        environment = {**os.environ, VARIABLE: f"{name}/cloud", "XDG_STATE_HOME": f"{name}/state", "HOME": name}

        def command(*words: str, check: bool = True) -> str:
            done = subprocess.run(
                [PROGRAM, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=check
            )
            return done.stdout

        try:
            for words in ("rehearsal start --speed 300", "init --yes", "up --yes --paid"):
                command(*words.split())
            took = []
            for _ in range(TIMES):
                began = time.perf_counter()
                command("doctor", "all")
                took.append(time.perf_counter() - began)
            yield _many(count, took, seconds, *_top(folder, environment, seconds))
            yield _faults(command)
        finally:
            command("down", "--yes", check=False)
            command("rehearsal", "stop", check=False)


def _faults(command: Callable[..., str]) -> Table:
    """Each fault that a machine of the local cloud can have, alone: what finds it, how fast, and what else is found."""
    machine = min(each["name"] for each in json.loads(command("list", "--json"))["machines"])
    rows = []
    for fault in (*MACHINE_FAULTS, *NODE_FAULTS):
        command("rehearsal", "break", machine, fault)
        found: list[dict[str, str]] = []
        while not found:  # what was planted takes a moment to begin
            began = time.perf_counter()
            found = json.loads(command("doctor", machine, "--json", check=False))["found"]
            took = time.perf_counter() - began
        command("rehearsal", "break", machine, fault, "--mend")
        after = len(json.loads(command("doctor", machine, "--json", check=False))["found"])
        rows.append((fault, ", ".join(each["check"] for each in found), f"{took:.1f}", str(after)))
    return Table("Planted faults", ("fault", "found by", "s", "found once it is mended"), rows, [])


def _many(count: int, took: list[float], seconds: float, here: float, host: float) -> Table:
    doctor = median(took)
    rows = [
        (f"`doctor all`, {count} machines, s", doctor.show(".1f"), f"at most {DOCTOR_S:.0f}",
         verdict(doctor.middle <= DOCTOR_S)),
        (f"`top`, {count} machines: of a core here", f"{here:.2%}", f"at most {HERE:.0%}", verdict(here <= HERE)),
        ("`top`: of a core of each host", f"{host:.2%}", f"at most {HOST:.0%}", verdict(host <= HOST)),
    ]  # fmt: skip
    notes = [f"Processor time of `top` over {seconds:.0f} s, in a terminal of 80 × 24, once it has begun."]
    return Table("Looking at many machines", ("what", "measured", "limit", "verdict"), rows, notes)


def _top(folder: Path, environment: dict[str, str], seconds: float) -> tuple[float, float]:
    """Shares of a core that `top` takes here, and on the host that it takes most of."""
    ours, theirs = pty.openpty()
    screen = {**environment, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    shown = subprocess.Popen([PROGRAM, "top"], cwd=folder, env=screen, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    threading.Thread(target=_read, args=(ours,), daemon=True).start()
    time.sleep(seconds / 2)
    hosts = [int(each.name) for each in Path("/proc").glob("[0-9]*") if _is_collector(each)]
    before = {pid: _spent(pid) for pid in (shown.pid, *hosts)}
    began = time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - began
    shares = {pid: (_spent(pid) - spent) / passed for pid, spent in before.items()}
    shown.terminate()
    shown.wait()
    return shares[shown.pid], max(shares[pid] for pid in hosts)


def _read(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # its other end is closed
        pass


def _is_collector(process: Path) -> bool:
    try:
        return b"tpuswarm.watch.chips" in (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def _spent(pid: int) -> float:
    """Seconds of processors so far."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / TICKS

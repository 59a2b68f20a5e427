"""What Ray costs a swarm on one machine: seconds until its first step, and memory. About 1 minute."""

import tempfile
import time
from pathlib import Path

from benchmarks.chaos import SMALL, Swarm
from benchmarks.report import Settings, Table

MEMBERS = 3


def run(settings: Settings) -> Table:
    """A swarm of three; the memory of all its processes once two versions were committed."""
    arguments = ["gpt2-tiny", "--data", "fake", *SMALL, "--steps", "10M", "--members", str(MEMBERS), "--cycle", "20"]
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder) / "run", arguments)
        start = time.perf_counter()
        swarm.start()
        try:
            swarm.wait(lambda: swarm.status())
            up = time.perf_counter() - start
            swarm.wait(lambda: (swarm.run / "metrics.jsonl").exists())
            stepped = time.perf_counter() - start
            swarm.wait(lambda: (swarm.status().get("version") or 0) >= 2)
            ours = set(swarm.status()["processes"].values())
            members = {each["pid"] for each in swarm.status()["members"]}
            tree = _tree(swarm.process.pid)
            rays = [pid for pid in tree if pid not in ours | members]
            memory = {name: sum(map(_mebibytes, pids)) for name, pids in (("rays", rays), ("ours", ours))}
            each = sum(map(_mebibytes, members)) / MEMBERS
            driver = _mebibytes(swarm.process.pid)
        finally:
            swarm.end()
    rows = [
        ("until Ray and the processes are up", f"{up:.1f} s", ""),
        ("until the first step of a member", f"{stepped:.1f} s", ""),
        (f"Ray's own {len(rays)} processes", "", f"{memory['rays']:,.0f}"),
        ("coordinator and aggregator", "", f"{memory['ours']:,.0f}"),
        ("supervisor (the command itself)", "", f"{driver:,.0f}"),
        ("a member, the mean of three", "", f"{each:,.0f}"),
    ]
    notes = [
        f"{MEMBERS} members of gpt2-tiny {' '.join(SMALL)}; memory: proportional set size of each process, by Linux"
    ]
    return Table("What Ray costs", ("", "seconds", "MiB"), rows, notes)


def _tree(pid: int) -> list[int]:
    """All descendants of a process."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *_tree(child))]


def _mebibytes(pid: int) -> float:
    """Proportional set size."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no size")

"""What a session of tests leaves behind when it is killed."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.real.machines import TREES
from tests.waiting import until

pytestmark = pytest.mark.real
SESSION = """
import subprocess, time
from tests.real.cloud import Computer
computer = Computer()
subprocess.Popen([*computer.enter, "setsid", "sleep", "1122"])
print(computer.group, flush=True)
time.sleep(86400)
"""


def processes_in(network: Path) -> list[Path]:
    """Return all processes in a network."""
    found = []
    for process in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):  # it has ended
            if (process / "ns/net").readlink() == network:
                found.append(process)
    return found


def test_killed_session_leaves_no_process_network_mount_or_control_group(cloud):
    session = subprocess.Popen([sys.executable, "-c", SESSION], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    group = session.stdout.readline().strip()
    (tree,) = [tree / group for tree in TREES if (tree / group).exists()]
    process = until(lambda: (tree / "laptop/cgroup.procs").read_text().split())[0]
    network = Path("/proc", process, "ns/net").readlink()
    session.kill()
    session.wait()
    until(lambda: not processes_in(network))  # nothing else holds namespaces and their mounts
    assert not [tree for tree in Path("/sys/fs/cgroup").iterdir() if (tree / group).exists()]

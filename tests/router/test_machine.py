"""Writing of system files."""

import signal
import subprocess
import sys

import pytest

from tpuswarm.errors import RunFailed
from tpuswarm.router import machine

TEXT = "[Unit]\n" * 100
KILLED = """
import resource, signal, sys
from tpuswarm.router import machine
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
machine.write(sys.argv[1], sys.argv[2])
"""


def write_and_be_killed(path: str) -> None:
    """Write in a process that the kernel ends at its 64th byte."""
    done = subprocess.run([sys.executable, "-B", "-c", KILLED, path, TEXT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGXFSZ, done.stderr


def test_kill_during_a_write_leaves_no_partial_file(tmp_path):
    new, old = tmp_path / "new.service", tmp_path / "old.service"
    old.write_text("old\n")
    for file in (new, old):
        write_and_be_killed(str(file))
    assert not new.exists() and old.read_text() == "old\n"


def test_failed_write_names_the_file_without_its_content(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(RunFailed, match=r"new\.service cannot be written on this machine: (?!.*Unit)"):
        machine.write(str(tmp_path / "a file" / "new.service"), TEXT)

"""Files of the system, written as root would, elsewhere."""

import os
import resource
import signal

import pytest

from tpuswarm.errors import RunFailed
from tpuswarm.router import machine

TEXT = "[Unit]\n" * 100


def killed_inside_write(path: str) -> None:
    """Write in a process that the kernel ends at its 64th byte."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        machine.write(path, TEXT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ


def test_a_kill_inside_a_write_leaves_no_half_file(tmp_path):
    new, old = tmp_path / "new.service", tmp_path / "old.service"
    old.write_text("old\n")
    for file in (new, old):
        killed_inside_write(str(file))
    assert not new.exists() and old.read_text() == "old\n"


def test_what_cannot_be_written_is_named_and_not_told(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(RunFailed, match=r"new\.service cannot be written on this machine: (?!.*Unit)"):
        machine.write(str(tmp_path / "a file" / "new.service"), TEXT)

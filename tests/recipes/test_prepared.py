"""Data that is made once: what a process that was killed meanwhile leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpuswarm.recipes.prepared import ABOUT, is_made, make

KILLED = """
import sys
from pathlib import Path
from tpuswarm.recipes.prepared import make

def write(folder):
    (folder / "large").write_text("half of it")
    print(folder, flush=True)
    sys.stdin.read()

make(Path(sys.argv[1]), write)
"""


def write(folder):
    (folder / ABOUT).write_text("{}")


@pytest.fixture
def at_work(tmp_path):
    """A process that makes a folder, and where; it began an hour ago."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "made"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    making = Path(process.stdout.readline().strip())
    os.utime(making, (0, time.time() - 3600))
    yield process, making
    process.kill()
    process.wait()


def test_what_a_killed_process_left_is_removed_and_what_another_makes_stays(at_work, tmp_path):
    process, making = at_work
    make(tmp_path / "made", write)
    assert is_made(tmp_path / "made") and (making / "large").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / "made" / ABOUT).unlink()
    (tmp_path / "made").rmdir()
    make(tmp_path / "made", write)
    assert is_made(tmp_path / "made") and not making.exists()


def test_what_was_made_a_moment_ago_stays(tmp_path):
    (tmp_path / "made.new").mkdir()  # of a process that does not hold it yet
    make(tmp_path / "made", write)
    assert (tmp_path / "made.new").is_dir()

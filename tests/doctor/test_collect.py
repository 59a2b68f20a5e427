"""The facts that are read on a host, from files and processes made here."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpuswarm.doctor import collect, processes


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_last_known_message_of_each_recent_log_is_read(home):
    progress = "50%|###   | step 1 of 2 \r" * 9000
    log = "No accelerator found 1\nNo accelerator found 2\nRuntimeWarning: os.fork() was called. Beware\n"
    for job, text in (("new", progress + log), ("old", log), ("quiet", "well\n")):
        (home / ".tpuswarm" / "jobs" / job).mkdir(parents=True)
        (home / ".tpuswarm" / "jobs" / job / "log").write_text(text)
    os.utime(home / ".tpuswarm/jobs/old/log", (time.time() - 2 * 86_400,) * 2)
    assert [(message["job"], message["text"]) for message in collect.find_messages()] == [
        ("new", "No accelerator found 2"), ("new", "RuntimeWarning: os.fork() was called. Beware"),
    ]  # fmt: skip


def test_versions_are_those_of_set_up(home):
    site = home / ".tpuswarm" / "venv" / "lib" / "python3.11" / "site-packages"
    for name in ("jax-0.9.0", "libtpu-0.0.42", "numpy-2.0.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (site / "jax-0.9.0.dist-info" / "METADATA").write_text('Requires-Dist: libtpu==0.0.42.*; extra == "tpu"\n')
    assert collect.read_versions() == {"python": "3.11", "jax": "0.9.0", "libtpu": "0.0.42"}
    assert collect.wanted_libtpu() == "==0.0.42.*"


def test_preloaded_library_is_tried_in_a_program(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/environment").write_text("LD_PRELOAD=/missing.so:/broken.so:/good.so\n")
    (tmp_path / "broken.so").write_text("no library")
    (tmp_path / "good.so").symlink_to(re.search(r"/\S*/libc[.-]\S+", Path("/proc/self/maps").read_text())[0])
    missing, broken, good = collect.read_preload().values()
    assert missing == "does not exist" and good == ""
    assert broken.startswith("breaks programs") and "cannot be preloaded" in broken


def test_connection_to_the_head_is_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert collect.try_connection(address) == {"address": address, "error": ""}
    assert collect.try_connection(address)["error"] == "Connection refused"


@contextmanager
def running(line: str, **environment: str):
    """A Python process that has printed a line, with these variables; its pid."""
    words = [sys.executable, "-c", f"{line}; print(flush=True); import sys; sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env={**os.environ, **environment}, **pipes) as child:
        assert child.stdout.readline()
        yield child.pid
        child.stdin.close()


def test_file_that_a_process_locked_is_found_with_it(tmp_path):
    file = tmp_path / "lock"
    file.touch()
    assert collect.find_locker(file) is None
    with running(f"import fcntl; f = open({str(file)!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX)") as pid:
        assert collect.find_locker(file)["pid"] == pid


def test_holder_is_a_leftover_when_its_exec_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    chip = tmp_path / "accel0"
    chip.touch()
    opens = f"f = open({str(chip)!r})"
    with running("pass", TPUSWARM_EXEC="mark") as command:
        marks = {"TPUSWARM_EXEC": "mark", "TPUSWARM_EXEC_PID": str(command)}
        with running(opens, **marks) as pid:
            (holder,) = processes.find_holders([chip])
            assert (holder["pid"], holder["is_requested"], holder["is_leftover"]) == (pid, True, False)
    with running(opens, **marks):
        (holder,) = processes.find_holders([chip])
        assert (holder["path"], holder["is_requested"], holder["is_leftover"]) == ("/accel0", False, True)


def test_program_with_jax_and_no_chip_is_found_unless_it_chose_the_cpu():
    import jaxlib

    libraries = sorted(Path(jaxlib.__file__).parent.rglob("*.so"), key=lambda path: path.stat().st_size)
    file = str(libraries[0])
    loads = f"import mmap; f = open({file!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    with running(loads, TPUSWARM_EXEC="a", JAX_PLATFORMS="") as pid, running(loads, TPUSWARM_EXEC="b") as other:
        requested = [
            (Path("/proc", str(number)), request, Path("/proc", str(number), "environ").read_bytes())
            for number, request in ((pid, b"a"), (other, b"b"))
        ]
        assert b"\0JAX_PLATFORMS=cpu\0" in requested[1][2]
        assert [program["pid"] for program in processes.find_cpu_programs([], requested)] == [pid]
        assert processes.find_cpu_programs([{"pid": pid}], requested) == []

"""File systems without locks: what needs one says where, what only reads does without."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

NO_LOCKS = f"""
import ctypes, errno, struct, sys
# A seccomp filter: load the number of the system call; if it is flock, let it fail, else allow it.
code = b"".join(struct.pack("HBBI", *row) for row in [
    (0x20, 0, 0, 0), (0x15, 0, 1, {32 if platform.machine() == "aarch64" else 73}),
    (0x06, 0, 0, 0x50000 | getattr(errno, sys.argv.pop(1))), (0x06, 0, 0, 0x7FFF0000)])
program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer := ctypes.create_string_buffer(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == prctl(22, 2, program, 0, 0) == 0
"""
"""Makes flock fail in this process with the error that its first argument names."""
COMMAND = "from tpuswarm.cli import main; main()"


def run_without_locks(error: str, script: str, *words: str, cwd: Path) -> tuple[str, str]:
    words = (sys.executable, "-c", NO_LOCKS + script, error, *words)
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, " ".join(done.stderr.split())


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_run_is_refused_with_the_way_out_and_leaves_nothing(tmp_path, error):
    _, err = run_without_locks(error, COMMAND, "train", "gpt2-tiny", "--steps", "1", "--run", "new/run", cwd=tmp_path)
    assert "error: new/run is on a file system without locks (" in err
    assert err.endswith("): use another --run, on a local disk, or mount it with locks") and not [*tmp_path.iterdir()]


def test_status_lists_a_run(finished_run, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run.run)
    assert "mine" in run_without_locks("ENOLCK", COMMAND, "status", cwd=tmp_path)[0]


def test_other_folders_are_named_with_their_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(tmp_path / "cloud"))
    _, err = run_without_locks("ENOLCK", COMMAND, "rehearsal", "start", cwd=tmp_path)
    assert f"{tmp_path}/cloud is on a file system without locks (No locks available): set TPUSWARM_REHEARSAL to" in err
    script = """
from pathlib import Path
from tpuswarm.errors import InputError
from tpuswarm.remote.known_hosts import KnownHosts
try:
    KnownHosts(Path("known")).add({"node": ["key"]})
except InputError as error:
    print(error)
"""
    assert "set XDG_STATE_HOME to a folder on a" in run_without_locks("ENOLCK", script, cwd=tmp_path)[0]
    assert not (tmp_path / ".known.lock").exists()

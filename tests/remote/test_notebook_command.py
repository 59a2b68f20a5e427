"""`tpuswarm notebook` before it begins: wrong words, a taken port, and chips that another process holds."""

import re
import socket
import subprocess
from multiprocessing import Pipe

import pytest

from tests.remote.conftest import ONE, SLICE
from tpuswarm.doctor.examine import MODULES
from tpuswarm.errors import RunFailed
from tpuswarm.remote.modules import pack_modules
from tpuswarm.remote.notebook import worker
from tpuswarm.remote.notebook.begin import line_that_reads


def test_notebook_needs_one_whole_machine_and_a_free_port(fleet):
    assert f"2 machines; name one, such as {ONE}" in fleet.run("notebook", "all", code=2)[1]
    wrong = fleet.run("notebook", f"{SLICE}/7", code=2)[1]
    assert f"on a whole machine, not on one worker: `tpuswarm notebook {SLICE}`" in wrong
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, err = fleet.run("notebook", ONE, "--port", str(port), code=2)
    assert f"another program on this computer uses port {port}." in err and f"notebook {ONE} --port" in err


def test_process_that_holds_the_tpu_is_named(fleet):
    with fleet.broken(ONE, "holder"):
        _, err = fleet.run("notebook", ONE, code=1)
    assert re.search(rf"{ONE}/0: process \d+ of \S+ holds /dev/accel0.*python3 train.py.*; .*--fix --kill`", err)
    with fleet.job(ONE, "trains", 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; echo begun; sleep infinity', prints="begun"):
        _, err = fleet.run("notebook", ONE, code=1)
    assert re.search(rf"{ONE}/0: job trains \(process \d+ of \S+\) holds /dev/accel0.*`tpuswarm stop trains`", err)


def test_unknown_holder_of_the_tpu_is_a_warning(fleet, monkeypatch):
    program = pack_modules(*MODULES)
    broken = program.replace(b"    wanted = {}", b"    raise ValueError(7)")
    assert broken != program

    async def stops(*about):
        raise RunFailed("it would begin")

    monkeypatch.setattr("tpuswarm.doctor.examine.pack_modules", lambda *names: broken)
    monkeypatch.setattr("tpuswarm.cli.look.notebook._begin_jupyter", stops)
    _, err = fleet.run("notebook", ONE, code=1)
    why = f"warning: cannot see who uses the chips of {ONE}/0: holders could not be read: ValueError: 7"
    assert err.splitlines()[-2:] == [why, "error: it would begin"], err


def test_silent_connection_to_a_worker_is_closed(monkeypatch):
    monkeypatch.setattr(worker, "AUTHENTICATION_TIMEOUT_S", 0.1)
    ours, theirs = Pipe()
    worker.serve(theirs, b"secret")
    assert theirs.closed
    ours.close()


@pytest.mark.parametrize("text", ["", '{\n  "port": 8888\n}'])
def test_file_of_a_server_is_read_once_it_is_written(tmp_path, text):
    """Jupyter creates its file before it writes into it."""
    (tmp_path / "jpserver-1.json").write_text(text)
    line = line_that_reads(f"{tmp_path}/jpserver-*.json")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((0, f"{text}\n") if text else (1, ""))

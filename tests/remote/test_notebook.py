"""`tpuswarm notebook` on a machine and on a slice of two workers: who may in, what cells show, what outlives what."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import websocket

from tests.cloud.rehearsal.conftest import until
from tests.remote.cells import Server
from tests.remote.conftest import Fleet
from tests.remote.test_tunnels import free_port
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.doctor.examine import MODULES
from tpuswarm.errors import RunFailed
from tpuswarm.remote.modules import sent
from tpuswarm.remote.notebook import worker
from tpuswarm.remote.notebook.begin import COLAB

ONE, SLICE = "v2-usc1f-0", "v4-usc2b-0"
ELSEWHERE = "https://elsewhere.example"
SUM = """\
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
rows = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
ones = jax.make_array_from_callback((8,), rows, lambda at: jnp.ones(8)[at])
total = float(jax.jit(jnp.sum)(ones))
print(f"sum {total}")
"""


@contextmanager
def opened(fleet: Fleet, *words: str) -> Iterator[tuple[Server, object]]:
    """The command under way, and the server that it leads to; ended as by Ctrl-C."""
    process = fleet.start("notebook", *words, "--port", str(free_port()))
    try:
        said = ""
        while "Ctrl-C disconnects" not in said:
            line = process.stdout.readline()
            assert line, said + process.stderr.read()
            said += line
        yield Server(said), process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("all", "2 machines: name one, such as v2-usc1f-0"),
        ("v5e-usc1a-0/7", "of a whole machine, not of a worker: `tpuswarm notebook v5e-usc1a-0`"),
    ],
)
def test_a_notebook_has_one_whole_machine(fleet, name, said):
    assert said in fleet.run("notebook", name, code=2)[1]


def test_a_taken_port_is_refused_before_anything_begins_and_a_free_one_named(fleet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, err = fleet.run("notebook", ONE, "--port", str(port), code=2)
    assert f"port {port} of this computer is taken" in err and f"notebook {ONE} --port" in err


def test_another_process_that_holds_the_tpu_is_named_as_doctor_names_it(fleet):
    ask(fleet.place, "break", name=ONE, fault="holder")
    try:
        _, err = fleet.run("notebook", ONE, code=1)
    finally:
        ask(fleet.place, "break", name=ONE, fault="holder", mend=True)
    assert re.search(rf"{ONE}/0: process \d+ of \S+ holds /dev/accel0.*python3 train.py.*; .*kill \d+", err)
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; echo begun; sleep infinity'
    fleet.run("exec", ONE, "--detach", "--name", "trains", "--", line)
    try:
        until(lambda: "begun" in fleet.run("logs", "trains")[0])
        _, err = fleet.run("notebook", ONE, code=1)
    finally:
        fleet.run("stop", "trains")
    assert re.search(rf"{ONE}/0: job trains \(process \d+ of \S+\) holds /dev/accel0.*`tpuswarm stop trains`", err)


def test_where_nobody_can_say_who_holds_the_tpu_that_is_said_before_it_begins(fleet, monkeypatch):
    there = sent(*MODULES)
    broken = there.replace(b"    wanted = {}", b"    raise ValueError(7)")
    assert broken != there

    async def stops(*about):
        raise RunFailed("it would begin")

    monkeypatch.setattr("tpuswarm.doctor.examine.sent", lambda *names: broken)
    monkeypatch.setattr("tpuswarm.cli.notebook._begin", stops)
    _, err = fleet.run("notebook", ONE, code=1)
    why = f"warning: nobody knows who has the chips of {ONE}/0: holders could not be looked at: ValueError: 7"
    assert err.splitlines()[-2:] == [why, "error: it would begin"], err


def test_who_connects_to_a_worker_and_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(worker, "PROVES_S", 0.1)
    ours, theirs = Pipe()
    worker.serve(theirs, b"secret", "127.0.0.1")
    assert theirs.closed
    ours.close()


def test_without_jupyter_set_up_is_offered_and_what_runs_outlives_the_command(fleet):
    fleet.run("notebook", ONE, "--stop")  # another test may have put Jupyter there
    assert until(lambda: not running(fleet, "jupyterlab", ONE))
    shutil.rmtree(fleet.user_home(f"{ONE}-0") / ".tpuswarm" / "notebook", ignore_errors=True)
    assert "has no Jupyter: `notebook = true` in [setup] puts it there" in fleet.run("notebook", ONE, code=2)[1]
    with opened(fleet, ONE, "--yes") as (server, _):
        cells = server.kernel()
        assert cells.run("import jax; print(jax.device_count(), jax.devices())").text.startswith("8 [CpuDevice(id=0)")
        cells.run("kept = 41")

        # Who may in.
        assert server.ask("GET", "/api/kernels", token="")[0] == 403
        assert server.ask("GET", "/api/kernels", token="wrong")[0] == 403
        status, headers = server.ask("GET", "/api/kernels", Origin=COLAB)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == COLAB
        assert headers["Access-Control-Allow-Credentials"] == "true"
        # Another page may make a browser ask with its cookie, which says who it is without the token.
        _, headers = server.ask("GET", f"/lab?token={server.token}", token="", Accept="text/html")
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert server.ask("GET", "/api/kernels", token="", **cookie)[0] == 200
        assert server.ask("POST", "/api/kernels", {}, token="", Origin=ELSEWHERE, **cookie)[0] == 404
        at = f"ws://127.0.0.1:{server.port}/api/kernels/{cells.id}/channels"
        with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
            websocket.create_connection(at, origin=ELSEWHERE, header=[f"Cookie: {cookie['Cookie']}"])
        secret = fleet.user_home(f"{ONE}-0") / ".tpuswarm/notebook/config/jupyter_server_config.json"
        assert secret.stat().st_mode & 0o077 == 0

        # A cell that prints 100 MB leaves the page alive.
        flood = cells.run("print('x' * 100_000_000)")
        assert "data rate exceeded" in flood.errors and len(flood.text) < 20_000_000
        assert cells.run("kept + 1").text == "42\n"
    fleet.run("flags", "set", ONE, "xla_dump_hlo_as_text=true")
    try:
        with opened(fleet, ONE) as (again, _):
            assert again.token == server.token
            found = again.ask("GET", "/api/kernels")
            assert [each["id"] for each in found] == [cells.id]
            cells.server = again
            cells._connect()
            assert cells.run("kept").text == "41\n"
            cells.restart()
            assert "--xla_dump_hlo_as_text=true" in cells.run("import os; print(os.environ['XLA_FLAGS'])").text
    finally:
        fleet.run("flags", "unset", ONE, "xla_dump_hlo_as_text")
        fleet.run("notebook", ONE, "--stop")
    assert until(lambda: not running(fleet, "jupyterlab", ONE) and not running(fleet, "ipykernel", ONE))
    assert f"Jupyter on {ONE} is not running" in fleet.run("notebook", ONE, "--stop")[0]


def running(fleet: Fleet, what: str, machine: str = "") -> list[int]:
    """Processes of a machine, or of all, whose command line says it."""
    machines = [each.name for each in fleet.place.machines.iterdir() if each.name.startswith(machine)]
    return [pid for pid in processes.find(machines) if what.encode() in command(pid)]


def command(pid: int) -> bytes:
    """A process's command line; empty: it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_each_cell_runs_on_all_workers_of_a_slice(books):
    with opened(books, SLICE) as (server, _):
        server.end_kernels()
        cells = server.kernel()
        shown = cells.run("import jax, os, time; print(jax.device_count(), jax.process_count(), jax.devices())")
        assert shown.text.startswith("8 2 [CpuDevice") and shown.text.count("CpuDevice") == 8, shown
        assert cells.run("os.environ['GREETING']").text == "'hello'\n"
        assert "sum 8.0\n" in cells.run(SUM).text
        assert cells.run("jax.process_index()").text == "0\nworker 1: 1\n"
        assert cells.run("%%worker 1\njax.process_index()").text == "1\n"
        assert "takes a worker's number, 0 to 1, not '2'" in cells.run("%%worker 2\n1").failed

        # As usual: completion, help, plots, progress bars.
        assert "process_index" in cells.ask("complete_request", code="jax.process_i", cursor_pos=13)["matches"]
        helped = cells.ask("inspect_request", code="jax.jit", cursor_pos=7, detail_level=0)
        assert helped["found"] and "Signature" in helped["data"]["text/plain"]
        plot = cells.run("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        assert plot.types.count("image/png") == 1
        bar = cells.run("from tqdm import tqdm\nfor _ in tqdm(range(3)): time.sleep(0.01)")
        assert "3/3" in bar.errors and "worker 1" not in bar.errors

        # What fails, on all and on one.
        assert "worker 1 failed too: ZeroDivisionError" in cells.run("1 / 0").errors
        failed = cells.run("1 / 0 if jax.process_index() else 5")
        assert failed.text == "5\n" and failed.failed.startswith("ZeroDivisionError: division by zero\nworker 1:")
        stopped = cells.run("print('begun'); time.sleep(600)", interrupts_at="begun")
        assert stopped.failed.startswith("KeyboardInterrupt") and stopped.seconds < 300
        assert cells.run("jax.process_count()").text == "2\n"
        flood = cells.run("print('x' * 100_000_000)")
        assert "data rate exceeded" in flood.errors and "worker 1" not in flood.text
        assert cells.run("1").text == "1\n"

        # A second kernel is told who has the slice; with the first one it gets it.
        other = server.kernel()
        assert "another notebook's kernel has this slice: shut that one down" in other.run("1").failed
        cells.end()
        other.restart()
        assert other.run("1").text == "1\n"
        other.end()


def test_a_worker_that_dies_ends_the_cell_and_no_engine_outlives_its_kernel(books):
    with opened(books, SLICE) as (server, _):
        server.end_kernels()
        cells = server.kernel()
        cells.run("import jax, os, signal, time")
        lost = cells.run("if jax.process_index(): os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
        assert lost.failed.startswith(
            "WorkerLost: worker 1 is lost: its process has ended: killed by signal 9, SIGKILL"
        )
        assert "restart the kernel" in lost.failed and lost.seconds < 300
        assert "worker 1 is lost" in cells.run("1").failed
        assert until(lambda: not running(books, "engine.json"))
        cells.restart()
        assert cells.run("import jax; jax.process_count()").text == "2\n"
        assert len(running(books, "engine.json")) == 2
        (kernel,) = running(books, "notebook/kernel.py")
        os.kill(kernel, signal.SIGKILL)
        assert until(
            lambda: not running(books, "notebook/kernel.py") or running(books, "notebook/kernel.py") != [kernel]
        )
        cells.end()
        assert until(lambda: not running(books, "engine.json"))
    books.run("notebook", SLICE, "--stop")
    assert until(lambda: not running(books, "notebook"))

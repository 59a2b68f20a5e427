"""A notebook on one machine: who may in, what outlives the command, and a page through outages."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import pytest
import websocket

from tests.cloud.rehearsal.conftest import until
from tests.remote.cells import Server, opened
from tests.remote.conftest import ONE, free_port
from tests.remote.lab import FOREVER, Lab
from tpuswarm.cli import notebook
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import NoWay
from tpuswarm.remote.notebook.begin import COLAB

pytestmark = pytest.mark.slow

ELSEWHERE = "https://elsewhere.example"


def test_jupyter_is_offered_lets_in_only_its_user_and_outlives_the_command(fleet):
    fleet.run("notebook", ONE, "--stop")
    fleet.wait_until_gone("jupyterlab", ONE)
    for name in ("notebook", "setup", "venv"):  # another test may have put Jupyter there, or have set up the machine
        shutil.rmtree(fleet.user_home(f"{ONE}-0") / ".tpuswarm" / name, ignore_errors=True)
    assert "has no Jupyter: `notebook = true` in [setup] puts it there" in fleet.run("notebook", ONE, code=2)[1]
    with opened(fleet, ONE, "--yes") as server:
        cells = server.kernel()
        assert cells.run("import jax; print(jax.device_count(), jax.devices())").text.startswith("8 [CpuDevice(id=0)")
        cells.run("value = 41")

        assert server.ask("GET", "/api/kernels", token="")[0] == 403
        assert server.ask("GET", "/api/kernels", token="wrong")[0] == 403
        status, headers = server.ask("GET", "/api/kernels", Origin=COLAB)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == COLAB
        assert headers["Access-Control-Allow-Credentials"] == "true"
        # Another page may make a browser send its cookie, which identifies the user without the token.
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
        assert cells.run("value + 1").text == "42\n"
    fleet.run("flags", "set", ONE, "xla_dump_hlo_as_text=true")
    try:
        with opened(fleet, ONE) as again:
            assert again.token == server.token
            assert [kernel["id"] for kernel in again.ask("GET", "/api/kernels")] == [cells.id]
            cells.connect(again)
            assert cells.run("value").text == "41\n"
            cells.restart()
            assert "--xla_dump_hlo_as_text=true" in cells.run("import os; print(os.environ['XLA_FLAGS'])").text
    finally:
        fleet.run("flags", "unset", ONE, "xla_dump_hlo_as_text")
        fleet.run("notebook", ONE, "--stop")
    fleet.wait_until_gone("jupyterlab", ONE)
    fleet.wait_until_gone("ipykernel", ONE)
    assert f"Jupyter on {ONE} is not running" in fleet.run("notebook", ONE, "--stop")[0]


class Unplugged(Connections):
    """Connections of this computer, whose plug may be pulled."""

    away: ClassVar = threading.Event()
    opened: ClassVar[list] = []

    async def to(self, host):
        if self.away.is_set():
            raise NoWay(host, "cannot be reached: network is unreachable")
        connection = await super().to(host)
        self.opened.append((asyncio.get_running_loop(), connection))
        return connection

    @classmethod
    def on_all(cls, method: str, *values) -> None:
        for loop, connection in cls.opened:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(getattr(connection, method), *values)


@contextmanager
def served(reach, port: int) -> Iterator[tuple[Server, list[str]]]:
    """Do what the command does, in a thread; the server, and what is printed."""
    printed: list[str] = []
    loop, ready = asyncio.new_event_loop(), threading.Event()

    def say(text: str, **about) -> None:
        printed.append(text)
        if "Ctrl-C disconnects" in text:
            ready.set()

    async def work() -> None:
        first = await notebook._first(reach, await asyncio.to_thread(notebook._one, reach, ONE))
        await notebook._serve(reach, ONE, port, first)

    before, notebook.say = notebook.say, say
    task = loop.create_task(work())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        while not ready.wait(0.1):
            assert not task.done(), task.exception()
        yield Server(printed[-1]), printed
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        notebook.say = before


def test_page_and_its_running_cell_come_back_after_outages(fleet, reach, browser, tmp_path, monkeypatch):
    with opened(fleet, ONE, "--yes"):
        pass  # Jupyter is there
    monkeypatch.setattr("tpuswarm.remote.connect.Connections", Unplugged)
    counts = (
        "import os, time\nfor n in range(20):\n    print('at', n, flush=True)\n"
        f"    while n == 5 and not os.path.exists('{tmp_path}/go'): time.sleep(0.02)\n"
        f"open('{tmp_path}/done', 'w').close()"
    )
    cells = ["import jax\njax.devices()", "1 / 0", FOREVER, counts, "value = 41", "value + 1"]
    browser.resize(1280, 1000)
    with served(reach, free_port()) as (server, printed):
        lab = Lab(browser, server, "one.ipynb", cells)
        assert lab.run(0).count("CpuDevice") == 8
        assert "ZeroDivisionError" in lab.run(1)
        lab.run(2, waits=False)
        lab.wait_for(2, "at 1\n")
        lab.interrupt()
        assert "KeyboardInterrupt" in lab.ended(2)

        lab.run(3, waits=False)
        lab.wait_for(3, "at 5")
        Unplugged.away.set()
        Unplugged.on_all("abort")
        until(lambda: "was lost" in " ".join(printed))
        (tmp_path / "go").touch()
        until((tmp_path / "done").exists)
        assert "at 19" not in lab.shown(3), "it went on without the page"
        Unplugged.away.clear()
        assert [f"at {n}" in lab.ended(3) for n in range(20)] == [True] * 20
        assert sum("is still running" in text for text in printed) >= 2, "at first, and after the lost connection"

        lab.run(4)
        cloud = fleet.place.read_address()["pid"]
        lost = " ".join(printed).count("was lost")
        os.kill(cloud, signal.SIGSTOP)  # the machine answers nobody
        try:
            Unplugged.on_all("set_keepalive", 0.3, 3)
            until(lambda: " ".join(printed).count("was lost") > lost)
        finally:
            os.kill(cloud, signal.SIGCONT)
        assert "42" in lab.run(5), "the same kernel"
        assert browser.hosts() == set()
        browser.shoot(tmp_path / "one.png")
    fleet.run("notebook", ONE, "--stop")

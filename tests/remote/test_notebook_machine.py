"""A notebook on one machine: who may in, what outlives the command and outages, and its page."""

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
from tests.hosts import free_port
from tests.remote.cells import Server, opened
from tests.remote.conftest import ONE
from tpuswarm.cli.look import notebook
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import HostUnreachable
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

        assert server.request("GET", "/api/kernels", token="")[0] == 403
        assert server.request("GET", "/api/kernels", token="wrong")[0] == 403
        status, headers = server.request("GET", "/api/kernels", Origin=COLAB)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == COLAB
        assert headers["Access-Control-Allow-Credentials"] == "true"
        # Another page may make a browser send its cookie, which identifies the user without the token.
        _, headers = server.request("GET", f"/lab?token={server.token}", token="", Accept="text/html")
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert server.request("GET", "/api/kernels", token="", **cookie)[0] == 200
        assert server.request("POST", "/api/kernels", {}, token="", Origin=ELSEWHERE, **cookie)[0] == 404
        at = f"ws://127.0.0.1:{server.port}/api/kernels/{cells.id}/channels"
        with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
            websocket.create_connection(at, origin=ELSEWHERE, header=[f"Cookie: {cookie['Cookie']}"])
        secret = fleet.user_home(f"{ONE}-0") / ".tpuswarm/notebook/config/jupyter_server_config.json"
        assert secret.stat().st_mode & 0o077 == 0

        # A cell that prints 100 MB leaves the page alive.
        flood = cells.run("print('x' * 100_000_000)")
        assert "data rate exceeded" in flood.errors and len(flood.text) < 20_000_000
        assert cells.run("value + 1").text == "42\n"
    with fleet.flag(ONE, "xla_dump_hlo_as_text", "true"), opened(fleet, ONE) as again:
        assert again.token == server.token
        assert [kernel["id"] for kernel in again.request("GET", "/api/kernels")] == [cells.id]
        cells.connect(again)
        assert cells.run("value").text == "41\n"
        cells.restart()
        assert "--xla_dump_hlo_as_text=true" in cells.run("import os; print(os.environ['XLA_FLAGS'])").text
    fleet.run("notebook", ONE, "--stop")
    fleet.wait_until_gone("jupyterlab", ONE)
    fleet.wait_until_gone("ipykernel", ONE)
    assert f"Jupyter on {ONE} is not running" in fleet.run("notebook", ONE, "--stop")[0]


class Unplugged(Connections):
    away: ClassVar = threading.Event()
    opened: ClassVar[list] = []

    async def to(self, host):
        if self.away.is_set():
            raise HostUnreachable(host, "cannot be reached: network is unreachable")
        connection = await super().to(host)
        self.opened.append((asyncio.get_running_loop(), connection))
        return connection

    @classmethod
    def on_all(cls, method: str, *values) -> None:
        for loop, connection in cls.opened:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(getattr(connection, method), *values)


@contextmanager
def served(routes, port: int) -> Iterator[tuple[Server, Server, list[str]]]:
    """Serve a notebook in a thread; yield the server, the same without the way there, and printed lines."""
    printed: list[str] = []
    direct: list[Server] = []
    loop, ready = asyncio.new_event_loop(), threading.Event()

    def say(text: str, **about) -> None:
        printed.append(text)
        if "Ctrl-C disconnects" in text:
            ready.set()

    async def work() -> None:
        first = await notebook._start(routes, await asyncio.to_thread(notebook._find_machine, routes, ONE))
        direct.append(Server(first.url(first.port, path="lab")))
        await notebook._forward(routes, ONE, port, first)

    before, notebook.echo = notebook.echo, say
    task = loop.create_task(work())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        while not ready.wait(0.1):
            assert not task.done(), task.exception()
        yield Server(printed[-1]), direct[0], printed
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        notebook.echo = before


def test_cell_runs_on_through_outages_and_its_output_comes_back(fleet, routes, tmp_path, monkeypatch):
    with opened(fleet, ONE, "--yes"):
        pass  # Jupyter is there
    monkeypatch.setattr("tpuswarm.cli.look.notebook.Connections", Unplugged)
    counts = (
        "import os, time\nfor n in range(20):\n    print('at', n, flush=True)\n"
        f"    while n == 5 and not os.path.exists('{tmp_path}/go'): time.sleep(0.02)\n"
        f"value = 41\nopen('{tmp_path}/done', 'w').close()"
    )
    with served(routes, free_port()) as (server, direct, printed):
        cells = server.kernel()

        def reconnect() -> bool:
            with suppress(OSError, websocket.WebSocketException):
                cells.connect(server)
                return True
            return False

        def unplug() -> None:
            Unplugged.away.set()
            Unplugged.on_all("abort")
            until(lambda: "was lost" in " ".join(printed))
            # Jupyter keeps messages only for clients that it knows to be gone.
            until(lambda: direct.request("GET", f"/api/kernels/{cells.id}")["connections"] == 0)
            (tmp_path / "go").touch()
            until((tmp_path / "done").exists)
            Unplugged.away.clear()
            until(reconnect)

        shown = cells.run(counts, "at 5\n", unplug)
        assert shown.text == "".join(f"at {n}\n" for n in range(20))
        assert sum("is still running" in text for text in printed) >= 2, "at first, and after the lost connection"
        cloud = fleet.place.read_address()["pid"]
        lost = " ".join(printed).count("was lost")
        os.kill(cloud, signal.SIGSTOP)  # no machine answers
        try:
            Unplugged.on_all("set_keepalive", 0.3, 3)
            until(lambda: " ".join(printed).count("was lost") > lost)
        finally:
            os.kill(cloud, signal.SIGCONT)
        until(reconnect)
        assert cells.run("value + 1").text == "42\n", "the same kernel"
    fleet.run("notebook", ONE, "--stop")


STATUS = "return document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status || ''"
OUTPUT = "return document.querySelector('.jp-OutputArea-output')?.textContent || ''"


@pytest.mark.long
def test_page_runs_a_notebook_of_another_service_and_contacts_no_other_host(fleet, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # Colab writes this
    cell = {"cell_type": "code", "id": "c", "source": "6 * 7", "metadata": {}, "outputs": [], "execution_count": None}
    content = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    with opened(fleet, ONE, "--yes") as server:
        server.request("PUT", "/api/contents/one.ipynb", {"type": "notebook", "format": "json", "content": content})
        browser.open(server.url.replace("/lab?", "/lab/tree/one.ipynb?"))
        browser.wait(lambda _: server.has_one_connected_kernel(), "a kernel")
        browser.wait(lambda tab: tab.js(STATUS) == "idle", "a kernel that is ready")
        browser.driver.find_element("css selector", ".jp-CodeCell .cm-content").click()
        ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
        browser.wait(lambda tab: "42" in tab.js(OUTPUT), "the output of a cell")
        assert browser.hosts() == set()
    fleet.run("notebook", ONE, "--stop")

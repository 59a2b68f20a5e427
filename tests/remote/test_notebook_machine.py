"""A notebook on one machine: who may in, what outlives the command, and its page."""

import asyncio
import shutil
import threading

import pytest
import websocket

from tests.hosts import free_port
from tests.remote.cells import Server, opened
from tests.remote.conftest import ONE
from tests.waiting import until
from tpuswarm.cli.look import notebook
from tpuswarm.remote.connect import Connections
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
    # The job of these processes ends a moment after them.
    until(lambda: f"Jupyter on {ONE} is not running" in fleet.run("notebook", ONE, "--stop")[0])


def test_notebook_comes_back_after_a_lost_connection(fleet, routes, monkeypatch):
    with opened(fleet, ONE, "--yes"):
        pass  # Jupyter is there
    connections, printed, port = [], [], free_port()

    class Noted(Connections):
        async def to(self, host):
            connections.append(connection := await super().to(host))
            return connection

    async def serve() -> None:
        started = await notebook._start(routes, await asyncio.to_thread(notebook._find_machine, routes, ONE))
        await notebook._forward(routes, ONE, port, started)

    def times_shown() -> int:
        return sum("Ctrl-C disconnects" in text for text in printed)

    monkeypatch.setattr(notebook, "Connections", Noted)
    monkeypatch.setattr(notebook, "echo", lambda text, **about: printed.append(text))
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        until(lambda: times_shown() == 1 or task.done())
        cells = Server(printed[-1]).kernel()
        cells.run("value = 41")
        for connection in connections:
            loop.call_soon_threadsafe(connection.abort)
        until(lambda: times_shown() == 2 or task.done())
        assert "was lost" in " ".join(printed) and "is still running" in printed[-1]
        cells.connect(Server(printed[-1]))
        assert cells.run("value + 1").text == "42\n", "the same kernel"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
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

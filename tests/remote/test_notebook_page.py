"""Notebooks in a real browser: on one machine through a connection that is lost meanwhile, and on a slice."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from tests.remote.cells import Server
from tests.remote.lab import Lab
from tests.remote.test_notebook import ONE, SLICE, SUM, opened
from tests.remote.test_tunnels import free_port
from tpuswarm.cli import notebook
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import NoWay

OUT_S = 5.0
"""Seconds that the network is away."""
COUNT = "import time\nfor n in range(60): print('at', n, flush=True); time.sleep(0.2)"
LONG = COUNT.replace("60", "3000")
"""To be interrupted."""


class Unplugged(Connections):
    """Those of this computer, whose plug may be pulled."""

    away: ClassVar = threading.Event()
    all: ClassVar[list] = []

    async def to(self, host):
        if self.away.is_set():
            raise NoWay(host, "cannot be reached: network is unreachable")
        found = await super().to(host)
        self.all.append((asyncio.get_running_loop(), found))
        return found

    @classmethod
    def pull(cls) -> None:
        """Every connection is lost, and none is made."""
        cls.away.set()
        for loop, each in cls.all:
            with suppress(RuntimeError):  # a loop that has ended, with what was in it
                loop.call_soon_threadsafe(each.abort)


@contextmanager
def served(reach, port: int) -> Iterator[tuple[Server, list[str]]]:
    """What the command does, in a thread of this process; the server, and what is said."""
    said: list[str] = []
    loop, ready = asyncio.new_event_loop(), threading.Event()

    def say(text: str, **about) -> None:
        said.append(text)
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
        yield Server(said[-1]), said
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        notebook.say = before


def test_a_page_comes_back_by_itself_after_a_lost_connection(fleet, reach, browser, tmp_path, monkeypatch):
    with opened(fleet, ONE, "--yes"):
        pass  # Jupyter is there
    monkeypatch.setattr("tpuswarm.remote.connect.Connections", Unplugged)
    browser.resize(1280, 1000)
    with served(reach, free_port()) as (server, said):
        lab = Lab(browser, server, "one.ipynb", ["import jax\njax.devices()", "1 / 0", LONG, COUNT, "print('again')"])
        assert lab.run(0).count("CpuDevice") == 8
        assert "ZeroDivisionError" in lab.run(1)
        lab.run(2, waits=False)
        lab.wait_for(2, "at 1\n")
        lab.interrupt()
        assert "KeyboardInterrupt" in lab.ended(2) and "at 2999" not in lab.shown(2)
        lab.run(3, waits=False)
        lab.wait_for(3, "at 1\n")
        Unplugged.pull()
        browser.driver.execute_async_script(f"setTimeout(arguments[0], {OUT_S * 1000})")
        assert "at 59" not in lab.shown(3)
        Unplugged.away.clear()
        assert [f"at {n}" in lab.ended(3) for n in (0, 20, 40, 59)] == [True] * 4
        assert "again" in lab.run(4)
        assert any("was lost" in each for each in said)
        assert sum("is still running" in each for each in said) >= 2, "at first, and after the lost connection"
        assert browser.hosts() == set()
        browser.shoot(tmp_path / "one.png")
    fleet.run("notebook", ONE, "--stop")


def test_a_slice_in_a_page_shows_all_devices_a_failing_worker_and_an_interrupt(books, browser, tmp_path):
    cells = [
        "import jax, time\njax.devices()", SUM, "f'worker {jax.process_index()}'",
        "if jax.process_index() == 1: raise ValueError('no rows left')", LONG, "print('alive')",
    ]  # fmt: skip
    browser.resize(1280, 1300)
    with opened(books, SLICE) as (server, _):
        server.end_kernels()
        lab = Lab(browser, server, "slice.ipynb", cells)
        assert lab.run(0).count("CpuDevice") == 8
        assert "sum 8.0" in lab.run(1)
        assert lab.run(2).split("\n")[:2] == ["'worker 0'", "worker 1: 'worker 1'"]
        assert "worker 1:" in lab.run(3) and "ValueError: no rows left" in lab.shown(3)
        lab.run(4, waits=False)
        lab.wait_for(4, "at 1\n")
        lab.interrupt()
        assert "KeyboardInterrupt" in lab.ended(4) and "at 2999" not in lab.shown(4)
        assert "alive" in lab.run(5)
        assert browser.hosts() == set()
        browser.shoot(tmp_path / "slice.png")
        server.end_kernels()

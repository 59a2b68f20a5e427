"""The network is away for a minute: cloud and machines answer nobody, nor does the page's server; then they go on.

A notebook, TensorBoard and the page lose it side by side, and each has to come back by itself.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.remote.lab import Lab
from tests.remote.test_notebook import ONE, opened
from tests.remote.test_tensorboard import _answer as answer
from tests.watch.conftest import Page, free_port
from tests.watch.made import MadeRun
from tpuswarm.train.look.board import Board

AWAY_S = 60.0
POINTS = "/data/plugin/scalars/scalars?tag=loss&run=v2-usc1f-0-runs/away/tensorboard"


@contextmanager
def away(*pids: int) -> Iterator[None]:
    """Processes that stand still for AWAY_S, whatever is done meanwhile: who is connected to them hears nothing."""
    until = time.monotonic() + AWAY_S
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_minute_without_network_ends_neither_notebook_nor_tensorboard_nor_page(fleet, browser, tmp_path):
    fleet.run("exec", ONE, "--", "mkdir -p runs")
    there = fleet.user_home("v2-usc1f-0-0") / "runs" / "away"
    board = Board(there / "tensorboard", 0)
    board.write({"step": 1, "tokens": 8, "loss": 3.0})
    board.flush()
    run = MadeRun(tmp_path / "run", 3, 1000).lives()
    run.grow(20)
    page = Page(tmp_path, "run")
    port = free_port()
    command = fleet.start("tensorboard", "v2-usc1f-0:runs", "--port", str(port))
    try:
        assert "shows v2-usc1f-0-runs" in command.stdout.readline()
        browser.wait(lambda _: answer(port, POINTS), "its first point")
        with opened(fleet, ONE, "--yes") as (server, _):
            lab = Lab(browser, server, "away.ipynb", ["kept = 41", "kept + 1"])
            lab.run(0)
            notebook = browser.driver.current_window_handle
            browser.driver.switch_to.new_window("tab")
            browser.open(page.url)
            browser.wait(lambda each: "60,000 of 3,000,000 tokens" in each.text())
            with away(fleet.place.read_address()["pid"], page.process.pid):
                browser.wait(lambda each: "connection lost, trying again" in each.text(), "that it is noticed")
                run.grow(5)
                board.write({"step": 11, "tokens": 88, "loss": 2.0})
                board.flush()
            browser.wait(lambda each: "live" in each.text() and "75,000 of 3,000,000" in each.text(), "the page")
            assert "connection lost" not in browser.text()
            browser.driver.switch_to.window(notebook)
            assert "42" in lab.run(1), "the same kernel"
        browser.wait(lambda _: [point[1] for point in answer(port, POINTS)] == [1, 11], "TensorBoard's second point")
    finally:
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        page.end()
        run.ends()
        shutil.rmtree(there)
    assert "Traceback" not in err
    fleet.run("notebook", ONE, "--stop")

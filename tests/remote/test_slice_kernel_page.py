"""A slider and captured output of a slice's kernel, in JupyterLab in a real browser."""

import json
import subprocess
import sys
from pathlib import Path

import jupyterlab_widgets
import pytest

from tests.hosts import free_port
from tests.remote.cells import Server
from tests.remote.slice_kernel import SETUP, Slice
from tests.waiting import until
from tpuswarm.remote.notebook import begin

pytestmark = pytest.mark.long

SLIDER = """\
import ipywidgets as widgets
slider, out = widgets.IntSlider(value=2, max=10), widgets.Output()
def moved(change):
    with out:
        print("sum", total(change["new"]))
slider.observe(moved, "value")
display(slider, out)
"""
TEXT = "return [...document.querySelectorAll('.jp-OutputArea-output')].map(each => each.innerText).join('|')"


@pytest.fixture
def lab(tmp_path):
    """A server with a notebook, whose kernel is a slice's."""
    made = Slice(tmp_path)
    port, home = free_port(), made.homes[0]
    cells = [
        {"cell_type": "code", "id": str(n), "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        for n, source in enumerate([SETUP + SLIDER, "print('last', total(slider.value))"])
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (home / "one.ipynb").write_text(json.dumps(book))
    config = begin._config("token")
    config["ServerApp"].update(port=port, root_dir=str(home))
    (home / "config.json").write_text(json.dumps(config))
    widgets = Path(jupyterlab_widgets.__file__).parents[4] / "share/jupyter"
    paths = f"{made.environment['JUPYTER_PATH']}:{widgets}"
    environment = {**made.environment, "HOME": str(home), "JUPYTER_PATH": paths, "JUPYTER_RUNTIME_DIR": str(home / "r")}
    environment["JUPYTER_CONFIG_PATH"] = str(made.notebook(0) / "config")
    words = [sys.executable, "-m", "jupyterlab", f"--config={home}/config.json"]
    server = subprocess.Popen(words, cwd=home, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: any((home / "r").glob("jpserver-*.json")))
    yield Server(f"http://127.0.0.1:{port}/lab?token=token")
    server.terminate()
    server.wait()
    made.close()


def test_slider_moves_on_all_workers_and_output_is_captured(lab, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def run_cell(number: int) -> None:
        cell = f"[...document.querySelectorAll('.jp-CodeCell .cm-content')].at({number})"
        focus = f"const cell = {cell}; cell?.focus(); return cell !== undefined && document.activeElement === cell"
        browser.wait(lambda tab: tab.js(focus), "a cell")
        ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()

    browser.open(lab.url.replace("/lab?", "/lab/tree/one.ipynb?"))
    status = "return document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status || ''"
    browser.wait(lambda _: lab.has_one_connected_kernel(), "a kernel")
    browser.wait(lambda tab: tab.js(status) == "idle", "a kernel that is ready")
    run_cell(0)
    browser.wait(lambda tab: tab.js("return document.querySelector('.noUi-handle') !== null"), "a slider")
    browser.wait(lambda tab: tab.js(status) == "idle", "the end of the cell")
    browser.driver.find_element("css selector", ".noUi-handle").send_keys(Keys.ARROW_RIGHT)
    browser.wait(lambda tab: "sum 12.0" in tab.js(TEXT), "what the callback prints")
    run_cell(-1)
    browser.wait(lambda tab: "last 12.0" in tab.js(TEXT), "the value in a later cell")
    assert "worker 1" not in browser.js(TEXT)

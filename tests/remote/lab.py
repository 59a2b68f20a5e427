"""A notebook in JupyterLab's page, used as a person uses it."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser import Browser
from tests.remote.cells import Server

NOT_NOW = ElementClickInterceptedException, ElementNotInteractableException, StaleElementReferenceException
"""A dialog covers the cell, or JupyterLab redraws it."""
PRESS_AGAIN_S = 10.0
"""Keys that did nothing by then were missed: a cell shows at once that it waits for its kernel."""
SHOWN = """
const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[arguments[0]];
return cell ? [...cell.querySelectorAll('.jp-OutputArea-output')].map(output => output.innerText).join('\\n') : '';
"""
PROMPT = """
const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[arguments[0]];
return cell ? cell.querySelector('.jp-InputPrompt').innerText : '';
"""
DISMISSED = """
const notice = document.querySelector('.jp-Dialog');
if (notice) [...notice.querySelectorAll('.jp-Dialog-button')].pop().click();
return !notice;
"""
FOREVER = "import time\nfor n in range(100_000): print('at', n, flush=True); time.sleep(0.2)"
"""A cell to be interrupted."""
STATUS = "return document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status || ''"


class Lab:
    """One notebook, open."""

    def __init__(self, browser: Browser, server: Server, name: str, cells: Sequence[str]):
        self._browser = browser
        empty = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        found = [{**empty, "id": f"c{n}", "source": source} for n, source in enumerate(cells)]
        # The name that a notebook from Colab or elsewhere has for its kernel.
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        content = {"cells": found, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}
        server.ask("PUT", f"/api/contents/{name}", {"type": "notebook", "format": "json", "content": content})
        browser.open(server.url.replace("/lab?", f"/lab/tree/{name}?"))
        browser.wait(lambda browser: browser.js(STATUS) == "idle", "a kernel that is ready")
        last = len(cells) - 1
        browser.wait(lambda browser: browser.js(SHOWN.split(";")[0] + "; return !!cell", last), "the last cell")

    def run(self, number: int, waits: bool = True) -> str:
        """Click into a cell and press Shift and Enter; return what it shows when it has ended.

        JupyterLab may miss the keys while it is busy, or show a dialog: that is dismissed, and they are pressed again.
        """

        def begun(browser: Browser) -> bool:
            nonlocal pressed
            if browser.js(PROMPT, number) not in ("[ ]:", ""):
                return True
            if browser.js(DISMISSED) and time.monotonic() - pressed > PRESS_AGAIN_S:
                self._press(number)
                pressed = time.monotonic()
            return False

        self.dismiss()
        self._press(number)
        pressed = time.monotonic()
        self._browser.wait(begun, f"cell {number} to begin")
        return self.ended(number) if waits else ""

    def _press(self, number: int) -> None:
        cell = self._browser.driver.find_elements("css selector", ".jp-Notebook .jp-CodeCell .cm-content")[number]
        with suppress(*NOT_NOW):
            cell.click()
            keys = ActionChains(self._browser.driver)
            keys.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()

    def dismiss(self) -> None:
        """Close the dialog that JupyterLab shows while it cannot reach its server; it goes on trying."""
        self._browser.wait(lambda browser: browser.js(DISMISSED), "the end of a dialog")

    def ended(self, number: int) -> str:
        """Wait for the end of a cell; return what it shows."""
        self._browser.wait(lambda browser: "*" not in browser.js(PROMPT, number), f"the end of cell {number}")
        return self.shown(number)

    def shown(self, number: int) -> str:
        """Return the output below a cell."""
        return self._browser.js(SHOWN, number)

    def wait_for(self, number: int, text: str) -> None:
        """Wait until that is below a cell."""
        self._browser.wait(lambda _: text in self.shown(number), json.dumps(text))

    def interrupt(self) -> None:
        """Press the keys for it: I twice, outside of a cell."""
        actions = ActionChains(self._browser.driver)
        actions.send_keys(Keys.ESCAPE).send_keys("i").send_keys("i").perform()

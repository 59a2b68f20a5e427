"""A notebook in JupyterLab's page, typed and looked at as a person does it."""

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
"""A dialog has just come over a cell, or JupyterLab draws it anew."""
HEARD_S = 10.0
"""Seconds after which keys that did nothing were not heard: a cell shows at once that it waits for its kernel."""
SHOWN = """
const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[arguments[0]];
return cell ? [...cell.querySelectorAll('.jp-OutputArea-output')].map(each => each.innerText).join('\\n') : '';
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
STATUS = "return document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status || ''"


class Lab:
    """One notebook, open."""

    def __init__(self, browser: Browser, server: Server, name: str, cells: Sequence[str]):
        self._browser = browser
        found = [
            {"cell_type": "code", "id": f"c{n}", "execution_count": None, "metadata": {}, "outputs": [], "source": each}
            for n, each in enumerate(cells)
        ]
        # As a notebook from Colab or elsewhere asks for its kernel.
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        content = {"cells": found, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}
        server.ask("PUT", f"/api/contents/{name}", {"type": "notebook", "format": "json", "content": content})
        browser.open(server.url.replace("/lab?", f"/lab/tree/{name}?"))
        browser.wait(lambda each: each.js(STATUS) == "idle", "a kernel that is ready")
        browser.wait(lambda each: each.js(SHOWN.split(";")[0] + "; return !!cell", len(cells) - 1), "the last cell")

    def run(self, number: int, waits: bool = True) -> str:
        """Click into a cell and press Shift and Enter; what it shows when it has ended.

        JupyterLab, still at work on what it has just shown, may not hear the keys, or come with a dialog (such as
        which kernel is meant): then that is answered, and they are pressed again.
        """

        def begun(browser: Browser) -> bool:
            nonlocal pressed
            if browser.js(PROMPT, number) not in ("[ ]:", ""):
                return True
            if browser.js(DISMISSED) and time.monotonic() - pressed > HEARD_S:
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
        """Take away what JupyterLab says while it does not reach its server; it goes on trying beneath it."""
        self._browser.wait(lambda each: each.js(DISMISSED), "the end of a notice")

    def ended(self, number: int) -> str:
        """What a cell shows when it has ended."""
        self._browser.wait(lambda each: "*" not in each.js(PROMPT, number), f"the end of cell {number}")
        return self.shown(number)

    def shown(self, number: int) -> str:
        """What is below a cell."""
        return self._browser.js(SHOWN, number)

    def wait_for(self, number: int, text: str) -> None:
        """Until that is below a cell."""
        self._browser.wait(lambda _: text in self.shown(number), json.dumps(text))

    def interrupt(self) -> None:
        """By the keys, I twice outside of a cell."""
        actions = ActionChains(self._browser.driver)
        actions.send_keys(Keys.ESCAPE).send_keys("i").send_keys("i").perform()

"""A headless Chromium for tests, which records the hosts that pages contact and the errors in their console."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
WEB = ("http", "https", "ws", "wss")
LOOPBACK = ("127.0.0.1", "localhost")
PATIENCE = 120.0
"""Seconds; other processes may have the cores."""


class Browser:
    """A window of Chromium."""

    def __init__(self, driver: "Chrome"):
        self.driver = driver
        self._seen: list[dict[str, Any]] = []

    def reset(self) -> None:
        """Be as a new one: an empty window, no cookies, caches, stored data and logs."""
        old = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        for handle in old:
            self.driver.switch_to.window(handle)
            origin = urlsplit(self.driver.current_url)
            if origin.scheme in WEB:
                about = {"origin": f"{origin.scheme}://{origin.netloc}", "storageTypes": "all"}
                self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", about)
            self.driver.close()
        self.driver.switch_to.window(new)
        for command in ("Network.clearBrowserCookies", "Network.clearBrowserCache"):
            self.driver.execute_cdp_cmd(command, {})
        for kind in ("browser", "performance"):
            self._log(kind)
        self._seen = []

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size in pixels that pages see, as on a device of that size."""
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)

    def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark` pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.driver.get(url)

    def js(self, script: str, *values: Any) -> Any:
        """Run a script; return its result."""
        return self.driver.execute_script(script, *values)

    def text(self) -> str:
        """Return the text on the page."""
        return self.js("return document.body ? document.body.innerText : ''")

    def wait(self, condition: Callable[["Browser"], Any], what: str = "") -> Any:
        """Return the first true result of `condition`; fail, with the text on the page, if there is none."""
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition(self))
        except Exception as error:
            raise AssertionError(f"{what or 'the condition'} did not hold; the page shows:\n{self.text()}") from error

    def _log(self, kind: str) -> list[dict[str, Any]]:
        driver: Any = self.driver
        return list(driver.get_log(kind))

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console since the last call."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """Return all hosts that pages have contacted, except loopback."""
        for entry in self._log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                self._seen.append(event["params"])
        urls = [seen["request"]["url"] if "request" in seen else seen["url"] for seen in self._seen]
        return {urlsplit(url).hostname or "" for url in urls if urlsplit(url).scheme in WEB} - set(LOOPBACK)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a Chromium with an empty profile in that folder; skip the test if there is none."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("this machine has no chromium and chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def chromium_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of a process."""
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def browser(chromium_of_session: Browser) -> Browser:
    """A Chromium in the state of a new one, 1280 pixels wide."""
    chromium_of_session.reset()
    chromium_of_session.resize(1280)
    return chromium_of_session

"""A headless Chromium for tests: empty, without a network of its own, and with what it asked for and complained of."""

import base64
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
"""Seconds, where other processes have the cores."""


class Browser:
    """One window of it."""

    def __init__(self, driver: "Chrome"):
        self.driver = driver
        self._seen: list[dict[str, Any]] = []

    def resize(self, width: int, height: int = 900) -> None:
        """Make what a page sees so large, in pixels, as a device would."""
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as its user likes pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self.driver.get(url)

    def js(self, script: str, *values: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *values)

    def text(self) -> str:
        """All that is shown."""
        return self.js("return document.body ? document.body.innerText : ''")

    def wait(self, condition: Callable[["Browser"], Any], what: str = "") -> Any:
        """The first answer of `condition` that is true; fails, with what is shown, where none comes."""
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition(self))
        except Exception as error:
            raise AssertionError(f"{what or 'what was waited for'} did not come; shown is:\n{self.text()}") from error

    def shoot(self, path: Path) -> Path:
        """A picture of what is shown, as a PNG file."""
        self.driver.save_screenshot(str(path))
        return path

    def shoot_all(self, path: Path) -> Path:
        """The same, of the whole page."""
        about = {"captureBeyondViewport": True, "format": "png"}
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", about)["data"]))
        return path

    def _log(self, kind: str) -> list[dict[str, Any]]:
        driver: Any = self.driver
        return list(driver.get_log(kind))

    def complaints(self) -> list[str]:
        """Errors and warnings of its console since this was asked last."""
        return [each["message"] for each in self._log("browser") if each["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """All hosts that pages have asked for anything since it began, loopback left out."""
        for each in self._log("performance"):
            said = json.loads(each["message"])["message"]
            if said["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                self._seen.append(said["params"])
        urls = [each["request"]["url"] if "request" in each else each["url"] for each in self._seen]
        return {urlsplit(url).hostname or "" for url in urls if urlsplit(url).scheme in WEB} - set(LOOPBACK)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """One that begins with an empty profile in that folder; skips where there is no Chromium."""
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


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium of this test's own, 1280 pixels wide."""
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        opened.resize(1280)
        yield opened

"""Measure the page with 200 members and 10,000 versions: first view in a browser, cost and size of updates.

Limits: a first view within 1 s; an update within 100 ms of the server's processor time and 50 KB; a reload shows the
same page.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from tests.browser import chromium
from tests.watch.fake_run import FakeRun

from benchmarks.report import Settings, Table, verdict

FIRST_LIMIT_S, UPDATE_LIMIT_MS, MAX_UPDATE_KB = 1.0, 100.0, 50.0
TICKS = os.sysconf("SC_CLK_TCK")
SHOWN = "return typeof seen !== 'undefined' && seen && sharesPlot.edges ? performance.now() : 0"
STATE = """
return JSON.stringify([seen.columns.map((each) => each[0]), seen.evaluations, seen.members, seen.facts.tokens]);
"""


def run(settings: Settings) -> Iterable[Table]:
    """Write a fake run and measure the page; each update has one version."""
    members, versions, updates = (20, 200, 3) if settings.quick else (200, 10_000, 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = FakeRun(folder / "run", members, 2 * versions).take_lock()
        made.grow(versions)
        size = sum(path.stat().st_size for path in made.folder.glob("*.jsonl"))
        command = [sys.executable, "-m", "tpuswarm", "page", "run", "--port", "8799"]
        began = time.monotonic()
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "XDG_STATE_HOME": name}) as server:  # fmt: skip
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                opened = time.monotonic() - began
                yield _measured(url, server.pid, made, updates, opened, size)
            finally:
                server.send_signal(2)
        made.release()


def _measured(url: str, pid: int, made: FakeRun, updates: int, opened: float, size: int) -> Table:
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.resize(1280)
        browser.open("data:text/html,<p>a page before it</p>")  # excludes the browser's own start
        views = []
        for _ in range(3):
            browser.open(url)
            views.append(browser.wait(lambda each: each.js(SHOWN)) / 1000)
        took, carried = [], []
        with urlopen(url.replace("/?", "/stream?")) as stream:
            _next(stream)
            for _ in range(updates):
                before = _cpu_ticks(pid)
                made.grow(1)
                carried.append(len(_next(stream, "update")) / 1000)
                took.append(1000 * (_cpu_ticks(pid) - before) / TICKS)
        tokens = made.tokens
        browser.wait(lambda each: each.js("return seen.facts.tokens") == tokens)
        shown = browser.js(STATE)
        browser.open(url)
        browser.wait(lambda each: each.js(SHOWN))
        same = _shows_the_same(shown, browser.js(STATE))
    first, update, most = max(views), sum(took) / len(took), max(carried)
    rows = [
        ("first view, the slowest of 3, in a browser that runs",
         f"{first:.2f} s", f"{FIRST_LIMIT_S:g} s", verdict(first <= FIRST_LIMIT_S)),
        ("processor time of the server, mean of an update", f"{update:.0f} ms", f"{UPDATE_LIMIT_MS:g} ms",
         verdict(update <= UPDATE_LIMIT_MS)),
        ("an update, the largest", f"{most:.1f} KB", f"{MAX_UPDATE_KB:g} KB", verdict(most <= MAX_UPDATE_KB)),
        ("a reload shows the same", "yes" if same else "no", "yes", verdict(same)),
    ]  # fmt: skip
    notes = [
        f"{len(made.names)} members, {made.version - updates:,} versions, all members in each; "
        f"{size / 1e6:,.0f} MB of rows and events",
        f"the command read the run {opened:.1f} s after its start, imports included",
        f"{updates} updates of one version with a row of every member, in a browser on {urlsplit(url).hostname}",
    ]
    return Table("The page", ("what", "measured", "limit", "verdict"), rows, notes)


def _shows_the_same(before: str, after: str) -> bool:
    # a reload may choose other versions to plot
    old, new = json.loads(before), json.loads(after)
    return bool(old[1:] == new[1:] and old[0][-1] == new[0][-1] and len(new[0]) >= min(len(old[0]), 200) - 1)


def _next(stream: object, kind: str = "view") -> bytes:
    """Return the data of the next event of a kind."""
    event = b""
    while True:
        line: bytes = stream.readline()  # type: ignore[attr-defined]
        if line.startswith(b"event: "):
            event = line[7:].strip()
        elif line.startswith(b"data: ") and event == kind.encode():
            return line


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

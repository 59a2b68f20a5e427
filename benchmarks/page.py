"""The page with 200 members and 10,000 versions: its first view in a browser, what an update takes and carries.

Limits: a first view within 1 s; an update within 100 ms of the server's processor time and 50 KB; a reload shows what
was shown before.
"""

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

FIRST_S, UPDATE_MS, UPDATE_KB = 1.0, 100.0, 50.0
TICKS = os.sysconf("SC_CLK_TCK")
SHOWN = "return typeof seen !== 'undefined' && seen && sharesPlot.edges ? performance.now() : 0"
"""The last that is drawn is."""
STATE = """
return JSON.stringify([seen.columns.map((each) => each[0]), seen.evaluations, seen.members, seen.facts.tokens]);
"""


def run(settings: Settings) -> Iterable[Table]:
    """A run made up, in the files that a real one writes; updates of one version each."""
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
        browser.open("data:text/html,<p>a page before it</p>")  # what a browser does as it starts is not the page's
        views = []
        for _ in range(3):
            browser.open(url)
            views.append(browser.wait(lambda each: each.js(SHOWN)) / 1000)
        took, carried = [], []
        with urlopen(url.replace("/?", "/stream?")) as stream:
            _next(stream)
            for _ in range(updates):
                before = _ticks(pid)
                made.grow(1)
                carried.append(len(_next(stream, "update")) / 1000)
                took.append(1000 * (_ticks(pid) - before) / TICKS)
        tokens = made.tokens
        browser.wait(lambda each: each.js("return seen.facts.tokens") == tokens)
        shown = browser.js(STATE)
        browser.open(url)
        browser.wait(lambda each: each.js(SHOWN))
        same = _alike(shown, browser.js(STATE))
    first, update, most = max(views), sum(took) / len(took), max(carried)
    rows = [
        ("first view, the slowest of 3, in a browser that runs",
         f"{first:.2f} s", f"{FIRST_S:g} s", verdict(first <= FIRST_S)),
        ("processor time of the server, mean of an update", f"{update:.0f} ms", f"{UPDATE_MS:g} ms",
         verdict(update <= UPDATE_MS)),
        ("an update, the largest", f"{most:.1f} KB", f"{UPDATE_KB:g} KB", verdict(most <= UPDATE_KB)),
        ("a reload shows what was shown", "yes" if same else "no", "yes", verdict(same)),
    ]  # fmt: skip
    notes = [
        f"{len(made.names)} members, {made.version - updates:,} versions, all members in each; "
        f"{size / 1e6:,.0f} MB of rows and events",
        f"the command had its first look {opened:.1f} s after it was started, imports included",
        f"{updates} updates, each of one version with a row of every member; the browser was open on "
        f"{urlsplit(url).hostname} beside it",
    ]
    return Table("The page", ("what", "measured", "limit", "verdict"), rows, notes)


def _alike(before: str, after: str) -> bool:
    """The same but for which versions stand for those beside them, of which a reload chooses anew."""
    import json

    old, new = json.loads(before), json.loads(after)
    return bool(old[1:] == new[1:] and old[0][-1] == new[0][-1] and len(new[0]) >= min(len(old[0]), 200) - 1)


def _next(stream: object, kind: str = "view") -> bytes:
    """The data of the next event of a kind."""
    found = b""
    while True:
        line: bytes = stream.readline()  # type: ignore[attr-defined]
        if line.startswith(b"event: "):
            found = line[7:].strip()
        elif line.startswith(b"data: ") and found == kind.encode():
            return line


def _ticks(pid: int) -> int:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

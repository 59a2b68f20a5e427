"""The page of a run in a real browser: content, access, reconnection."""

import json
import shutil
import signal
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from tests.watch.fake_run import FakeRun, make_plain_run
from tpuswarm.train.look.pictures import write_picture

pytestmark = pytest.mark.slow

DRAWN = """
const canvas = document.getElementById(arguments[0]);
return new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
"""
FILTERED = """
const box = document.getElementById("filter");
box.value = arguments[0];
box.dispatchEvent(new Event("input"));
"""
EVERYTHING = """
return JSON.stringify([seen.columns, seen.losses, seen.evaluations, seen.members,
  document.getElementById("events").innerText]);
"""
LATE = """
const real = window.fetch, slow = new Promise((answer) => setTimeout(() => answer(new Response("too late")), 500));
window.fetch = (path) => (path.includes("of=m1") ? slow : real(path));
slow.then(() => setTimeout(() => { window.late = true; }));
openLog("m1");
document.getElementById("log").close();
setTimeout(() => openLog("m2"));
"""
"""Opens a log, closes it and opens another one, before the first answer arrives."""
PICTURE = "return document.getElementById('shares').toDataURL()"
BACK = "return getComputedStyle(document.body).backgroundColor"
TIP = "return document.querySelector('.tip').textContent"


def ready(browser, page, *texts: str) -> None:
    browser.open(page.url)
    browser.wait(lambda tab: "live" in tab.text() and all(text in tab.text() for text in texts))


def test_two_hundred_members_are_legible_and_a_lost_one_comes_first(browser, page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 200, 1000).take_lock()
    run.grow(30)
    page = page_of(tmp_path, "run")
    for width in (1280, 390):
        browser.resize(width)
        ready(browser, page, "200 members, all alive", "version 30")
        assert browser.js("return document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
        assert browser.js("return document.querySelectorAll('#members-table tr').length") == 201
        for name in ("loss", "speed", "shares"):
            browser.wait(lambda tab, name=name: tab.js(DRAWN, name) > 8, f"the canvas {name} stays empty")
    light = browser.js(PICTURE)
    browser.prefer("dark")
    browser.wait(lambda tab: tab.js(BACK) == "rgb(16, 21, 27)" and tab.js(PICTURE) != light, "the page stays light")
    run.lose_member("m137")
    run.grow(1)
    browser.wait(lambda tab: "200 members: 199 alive, 1 lost" in tab.text())
    first = browser.js("return document.querySelectorAll('#members-table tr')[1].innerText")
    assert first.split()[:2] == ["m137", "lost"]
    assert "m137 killed; about 1,000 uncommitted tokens lost" in browser.text()
    run.write_status(("m5 has a loss of 7, far from the others",))
    browser.wait(lambda tab: "alarm: m5 has a loss of 7" in tab.text())
    browser.js(FILTERED, "m13")
    assert browser.js("return document.querySelectorAll('#members-table tr').length") == 12
    assert not browser.complaints() and not browser.hosts()
    run.release()


def test_keyboard_is_enough(browser, page_of, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    run = FakeRun(tmp_path / "run", 3, 100)
    run.grow(8)
    (run.folder / "logs" / "m1.log").write_text("2026-01-01 00:00:00 hello from m1\n")
    page = page_of(tmp_path, "run")
    ready(browser, page, "Members")

    def press(*keys: str) -> None:
        ActionChains(browser.driver).send_keys(*keys).perform()

    press("/")
    assert browser.js("return document.activeElement.id") == "filter"
    press("m1", Keys.TAB, Keys.TAB, Keys.ENTER)
    browser.wait(lambda tab: "hello from m1" in tab.text(), "the log does not open")
    press(Keys.ESCAPE)
    assert not browser.js("return document.getElementById('log').open")
    (run.folder / "logs" / "m2.log").write_text("hello from m2\n")
    browser.js(LATE)
    browser.wait(
        lambda tab: tab.js("return window.late") and "hello from m2" in tab.text(), "the other log does not open"
    )
    assert "too late" not in browser.text()
    press(Keys.ESCAPE)
    browser.js("document.getElementById('shares').focus()")
    press(Keys.ARROW_LEFT, Keys.ARROW_DOWN)
    browser.wait(lambda tab: "version 7," in tab.text() and "m1: 33.3%" in tab.text(), "no share is described")
    browser.js("document.getElementById('loss').focus()")
    press(Keys.ARROW_LEFT)
    browser.wait(lambda tab: "tokens counted\ntraining" in tab.js(TIP))
    press(Keys.ESCAPE)
    assert browser.js("return document.querySelector('.tip').hidden")
    browser.js(FILTERED, "m77")
    assert "No member matches." in browser.text()
    assert not browser.complaints()


def test_end_of_a_swarm_is_said_and_its_squares_keep_their_colours(browser, page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 3, 8)
    run.grow(8)
    run.event(1.8e9, "finished", message="finished: 24 steps")
    ready(browser, page_of(tmp_path, "run"), "3 members, all ended", "commits too")
    forced = [{"name": "forced-colors", "value": "active"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": forced})
    square = "return getComputedStyle(document.querySelector('#dots i')).backgroundColor"
    assert browser.js(square) == browser.js("return getComputedStyle(document.querySelector('#dots i')).color")
    assert browser.js(square) != browser.js("return getComputedStyle(document.body).backgroundColor")


def test_plain_run_offers_nothing_of_a_swarm_and_every_control_has_a_name(browser, page_of, tmp_path):
    make_plain_run(tmp_path / "run", 30)
    page = page_of(tmp_path, "run")
    ready(browser, page, "finished", "What the model makes")
    assert "commits too" not in browser.text()
    skip = "const to = document.querySelector('.skip').hash; return document.querySelector(to).offsetHeight"
    assert browser.js(skip) > 0, "the link leads nowhere"
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    names = {node["role"]["value"]: node["name"]["value"] for node in nodes if "name" in node and "role" in node}
    assert names["slider"].startswith("of the same latents")
    browser.js("openLog('m0')")
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    assert [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "dialog"] == ["m0"]
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.open(page.url)
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "This page needs JavaScript" in browser.text()


def test_page_reconnects_and_a_reload_loses_nothing(browser, page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 3, 1000).take_lock()
    run.grow(20)
    page = page_of(tmp_path, "run")
    ready(browser, page, "60,000 of 3,000,000 tokens")
    page.process.send_signal(signal.SIGSTOP)
    browser.js("lastMessageAt -= SILENCE_TIMEOUT_MS")
    browser.wait(lambda tab: "connection lost, trying again" in tab.text(), "the page does not notice a stopped server")
    page.process.send_signal(signal.SIGCONT)
    browser.wait(lambda tab: "live" in tab.text(), "the page does not continue")
    page.stop()
    browser.wait(lambda tab: "connection lost, trying again" in tab.text(), "the page does not notice the end")
    run.grow(5)
    page = page_of(tmp_path, "run", port=page.port)
    browser.wait(lambda tab: "live" in tab.text() and "75,000 of 3,000,000 tokens" in tab.text())
    assert "connection lost" not in browser.text()
    for _ in range(5):
        run.grow(7)
    browser.wait(lambda tab: "180,000 of" in tab.text())
    before = json.loads(browser.js(EVERYTHING))
    ready(browser, page, "180,000 of")
    after = json.loads(browser.js(EVERYTHING))
    assert [item[0] for item in before[0]] == [item[0] for item in after[0]] == list(range(1, 61))
    assert before[1:] == after[1:]
    assert not [complaint for complaint in browser.complaints() if "net::ERR" not in complaint]
    run.release()


def test_run_that_vanishes_is_reported_and_shown_again(browser, page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 3, 1000)
    run.grow(20)
    page = page_of(tmp_path, "run")
    ready(browser, page, "60,000 of 3,000,000 tokens")
    (tmp_path / "run").rename(tmp_path / "away")
    browser.wait(lambda tab: "run does not exist" in tab.text(), "the missing run is not reported")
    assert "60,000 of 3,000,000" in browser.text() and page.get("/metrics")[0] == 200
    other = FakeRun(tmp_path / "run", 5, 1000)
    other.grow(2)
    browser.wait(lambda tab: "10,000 of 5,000,000" in tab.text() and "does not exist" not in tab.text())
    assert browser.js("return seen.columns.length") == 2 and not browser.complaints()
    shutil.rmtree(tmp_path / "run")


def test_page_turns_to_the_newest_run_and_lists_the_others(browser, page_of, tmp_path):
    make_plain_run(tmp_path / "runs/one", 20)
    page = page_of(tmp_path)
    ready(browser, page, "runs/one", "20,000 of 20,000 tokens")
    assert "Runs" not in browser.text()
    make_plain_run(tmp_path / "runs/two", 30)
    browser.wait(lambda tab: "30,000 of 30,000 tokens" in tab.text(), "the page stays with the older run")
    rows = "return [...document.querySelectorAll('#runs-table tr')].map((row) => row.innerText.split(/\\s+/)[0])"
    browser.wait(lambda tab: tab.js(rows) == ["run", "two", "one"])
    browser.js("document.querySelector('#runs-table tr:nth-child(3) a').click()")
    browser.wait(lambda tab: "20,000 of 20,000 tokens" in tab.text() and "live" in tab.text())
    browser.js("document.getElementById('newest').click()")
    browser.wait(lambda tab: "30,000 of 30,000 tokens" in tab.text() and "live" in tab.text())
    assert page.get("/events?before=1&run=..%2Fother")[0] == 404
    assert not browser.complaints() and not browser.hosts()


def test_only_the_token_and_this_origin_give_access(page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 3, 10)
    run.grow(2)
    (tmp_path / "secret.log").write_text("secret")
    page = page_of(tmp_path, "run")
    paths = ("/", "/stream", "/metrics", "/log?of=m0", "/events?before=1", "/picture?step=1", "/elsewhere")
    for path in paths:
        assert page.get(path, token="wrong") == (
            401, "the token is wrong or missing: open the URL that `tpuswarm page` printed\n",
        )  # fmt: skip
        with pytest.raises(HTTPError) as refused:
            urlopen(f"http://127.0.0.1:{page.port}{path}")
        headers = refused.value.headers
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        code, text = page.get(path, Origin="https://evil.example")
        assert code == 403 and text == "a page of https://evil.example may not read this one\n"
        code, text = page.get(path, Host="evil.example")
        assert code == 403 and "only for 127.0.0.1" in text
    assert page.get("/", Origin=f"http://127.0.0.1:{page.port}")[0] == 200
    assert page.get("/metrics", token="", Authorization=f"Bearer {page.token}")[0] == 200
    assert page.get("/log?of=../secret")[0] == 404 and page.get("/picture?step=..%2Fx")[0] == 404
    assert page.get("/events?before=x")[0] == 400
    tables = [Path(f"/proc/net/{kind}") for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listens = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{page.port:04X}")]
    assert listens == [f"0100007F:{page.port:04X}"], "the page listens on other addresses"
    token = tmp_path / "state" / "tpuswarm" / "page-token"
    assert token.read_text() == page.token and token.stat().st_mode & 0o777 == 0o600


def test_wrong_input_is_one_sentence(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    FakeRun(tmp_path / "run", 1, 10).grow(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = typed("page", "run", "--port", str(port))
        assert code == 2 and err == (
            f"error: port {port} of this computer is in use; for the next one: --port {port + 1}\n"
        )
    for words, sentence in (
        (("nowhere",), "nowhere does not exist"), (("nowhere.toml",), "nowhere.toml"), (("run", "--port", "0"), "port"),
        (("run", "--port", "70000"), "less than or equal to 65535"), (("gs:/x/y",), "gs:/x/y"),
        ((), "there are no runs in runs"),
    ):  # fmt: skip
        code, _, err = typed("page", *words)
        assert code == 2 and sentence in err and err.count("\n") == 1, err


def test_pictures_of_all_versions_and_events_as_text_are_shown(browser, page_of, tmp_path):
    run = FakeRun(tmp_path / "run", 1, 10).take_lock()
    run.event(1.7e9, "note", message="<script>alert(1)</script> <b>bold</b>")
    run.grow(1)
    for version, shade in ((1, 50), (2, 200)):
        write_picture(run.folder, f"{version:08d}.png", np.full((8, 24, 3), shade, np.uint8))
    page = page_of(tmp_path, "run")
    ready(browser, page, "of the same latents, at version 2", "note: <script>alert(1)</script> <b>bold</b>")
    shown = "const image = document.getElementById('picture'); return [image.naturalWidth, image.alt]"
    browser.wait(lambda tab: tab.js(shown) == [24, "a grid of pictures at version 2"])
    write_picture(run.folder, "00000003.png", np.full((8, 32, 3), 9, np.uint8))
    browser.wait(
        lambda tab: tab.js(shown) == [32, "a grid of pictures at version 3"], "the newest picture is not shown"
    )
    browser.js("const at = document.getElementById('picture-at'); at.value = 0; at.dispatchEvent(new Event('input'))")
    browser.wait(lambda tab: tab.js(shown) == [24, "a grid of pictures at version 1"])
    assert not browser.complaints() and not browser.hosts()
    run.release()

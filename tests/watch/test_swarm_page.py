"""A real swarm of three on the page, while one of them is killed: at 1280 and at 390 pixels, without another host."""

import os
import signal

import pytest
from benchmarks.chaos import SMALL, Swarm

TABLE = "return [...document.querySelectorAll('#members-table tr')].slice(1).map((row) => row.innerText)"


@pytest.mark.slow
def test_a_swarm_of_three_loses_a_member(browser, page_of, tmp_path):
    words = ["gpt2-tiny", "--data", "fake", *SMALL, "--members", "3", "--cycle", "8", "--outer", "average"]
    swarm = Swarm(tmp_path / "run", [*words, "--steps", "10M"])
    swarm.start()
    try:
        swarm.wait(lambda: (swarm.status().get("version") or 0) >= 3 and len(swarm.pids()) >= 4)
        page = page_of(tmp_path, "run")
        browser.open(page.url)
        browser.wait(lambda each: "3: 3 alive" in each.text(), "three members")
        for width in (1280, 390):
            browser.resize(width)
            browser.wait(lambda each: each.js("return seen.columns.length && seen.losses.length"))
            assert browser.js("return document.documentElement.scrollWidth") <= width
        columns = browser.js("return seen.columns.length")
        os.kill(swarm.pids()["m1"], signal.SIGKILL)
        browser.wait(lambda each: "m1 killed; about" in each.text(), "that it was killed")
        browser.resize(1280)
        browser.wait(lambda each: "m1 rejoined" in each.text() and len(each.js(TABLE)) == 3, "that it is back")
        browser.wait(lambda each: each.js("return seen.columns.length") > columns, "versions that came since")
        assert 'tpuswarm_member_up{member="m1"}' in page.get("/metrics")[1]
        assert not browser.complaints() and not browser.hosts()
    finally:
        swarm.end()

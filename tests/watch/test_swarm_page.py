"""A real swarm of three on the page, while one of them is killed: at 1280 and at 390 pixels, without another host.

What it sends to W&B is read back too.
"""

import os
import signal

import pytest
from benchmarks.chaos import SMALL, Swarm

from tests.train.look.test_wandb import files, logged
from tpuswarm.train.run.directory import METRICS, read_rows

TABLE = "return [...document.querySelectorAll('#members-table tr')].slice(1).map((row) => row.innerText)"
DRAWN = "return seen && seen.columns.length && seen.losses.length"
WIDE = "return document.documentElement.scrollWidth"


@pytest.mark.slow
def test_a_swarm_of_three_loses_a_member(browser, page_of, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["gpt2-tiny", "--data", "fake", *SMALL, "--members", "3", "--cycle", "8", "--outer", "average"]
    swarm = Swarm(tmp_path / "run", [*words, "--steps", "10M", "--wandb", "project"])
    swarm.start()
    try:
        swarm.wait(lambda: (swarm.status().get("version") or 0) >= 3 and {"m0", "m1", "m2"} <= swarm.pids().keys())
        page = page_of(tmp_path, "run")
        browser.open(page.url)
        browser.wait(lambda each: each.js(DRAWN) and "3: 3 alive" in each.text(), "three members")
        for width in (1280, 390):
            browser.resize(width)
            browser.wait(lambda each, width=width: each.js("return innerWidth") == width, f"a width of {width}")
            assert browser.js(WIDE) <= width
        newest = browser.js("return seen.columns.at(-1)[0]")
        os.kill(swarm.pids()["m1"], signal.SIGKILL)
        browser.wait(lambda each: "m1 killed; about" in each.text(), "that it was killed")
        assert browser.js(WIDE) <= 390
        browser.resize(1280)
        browser.wait(lambda each: "m1 rejoined" in each.text() and len(each.js(TABLE)) == 3, "that it is back")
        browser.wait(lambda each: each.js("return seen.columns.at(-1)[0]") > newest, "versions that came since")
        assert 'tpuswarm_member_up{member="m1"}' in page.get("/metrics")[1]
        assert not browser.complaints() and not browser.hosts()
    finally:
        swarm.end()
    (sent,) = files(tmp_path / "run")
    rows = [row for row in logged(sent) if "m2/loss" in row]
    written = [row for row in read_rows(tmp_path / "run" / METRICS) if row["member"] == "m2" and "loss" in row]
    assert [row["m2/loss"] for row in rows] == [row["loss"] for row in written] and rows

"""A page, traces and W&B show how a real swarm of two loses a member."""

import asyncio
import os
import signal

import pytest

from tests.processes import finish, start
from tests.swarm.chaos import SMALL, Swarm
from tests.train.look.test_profile import steps_in
from tests.train.look.test_wandb import files, logged_rows
from tpuswarm.train.look import profile
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.watch.boards import SwarmRunBoards

pytestmark = pytest.mark.long
TABLE = "return [...document.querySelectorAll('#members-table tr')].slice(1).map((row) => row.innerText)"
DRAWN = "return seen && seen.columns.length && seen.losses.length"
WIDE = "return document.documentElement.scrollWidth"


def test_swarm_loses_a_member(browser, page_of, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["gpt2-tiny", "--data", "fake", *SMALL, "--members", "2", "--cycle", "8", "--outer", "average"]
    swarm = Swarm(tmp_path / "run", [*words, "--steps", "10M", "--wandb", "project"])
    swarm.start()
    try:
        swarm.wait(lambda: (swarm.status().get("version") or 0) >= 3 and {"m0", "m1"} <= swarm.pids().keys())
        page = page_of(tmp_path, "run")
        browser.open(page.url)
        browser.wait(
            lambda tab: tab.js(DRAWN) and "2 members, all alive" in tab.text(), "the two members are not shown"
        )
        for width in (1280, 390):
            browser.resize(width)
            browser.wait(lambda tab, width=width: tab.js("return innerWidth") == width, f"a width of {width}")
            assert browser.js(WIDE) <= width
        traced = is_traced(swarm, tmp_path)
        newest = browser.js("return seen.columns.at(-1)[0]")
        os.kill(pid := swarm.pids()["m1"], signal.SIGSTOP)  # it cannot answer before it is killed
        profiling = start(["profile", "run", "--member", "m1"], tmp_path)
        assert "requested a trace of 5 steps from m1" in profiling.stderr.readline()
        swarm.wait(lambda: not (swarm.run / profile.TRACE_REQUEST).exists())
        os.kill(pid, signal.SIGKILL)
        assert "m1 ended before its trace was taken" in finish(profiling, 1)[1]
        browser.wait(lambda tab: "m1 killed; about" in tab.text(), "the death is not shown")
        assert browser.js(WIDE) <= 390
        browser.resize(1280)
        browser.wait(lambda tab: "m1 rejoined" in tab.text() and len(tab.js(TABLE)) == 2, "the member is not back")
        browser.wait(lambda tab: tab.js("return seen.columns.at(-1)[0]") > newest, "no newer version is shown")
        assert 'tpuswarm_member_up{member="m1"}' in page.get("/metrics")[1]
        assert not browser.complaints() and not browser.hosts()
    finally:
        swarm.end()
    (sent,) = files(swarm.run)
    rows = [row for row in logged_rows(sent) if "m0/loss" in row]
    written = [row for row in read_rows(swarm.run / METRICS) if row["member"] == "m0" and "loss" in row]
    assert [row["m0/loss"] for row in rows] == [row["loss"] for row in written] and rows
    shown = SwarmRunBoards(swarm.run, tmp_path / "shown")
    asyncio.run(shown.update())
    assert {path.parent.name for path in (tmp_path / "shown").glob("m1/plugins/profile/*/*.xplane.pb")} == {traced}


def is_traced(swarm: Swarm, folder) -> str:
    """Trace a named member, then by default the first; return the name of the first trace."""
    out, err = finish(start(["profile", "run", "--steps", "3", "--member", "m1"], folder))
    assert (
        "requested a trace of 3 steps from m1" in err
        and "trace of 3 steps of m1 in run/tensorboard/m1; to open it" in out
    )
    [trace] = profile.trace_folders(swarm.run)
    assert trace.is_relative_to(swarm.run / "tensorboard/m1/plugins/profile")
    assert profile.trace_folders(swarm.run, "m1") == [trace] and profile.trace_folders(swarm.run, "m0") == []
    assert len(steps_in(trace)) == 3
    assert "trace of 5 steps of m0" in finish(start(["profile", "run"], folder))[0]
    _, err = finish(start(["profile", "run", "--member", "m7"], folder), 2)
    assert "has no member m7; training now: m0, m1" in err and "Traceback" not in err
    return trace.name

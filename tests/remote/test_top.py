"""`top`: figures of libtpu's own protocol, from real processes on machines of a local cloud."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.terminal import CTRL_C, SMALL, terminal
from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Machine
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.fleet.reach import Reached
from tpuswarm.remote.host import Host
from tpuswarm.swarm.views.status import MemberStatus
from tpuswarm.watch import top
from tpuswarm.watch.chips import fields, gauges
from tpuswarm.watch.follow import Follower, Sample

BURNS = (
    'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; '
    "TPU_LOAD_LIBRARY=1 exec python3 -c \"x = bytearray(200 << 20)\nprint('begun', flush=True)\nwhile True: pass\""
)
NOW = 1e9


def shown(fleet, *words: str) -> dict[str, dict]:
    found = json.loads(fleet.run("top", *words, "--json")[0])["hosts"]
    return {each["host"]: each for each in found}


def test_who_has_the_chips_how_busy_and_how_full(fleet):
    idle = shown(fleet)
    assert len(idle) == 5 and {each["state"] for each in idle.values()} == {"idle"}
    assert all(not each["chips"] and not each["owners"] for each in idle.values())
    fleet.run("exec", "v2", "--detach", "--name", "burns", "--", BURNS)
    try:
        end = time.monotonic() + 120
        while "begun" not in fleet.run("logs", "burns")[0]:
            assert time.monotonic() < end
        with terminal(["top"], fleet.folder, SMALL, fleet.environment) as opened:
            # A second look at it: how busy it is between two.
            screen = opened.wait(
                lambda each: (
                    re.search(r"v2-usc1f-0/0 +busy +[▁▂▃▄▅▆▇█]{8} [1-9]\d*%", each.screen)
                    and "libtpu:" in each.screen
                    and "5 hosts: 4 idle, 1 busy" in each.screen
                )
            )
            opened.send(CTRL_C)
            opened.finish(130)
        assert screen.index("v5e-usc1a-0/0") < screen.index("v2-usc1f-0/0"), "who does nothing is shown first"
        assert screen.count("no program") == 4 and "libtpu: TPU_LOAD_LIBRARY=1" in screen
        host = shown(fleet, "v2")["v2-usc1f-0/0"]
        assert host["state"] == "busy" and [each["device"] for each in host["chips"]] == list(range(8))
        total = find("v2-8").generation.hbm_bytes_per_device
        assert {each["hbm_total_bytes"] for each in host["chips"]} == {total}
        used = sum(each["hbm_used_bytes"] for each in host["chips"])
        assert 200 * 2**20 < used < 600 * 2**20
        (owner,) = host["owners"]
        assert "bytearray" in owner["command"] and owner["libtpu"]["TPU_LOAD_LIBRARY"] == "1"
        assert all(0 <= each["duty_percent"] <= 100 for each in host["chips"])
    finally:
        fleet.run("stop", "burns")
    end = time.monotonic() + 60
    while shown(fleet, "v2")["v2-usc1f-0/0"]["state"] != "idle":
        assert time.monotonic() < end


def test_a_run_of_ones_own_has_its_step_and_a_machine_alone_a_row_for_each_device(fleet):
    """A real trainer that has the first chip open: what it writes down is what is shown."""
    train = f"{sys.executable} -m tpuswarm train gpt2-tiny --steps 100K --batch 8 --layers 1 --run"
    line = f'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; exec {train} ~/mine'
    fleet.run("exec", "v2", "--detach", "--name", "mine", "--", line)
    try:
        end = time.monotonic() + 240
        while (host := shown(fleet, "v2")["v2-usc1f-0/0"])["step"] is None:
            assert time.monotonic() < end and '"running"' in fleet.run("jobs", "--json")[0], fleet.run("logs", "mine")
        rows = (fleet.user_home("v2-usc1f-0-0") / "mine" / "metrics.jsonl").read_text().split("\n")[:-1]
        written = {row["step"]: row for row in map(json.loads, rows) if "loss" in row}
        assert host["loss"] == written[host["step"]]["loss"]
        alone = fleet.run("top", "v2-usc1f-0", "--once")[0].splitlines()
        assert len([each for each in alone if re.match(r"  device [0-7] +[▁▂▃▄▅▆▇█] \d+%", each)]) == 8
        assert not any("device" in each for each in fleet.run("top", "all", "--once")[0].splitlines())
    finally:
        fleet.run("stop", "mine")


def test_a_host_that_is_lost_says_why_and_the_others_go_on(here):
    async def work():
        async with here.connections() as connections:
            follower = Follower(connections)
            follower.follow(here.hosts)
            try:
                while len(follower.samples) < 3 or not all(each.said for each in follower.samples.values()):
                    await asyncio.sleep(0.05)
                first = here.machines[0]
                assert processes.send([first.id], signal.SIGKILL, runs_chips) == 1
                while follower.samples[first.host.label].said:
                    await asyncio.sleep(0.05)
                lost = follower.samples[first.host.label]
                assert all(follower.samples[each.label].said for each in here.hosts[1:])
                follower.follow(here.hosts[1:])
                assert set(follower.samples) == {each.label for each in here.hosts[1:]}
            finally:
                await follower.close()
            return lost

    lost = asyncio.run(asyncio.wait_for(work(), 240))
    assert lost.why.endswith(" says nothing: its program was ended")
    end = time.monotonic() + 60
    while any(runs_chips(pid) for pid in processes.find([each.id for each in here.machines])):
        assert time.monotonic() < end, "it goes on though nobody reads it"


def runs_chips(pid: int) -> bool:
    try:
        return b"tpuswarm.watch.chips" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def machine(name: str, **about) -> Machine:
    return Machine(name, "us-central1-a", "tpu", "v5e-8", "ready", "READY", **about)


def sample(**about) -> Sample:
    said = {"duty": {"0": 90.0, "1": 10.0}, "used": {"0": 2e9, "1": 8e9}, "total": {"0": 16e9, "1": 16e9}}
    return Sample(about.pop("at", NOW), {**said, "owners": [], "chips": 2, **about})


def test_a_chips_duty_is_that_of_both_of_its_devices():
    """As tpu-info says of v2 and v3: memory is of a device, duty of a chip."""
    said = {"duty": {"0": 90.0, "1": 10.0}, "used": dict.fromkeys("0123", 1e9), "total": dict.fromkeys("0123", 8e9)}
    (row,) = rows_of([machine("a")], {"a": sample(**said)})
    assert [each.duty_percent for each in row.chips] == [90.0, 90.0, 10.0, 10.0]


def rows_of(machines, samples, members=(), away=()):
    hosts = [Host(f"{each.name}/0", "127.0.0.1", 22, "me", each.name, (), Path("known")) for each in machines]
    reached = Reached(hosts, away, True, {f"{each.name}/0": each for each in machines})
    return top.rows(reached, {f"{name}/0": each for name, each in samples.items()}, members, NOW)


def test_what_needs_a_look_is_first():
    machines = [machine(name, created=NOW - 7200) for name in ("a-2", "a-10", "ill", "old", "none", "new", "held")]
    machines[2] = replace(machines[2], healthy=False, why="a link is down")
    samples = {
        "a-2": sample(), "a-10": sample(), "ill": sample(), "old": sample(at=NOW - 60), "none": sample(chips=0),
        "held": sample(owners=[{"pid": 7, "user": "me", "command": "x"}]),
    }  # fmt: skip
    for name in ("duty", "used", "total"):
        samples["none"].said[name] = samples["held"].said[name] = {}
    found = rows_of(machines, samples, away=("gone/0 is being made",))
    assert [(each.host, each.state) for each in found] == [
        ("gone/0", "away"), ("ill/0", "ill"), ("new/0", "silent"), ("old/0", "silent"), ("none/0", "idle"),
        ("a-2/0", "busy"), ("a-10/0", "busy"), ("held/0", "busy"),
    ]  # fmt: skip
    why = {each.host: each.why for each in found}
    assert why["gone/0"] == "is being made" and why["ill/0"] == "a link is down" and "1 min" in why["old/0"]
    assert why["none/0"] == "shows no chips" and why["held/0"] == "no metrics of libtpu"


def test_what_nobody_says_is_a_dash_and_not_a_zero():
    told = MemberStatus("j-a", "alive", 1, "i", 12, 0, 41_234.0, 2.5, None, 0)
    half = sample(used={}, total={})
    rows = rows_of([machine("a"), machine("b")], {"a": half}, [told])
    busy = next(each for each in rows if each.host == "a/0")
    assert (busy.tokens_per_s, busy.loss, busy.version) == (41_234.0, 2.5, 12)
    assert [each.hbm_used_bytes for each in busy.chips] == [None, None]
    for width in (80, 120):
        lines = drawn(rows, width)
        line = next(each for each in lines if each.startswith("a/0"))
        assert "█▁ 50%" in line and " – " in line and "41,234" in line and max(map(len, lines)) <= width
        said = next(each for each in lines if each.startswith("b/0")).split()
        assert said.count("–") >= 5 and "0%" not in said, "speed, loss and commit too"


def drawn(rows, width: int, height: int | None = None) -> list[str]:
    from rich.console import Console

    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(top.draw(rows, width, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_sixty_four_hosts_fit_a_small_screen():
    machines = [machine(f"m-{number}") for number in range(64)]
    lines = drawn(rows_of(machines, {each.name: sample() for each in machines}), 80, 23)
    assert len(lines) <= 23 and any("more" in line for line in lines) and "64 hosts: 64 busy" in lines[-1]


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\xff" * 9, b"\x0a\x04\x1a\x02\x12\x00"])
def test_what_is_no_answer_of_libtpu_has_no_figures(data):
    try:
        assert gauges(data) == {}
    except (IndexError, ValueError):  # which the caller takes for no answer
        fields(b"")

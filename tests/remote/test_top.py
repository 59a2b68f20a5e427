"""`top`: figures of libtpu's own protocol, from real processes on machines."""

import asyncio
import re
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.remote.conftest import HOSTS, ONE
from tests.terminal import CTRL_C, SMALL, terminal
from tests.train.look.test_widgets import drawn
from tests.waiting import until
from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Machine
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.fleet.hosts.routes import ReachableHosts
from tpuswarm.remote.host import Host
from tpuswarm.swarm.views.status import MemberStatus
from tpuswarm.watch import top
from tpuswarm.watch.chips import parse_gauges
from tpuswarm.watch.follow import Follower, Sample

pytestmark = pytest.mark.slow

BURNS = (
    'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; '
    "TPU_LOAD_LIBRARY=1 exec python3 -c \"x = bytearray(200 << 20)\nprint('begun', flush=True)\nwhile True: pass\""
)
TRAINS = """\
exec 9<>"$TPUSWARM_ROOT/dev/accel0"
exec {python} -c "
import pathlib, time
from tpuswarm.train.run.directory import Run
run = Run(pathlib.Path('mine').absolute())
for step in range(1, 4):
    run.write_metrics(dict(step=step, loss=5.0 / step))
print('begun', flush=True)
time.sleep(1e6)"
"""
"""Writes metrics as a trainer does."""
NOW = 1e9


def shown(fleet, *words: str) -> dict[str, dict]:
    return {host["host"]: host for host in fleet.run_json("top", *words)["hosts"]}


def test_owner_load_and_memory_of_chips(fleet):
    idle = shown(fleet)
    assert len(idle) == 5 and {host["state"] for host in idle.values()} == {"idle"}
    assert all(not host["chips"] and not host["owners"] for host in idle.values())
    with fleet.job("v2", "burns", BURNS, prints="begun"):
        with terminal(["top"], fleet.folder, SMALL, fleet.environment) as opened:
            # The load is measured between two samples.
            patterns = r"v2-usc1f-0/0 +busy +[▁▂▃▄▅▆▇█]{8} [1-9]\d*%", "libtpu:", "5 hosts: 4 idle, 1 busy"
            screen = opened.wait(lambda opened: all(re.search(pattern, opened.screen) for pattern in patterns))
            opened.send(CTRL_C)
            opened.finish(130)
        assert screen.index("v5e-usc1a-0/0") < screen.index(HOSTS[0]), "idle hosts come first"
        assert screen.count("no program") == 4 and "libtpu: TPU_LOAD_LIBRARY=1" in screen
        host = shown(fleet, "v2")[HOSTS[0]]
        assert host["state"] == "busy" and [chip["device"] for chip in host["chips"]] == list(range(8))
        total = find("v2-8").generation.hbm_bytes_per_device
        assert {chip["hbm_total_bytes"] for chip in host["chips"]} == {total}
        used = sum(chip["hbm_used_bytes"] for chip in host["chips"])
        assert 200 * 2**20 < used < 600 * 2**20
        (owner,) = host["owners"]
        assert "bytearray" in owner["command"] and owner["libtpu"]["TPU_LOAD_LIBRARY"] == "1"
        assert all(0 <= chip["duty_percent"] <= 100 for chip in host["chips"])
    until(lambda: shown(fleet, "v2")[HOSTS[0]]["state"] == "idle")


def test_run_on_a_machine_has_its_step_and_a_single_machine_a_row_for_each_device(fleet):
    with fleet.job("v2", "mine", TRAINS.format(python=sys.executable), prints="begun"):
        host = shown(fleet, "v2")[HOSTS[0]]
        assert (host["step"], host["loss"]) == (3, 5.0 / 3)
        lines = fleet.run("top", ONE, "--once")[0].splitlines()
        assert len([line for line in lines if re.match(r"  device [0-7] +[▁▂▃▄▅▆▇█] \d+%", line)]) == 8
        assert "device" not in fleet.run("top", "all", "--once")[0]


def test_announced_maintenance_is_shown_and_once_among_the_events_of_the_machine(fleet):
    with fleet.broken(ONE, "upcoming-maintenance"):
        assert "scheduled maintenance from 20" in shown(fleet, "v2")[HOSTS[0]]["why"]
        with fleet.job("v2", "works", "echo begun; sleep 1000", prints="begun"):
            pass
        assert fleet.run("describe", ONE)[0].count("maintenance: scheduled maintenance from 20") == 1


def test_lost_host_is_reported_and_others_go_on(machines):
    async def work(connections) -> str:
        follower, first = Follower(connections), machines[0]
        follower.follow(machines.hosts)
        try:
            while len(follower.samples) < 3 or not all(sample.data for sample in follower.samples.values()):
                await asyncio.sleep(0.05)
            assert processes.send([first.id], signal.SIGKILL, is_chips) == 1
            while follower.samples[first.host.label].data:
                await asyncio.sleep(0.05)
            why = follower.samples[first.host.label].why
            assert all(follower.samples[host.label].data for host in machines.hosts[1:])
            follower.follow(machines.hosts[1:])
            assert set(follower.samples) == {host.label for host in machines.hosts[1:]}
        finally:
            await follower.close()
        return why

    assert machines.run(work).endswith(" stopped answering: its program ended")
    # Its programs end with their readers.
    until(lambda: not any(is_chips(pid) for pid in processes.find([machine.id for machine in machines])))


def is_chips(pid: int) -> bool:
    file = Path(f"/proc/{pid}/cmdline")
    return file.exists() and b"tpuswarm.watch.chips" in file.read_bytes()


def machine(name: str, **about) -> Machine:
    return Machine(name, "us-central1-a", "tpu", "v5e-8", "ready", "READY", **about)


def sample(**about) -> Sample:
    said = {"duty": {"0": 90.0, "1": 10.0}, "used": {"0": 2e9, "1": 8e9}, "total": {"0": 16e9, "1": 16e9}}
    return Sample(about.pop("at", NOW), {**said, "owners": [], "chips": 2, "maintenance": "", **about})


def rows_of(machines, samples, members=(), away=()):
    names = [machine.name for machine in machines]
    hosts = [Host(f"{name}/0", "127.0.0.1", 22, "me", name, (), Path("known")) for name in names]
    reached = ReachableHosts(hosts, away, True, {f"{machine.name}/0": machine for machine in machines})
    return top.make_host_rows(reached, {f"{name}/0": sample for name, sample in samples.items()}, members, NOW)


def test_hosts_that_need_attention_come_first():
    machines = [machine(name, created=NOW - 7200) for name in ("a-2", "a-10", "ill", "old", "none", "new", "held")]
    machines[2] = replace(machines[2], healthy=False, why="a link is down")
    samples = {
        "a-2": sample(), "a-10": sample(), "ill": sample(), "old": sample(at=NOW - 60), "none": sample(chips=0),
        "held": sample(owners=[{"pid": 7, "user": "me", "command": "x"}]),
    }  # fmt: skip
    for name in ("duty", "used", "total"):
        samples["none"].data[name] = samples["held"].data[name] = {}
    found = rows_of(machines, samples, away=("gone/0 is being made",))
    assert [(row.host, row.state) for row in found] == [
        ("gone/0", "away"), ("ill/0", "ill"), ("new/0", "silent"), ("old/0", "silent"), ("none/0", "idle"),
        ("a-2/0", "busy"), ("a-10/0", "busy"), ("held/0", "busy"),
    ]  # fmt: skip
    why = {row.host: row.why for row in found}
    assert why["gone/0"] == "is being made" and why["ill/0"] == "a link is down" and "1 min" in why["old/0"]
    assert why["none/0"] == "shows no chips" and why["held/0"] == "no libtpu metrics"


def test_unknown_figure_is_a_dash_and_not_a_zero():
    member = MemberStatus("j-a", "alive", 1, "i", 12, 0, 41_234.0, 2.5, None, 0)
    half = sample(used={}, total={})
    rows = rows_of([machine("a"), machine("b")], {"a": half}, [member])
    busy = next(row for row in rows if row.host == "a/0")
    assert (busy.tokens_per_s, busy.loss, busy.version) == (41_234.0, 2.5, 12)
    assert [chip.hbm_used_bytes for chip in busy.chips] == [None, None]
    for width in (80, 120):
        lines = drawn(top.draw_hosts(rows, width, None), width)
        line = next(line for line in lines if line.startswith("a/0"))
        assert "█▁ 50%" in line and " – " in line and "41,234" in line and max(map(len, lines)) <= width
        words = next(line for line in lines if line.startswith("b/0")).split()
        assert words.count("–") >= 5 and "0%" not in words, "speed, loss and commit too"


def test_duty_of_a_chip_is_that_of_both_its_devices_and_many_hosts_fit_a_small_screen():
    """On v2 and v3 memory is of a device and duty of a chip, as tpu-info has it."""
    (row,) = rows_of([machine("a")], {"a": sample(used=dict.fromkeys("0123", 1e9), total=dict.fromkeys("0123", 8e9))})
    assert [chip.duty_percent for chip in row.chips] == [90.0, 90.0, 10.0, 10.0]
    machines = [machine(f"m-{number}") for number in range(64)]
    lines = drawn(top.draw_hosts(rows_of(machines, {machine.name: sample() for machine in machines}), 80, 23))
    assert len(lines) <= 23 and any("more" in line for line in lines) and "64 hosts: 64 busy" in lines[-1]


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\xff" * 9, b"\x0a\x04\x1a\x02\x12\x00"])
def test_wrong_answer_of_libtpu_has_no_figures(data):
    with suppress(IndexError, ValueError):  # which the caller takes for no answer
        assert parse_gauges(data) == {}

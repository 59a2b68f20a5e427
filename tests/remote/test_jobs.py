"""Jobs on a slice of four workers: through preemptions, maintenance and the death of keepers, never one twice."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet
from tests.remote.test_exec import gone, pids
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.place import VARIABLE
from tpuswarm.fleet.keeping import jobs
from tpuswarm.fleet.keeping.fleets import find
from tpuswarm.fleet.reach import Reach, find_reach
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.supervisor import Supervisor

FILE = """\
name = "quad"
provider = "rehearsal"

[storage]
bucket = "rehearsal-quad"
region = "us-central1"

[[pool]]
name = "slice"
type = "v5e-16"
zones = ["us-central1-a"]
count = 1
network = "tpuswarm-quad"
"""
PROGRAM = """\
worker=${{TPUSWARM_REHEARSAL_MACHINE%-*}}; worker=${{worker##*-}}
exec 9>{folder}/$worker.lock
flock -n 9 || echo "$worker is there twice" >>{folder}/twice
echo "$worker $TPUSWARM_REHEARSAL_MACHINE" >>{folder}/began
echo "began on $worker"
while [ ! -e {folder}/finish ]; do sleep 0.1; done
"""
PATIENCE = 240.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "swarm.toml").write_text(FILE)
    with local_cloud(folder / "cloud") as place:
        found = Fleet(folder, place)
        found.run("init", "--yes")
        found.run("up", "--yes", "--paid")
        yield found


def keep(fleet) -> subprocess.Popen[str]:
    with (fleet.folder / "keeper.log").open("ab") as log:
        return fleet.start("keep", stdout=log, stderr=log)


def until(fleet, condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        shown = fleet.run("jobs")[0] if time.monotonic() > end else ""
        assert time.monotonic() < end, f"no {what}:\n{shown}\n{(fleet.folder / 'keeper.log').read_text()[-3000:]}"
        time.sleep(0.1)


def begun(folder: Path) -> dict[str, list[str]]:
    """The hosts on which each worker began, in order."""
    found: dict[str, list[str]] = {}
    for line in (folder / "began").read_text().splitlines() if (folder / "began").exists() else ():
        worker, host = line.split()
        found.setdefault(worker, []).append(host)
    return found


def machine(fleet) -> str:
    (name,) = {each["name"] for each in ask(fleet.place, "status")["machines"] if each["state"] == "READY"}
    return name


def states(fleet) -> dict[str, list[dict]]:
    return {each["name"]: each["seats"] for each in json.loads(fleet.run("jobs", "--json")[0])["jobs"]}


def test_a_job_through_two_preemptions_a_maintenance_and_the_death_of_keepers(fleet, tmp_path):
    chance = random.Random(5)
    keeper = keep(fleet)
    said = fleet.run("exec", "slice", "--detach", "--name", "train", "--", PROGRAM.format(folder=tmp_path))[1]
    assert re.search(r"v5e-usc1a-\d+: running, run 1 on v5e-usc1a-\d+", said), said

    def all_began(times: int) -> bool:
        return len(begun(tmp_path)) == 4 and all(len(each) >= times for each in begun(tmp_path).values())

    until(fleet, lambda: all_began(1), "first run")
    ask(fleet.place, "preempt", name=machine(fleet), ending="preempted")
    until(fleet, lambda: all_began(2), "run after a preemption")
    ask(fleet.place, "maintenance", name=machine(fleet))
    until(fleet, lambda: all_began(3), "run after a maintenance")
    ask(fleet.place, "preempt", name=machine(fleet), ending="gone")
    for _ in range(3):  # at any moment of what it does about it
        time.sleep(chance.uniform(0.2, 3.0))
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
        keeper = keep(fleet)
    until(fleet, lambda: all_began(4), "run after a preemption and the death of three keepers")
    (seat,) = states(fleet)["train"]
    assert seat["phase"] == "running" and seat["failed"] == 0 and seat["lost"] == 3, seat
    lines = fleet.run("logs", "train")[0].splitlines()
    assert sorted(line.partition(" │ ")[2] for line in lines) == [f"began on {n}" for n in range(4)]

    (tmp_path / "finish").touch()
    until(fleet, lambda: states(fleet)["train"][0]["phase"] == "done", "end")
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    assert {worker: len(each) for worker, each in begun(tmp_path).items()} == dict.fromkeys("0123", seat["run"])
    keeper.send_signal(signal.SIGINT)
    keeper.wait()


def test_a_failure_of_its_own_ends_it_on_all_workers_and_is_not_tried_again(fleet):
    line = "case $TPUSWARM_REHEARSAL_MACHINE in *-2-*) echo bad; exit 3;; *) sleep 777;; esac"
    fleet.run("exec", "slice", "--detach", "--name", "bad", "--", line)
    keeper = keep(fleet)
    until(fleet, lambda: states(fleet)["bad"][0]["phase"] == "failed", "failure")
    (seat,) = states(fleet)["bad"]
    assert seat["run"] == 1 and seat["failed"] == 1 and seat["why"].endswith("/2: exit 3")
    assert "bad" in fleet.run("logs", "bad")[0]
    assert "exit 3" in fleet.run("jobs")[0]
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()


def test_what_stands_still_is_run_again_and_stop_ends_it_with_its_children(fleet, tmp_path):
    line = f"echo up >>{tmp_path}/ups; echo up; setsid sleep 888 & sleep 888"
    keeper = keep(fleet)
    fleet.run("exec", f"{machine(fleet)}/1", "--detach", "--name", "still", "--alive-for", "3", "--", line)
    until(fleet, lambda: (tmp_path / "ups").read_text().count("up") >= 2, "second run")
    assert states(fleet)["still"][0]["lost"] >= 1
    following = fleet.start("logs", "still", "-f")
    following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert "job still stays: `tpuswarm stop still` ends it" in fleet.finish(following, 130)[1]
    out, err = fleet.run("stop", "still")
    assert "stopped, it was asked to stop" in out and "asked job still to end" in err
    gone(fleet, "888")
    assert "job still is over: stopped" in fleet.run("stop", "still", code=2)[1]
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()


def test_without_a_keeper_whoever_asks_notices_an_end(fleet):
    there = machine(fleet)
    fleet.run("exec", f"{there}/1", "--detach", "--name", "short", "--", "sleep 1; echo said")
    out, _ = fleet.run("logs", "short", "-f")  # ends with it
    assert out == f"{there}/1 │ said\n"
    (seat,) = states(fleet)["short"]
    assert (seat["phase"], seat["why"]) == ("done", "exit 0 on every worker")
    assert "job short is over: done" in fleet.run("stop", "short", code=2)[1]
    fleet.run("exec", f"{there}/1", "--detach", "--name", "short", "--", "echo again; exit 3")  # its name is free
    until(fleet, lambda: states(fleet)["short"][0]["phase"] == "failed", "failure")
    out, _ = fleet.run("logs", there)
    assert f"{there}/1 short │ again" in out and "/2 short" not in out
    assert fleet.run("logs", f"{there}/0")[0].count("short") == 0
    assert "no run, job or machine is called shirt: `tpuswarm status`" in fleet.run("logs", "shirt", code=2)[1]


def test_a_host_on_which_nothing_can_begin_says_why_and_is_tried_again(fleet):
    there = machine(fleet)
    host = max(fleet.place.machines.glob(f"{there}-3-*"), key=lambda each: each.stat().st_mtime)  # not one of before
    stand_in = fleet.place.stand_ins / "python3"
    stand_in.write_text(
        f'#!/bin/sh\nif [ $TPUSWARM_ROOT = {host} ] && [ "$2" = start ]; then\n'
        f"echo 'OSError: [Errno 28] No space left on device' >&2; exit 1; fi\nexec {sys.executable} \"$@\"\n"
    )
    stand_in.chmod(0o755)
    fleet.run("exec", "slice", "--detach", "--name", "full", "--", "exec sleep 9999")
    keeper = keep(fleet)
    until(fleet, lambda: "No space left on device; tried again" in states(fleet)["full"][0]["why"], "reason")
    stand_in.unlink()
    until(fleet, lambda: len(pids(fleet, "9999")) >= 4, "start")
    fleet.run("stop", "full")
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()


def test_what_runs_on_where_no_job_is_any_more_is_ended(fleet, monkeypatch):
    """As on a machine that was in no list for a while, and whose job runs elsewhere since."""
    for name in (VARIABLE, "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, fleet.environment[name])
    monkeypatch.chdir(fleet.folder)
    monkeypatch.setattr(jobs, "SWEEP_S", 0.0)
    there = find(None)[0]
    cloud = there.provider()
    carrier = jobs.Carrier(Reach(there, cloud, there.store(cloud)), there.store(cloud))
    ((host,), _) = find_reach(there).hosts(f"{machine(fleet)}/3")

    async def work():
        async with Connections(carrier.key) as connections:
            await Supervisor(connections, host).start("stray", 1, {"line": "exec sleep 4242"})
            while not pids(fleet, "4242"):
                await asyncio.sleep(0.05)
            listing = cloud.machines(there.store(cloud).load().zones)
            for _ in range(2):
                assert pids(fleet, "4242")  # at the first look it may be a job that was just stored
                await carrier.round(connections, listing, time.time())
            while "running" in {each["state"] for each in (await Supervisor(connections, host).show()).values()}:
                await asyncio.sleep(0.05)

    asyncio.run(work())
    gone(fleet, "4242")


def test_a_machine_whose_pool_was_taken_out_of_the_file_stops_neither_the_jobs_nor_their_logs(fleet, monkeypatch):
    """It is there until it is deleted, and nobody knows a user of it any more: others are looked after meanwhile."""
    for each in (VARIABLE, "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(each, fleet.environment[each])
    monkeypatch.chdir(fleet.folder)
    name = machine(fleet)
    fleet.run("exec", f"{name}/0", "--detach", "--name", "rest", "--", "sleep 4343")
    until(fleet, lambda: states(fleet)["rest"][0]["phase"] == "running", "start")
    there = find(None)[0]
    cloud, store = there.provider(), there.store(there.provider())

    def call_the_pool(pool: str) -> None:
        def change(found):
            return replace(found, desired=replace(found.desired, pools=(replace(found.desired.pools[0], name=pool),)))

        store.change(change)

    async def work():
        carrier = jobs.Carrier(Reach(there, cloud, there.store(cloud)), there.store(cloud))
        async with Connections(carrier.key) as connections:
            document, _ = await carrier.round(connections, cloud.machines(store.load().zones), time.time())
        return {job.name: job.seats[0].phase for job in document.jobs}

    call_the_pool("another")
    try:
        assert asyncio.run(work())["rest"] == "running"
        assert f"{name}: run 1 on {name}; it is of no pool of the fleet" in fleet.run("logs", "rest")[1]
    finally:
        call_the_pool("slice")
    fleet.run("stop", "rest")
    until(fleet, lambda: states(fleet)["rest"][0]["phase"] == "stopped", "end")


def test_one_line_gets_a_machine_runs_a_program_until_it_exits_0_and_comes_down(fleet):
    line = "if [ -e tried ]; then exit 0; fi; touch tried; exit 5"
    words = ["up", "--type", "v2-8", "--spot", "--keep", "--provider", "rehearsal", "--paid", "--yes"]
    said = fleet.run(*words, "--down-when", "done", "--", line)[1]
    assert "running, run 1 on v2-" in said and "nobody keeps" not in said
    log = fleet.folder / "state/tpuswarm/fleets/rehearsal/v2-8/keeper.log"
    until(fleet, lambda: "deleting: down_when: the work is done" in log.read_text(), "end")
    until(fleet, lambda: not any(each["type"] == "v2-8" for each in ask(fleet.place, "status")["machines"]), "deletion")
    (seat,) = json.loads(fleet.run("jobs", "v2-8", "--json")[0])["jobs"][0]["seats"]
    assert (seat["phase"], seat["failed"], seat["run"]) == ("done", 1, 2)
    assert "'b' is too much" in fleet.run("up", "a.toml", "b", "--", "true", code=2)[1]
    assert "-- CMD goes with --type" in fleet.run("up", "--", "true", code=2)[1]


def test_names_and_options_that_are_wrong(fleet):
    (fleet.folder / "runs" / "twin").mkdir(parents=True)
    fleet.run("exec", "slice", "--detach", "--name", "twin", "--", "true")
    assert "twin is a run and a job: say ./twin or runs/twin" in fleet.run("logs", "twin", code=2)[1]
    for words, sentence in {
        ("--name", "x"): "--name, --restart, --failures and --alive-for are a job's: give --detach too",
        ("--detach", "--restart", "often"): "--restart is one of preempted, always, never, not 'often'",
        ("--detach", "--name", "A b"): "--name takes small letters, digits and -",
        ("--detach", "--time-out", "5"): "--time-out is for a command that is waited for",
    }.items():
        assert sentence in fleet.run("exec", "slice", *words, "--", "true", code=2)[1]

"""Jobs on a slice of four workers: they fail, hang, stray and stop, while this process does a keeper's rounds."""

import asyncio
import sys
import time
from dataclasses import replace

import pytest

from tests.waiting import until
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.keeper import job_runner
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.supervisor import Supervisor

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(spot_fleet, monkeypatch):
    return spot_fleet.enter(monkeypatch)


@pytest.fixture
def machine(fleet) -> str:
    return fleet.ready_machine()


def test_silent_job_is_restarted_and_stop_ends_it_with_its_children(fleet, machine, tmp_path):
    line = f"echo up >>{tmp_path}/ups; echo up; setsid -f sleep 888; sleep 888"
    fleet.detach(f"{machine}/1", "still", line, "--alive-for", "1", prints="up")
    jobs = fleet.carry_jobs(lambda _: (tmp_path / "ups").read_text().count("up") >= 2)
    assert jobs["still"].assignments[0].lost >= 1
    following = fleet.start("logs", "still", "-f")
    following.stdout.readline()
    assert "job still still runs; stop it: `tpuswarm stop still`" in fleet.interrupt(following)
    out, err = fleet.run("stop", "still")
    assert "stopped, as `tpuswarm stop` asked" in out and "stopping job still" in err
    fleet.wait_until_gone("sleep 888")
    assert "job still has ended: stopped" in fleet.run("stop", "still", code=2)[1]


def test_commands_notice_an_end_without_a_keeper_and_the_name_is_free_again(fleet, machine):
    fleet.detach(f"{machine}/1", "short", "sleep 1; echo hello")
    out, _ = fleet.run("logs", "short", "-f")  # ends with the job
    assert out == f"{machine}/1 │ hello\n"
    (seat,) = fleet.jobs()["short"]
    assert (seat["phase"], seat["why"]) == ("done", "exit 0 on every worker")
    assert "job short has ended: done" in fleet.run("stop", "short", code=2)[1]
    fleet.detach(f"{machine}/1", "short", "echo again; exit 3")
    until(lambda: fleet.jobs()["short"][0]["phase"] == "failed")
    out, _ = fleet.run("logs", machine)
    assert f"{machine}/1 short │ again" in out and "/2 short" not in out
    assert fleet.run("logs", f"{machine}/0")[0].count("short") == 0
    assert "no run, job or machine is called shirt. List them:" in fleet.run("logs", "shirt", code=2)[1]
    (fleet.folder / "runs" / "short").mkdir(parents=True)
    assert "short is a run and a job. For the run, write ./short or runs/short" in fleet.run("logs", "short", code=2)[1]


def test_host_that_cannot_start_a_job_is_reported_and_retried(fleet, machine):
    stand_in = fleet.place.stand_ins / "python3"
    stand_in.write_text(
        f'#!/bin/sh\nif [ $TPUSWARM_ROOT = {fleet.home(f"{machine}-3")} ] && [ "$2" = start ]; then\n'
        f"echo 'OSError: [Errno 28] No space left on device' >&2; exit 1; fi\nexec {sys.executable} \"$@\"\n"
    )
    stand_in.chmod(0o755)
    try:
        with fleet.job("slice", "full", "exec sleep 9999"):
            fleet.carry_jobs(lambda jobs: "No space left on device; trying again" in jobs["full"].assignments[0].why)
            stand_in.unlink()
            fleet.carry_jobs(lambda _: len(fleet.pids("sleep 9999")) == 4)
    finally:
        stand_in.unlink(missing_ok=True)


def test_run_whose_job_is_elsewhere_is_ended(fleet, machine, monkeypatch):
    """Such as on a machine that the cloud did not list for a while."""
    monkeypatch.setattr(job_runner, "SWEEP_INTERVAL_S", 0.0)
    there = find_fleet(None)[0]
    cloud = there.provider()
    runner = job_runner.JobRunner(Routes(there, cloud, there.store(cloud)), there.store(cloud))
    ((host,), _) = open_routes(there).hosts(f"{machine}/3")
    if not fleet.jobs():
        fleet.detach(machine, "some", "true")

    async def work():
        async with Connections(runner.key) as connections:
            supervisor = Supervisor(connections, host)
            await supervisor.start("stray", 1, {"line": "exec sleep 4242"})
            while not fleet.pids("sleep 4242"):
                await asyncio.sleep(0.05)
            listing = cloud.machines(there.store(cloud).load().zones)
            for _ in range(2):
                assert fleet.pids("sleep 4242"), "the first round may see a job that was just stored"
                await runner.run_once(connections, listing, time.time())
            while "running" in {state["state"] for state in (await supervisor.show()).values()}:
                await asyncio.sleep(0.05)

    asyncio.run(work())
    fleet.wait_until_gone("sleep 4242")


def test_machine_of_a_removed_pool_stops_neither_jobs_nor_logs(fleet, machine):
    fleet.detach(f"{machine}/0", "rest", "sleep 4343")
    there = find_fleet(None)[0]
    store = there.store(there.provider())

    def rename_pool(name: str) -> None:
        def change(document):
            pool = replace(document.desired.pools[0], name=name)
            return replace(document, desired=replace(document.desired, pools=(pool,)))

        store.change(change)

    rename_pool("another")
    try:
        assert fleet.carry_jobs(lambda _: True)["rest"].assignments[0].phase == "running"
        assert f"{machine}: run 1 on {machine}; it has no pool in the fleet" in fleet.run("logs", "rest")[1]
    finally:
        rename_pool("slice")
    fleet.run("stop", "rest")
    assert fleet.jobs()["rest"][0]["phase"] == "stopped"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--name", "x"), "--name, --restart, --failures and --alive-for need --detach"),
        (("--detach", "--restart", "often"), "--restart is one of preempted, always, never, not 'often'"),
        (("--detach", "--name", "A b"), "--name is at most 30 lower-case letters, digits and dashes"),
        (("--detach", "--time-out", "5"), "--time-out does not work with --detach"),
    ],
)
def test_wrong_options_of_a_job(fleet, options, sentence):
    assert sentence in fleet.run("exec", "slice", *options, "--", "true", code=2)[1]

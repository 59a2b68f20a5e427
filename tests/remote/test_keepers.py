"""Jobs beside keeper processes: preemptions, maintenance, keepers that are killed, and a keeper in the background."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remote.conftest import INTERVALS
from tpuswarm.cloud.rehearsal.client import ask

pytestmark = pytest.mark.slow

PROGRAM = """\
worker=${{TPUSWARM_REHEARSAL_MACHINE%-*}}; worker=${{worker##*-}}
exec 9>{folder}/$worker.lock
flock -n 9 || echo "$worker is there twice" >>{folder}/twice
echo "$worker $TPUSWARM_REHEARSAL_MACHINE" >>{folder}/began
echo "began on $worker"
while [ ! -e {folder}/finish ]; do sleep 0.1; done
"""


def start_keeper(fleet) -> subprocess.Popen[str]:
    with (fleet.folder / "keeper.log").open("ab") as log:
        return fleet.start("keep", intervals=INTERVALS, stdout=log, stderr=log)


def until(fleet, condition: Callable[[], bool], what: str, log: str = "keeper.log") -> None:
    end = time.monotonic() + 240
    while not condition():
        shown = fleet.run("jobs")[0] if time.monotonic() > end else ""
        assert time.monotonic() < end, f"no {what}:\n{shown}\n{(fleet.folder / log).read_text()[-3000:]}"
        time.sleep(0.1)


def starts(folder: Path) -> dict[str, int]:
    """How often each worker has started."""
    lines = (folder / "began").read_text().splitlines() if (folder / "began").exists() else []
    workers = [line.split()[0] for line in lines]
    return {worker: workers.count(worker) for worker in workers}


def machine(fleet) -> str:
    (name,) = {machine["name"] for machine in fleet.machines() if machine["state"] == "READY"}
    return name


def test_job_survives_preemptions_maintenance_and_killed_keepers_and_never_runs_twice(spot_fleet, tmp_path):
    fleet, chance = spot_fleet, random.Random(5)
    keeper = start_keeper(fleet)
    err = fleet.detach("slice", "train", PROGRAM.format(folder=tmp_path))
    assert re.search(r"v5e-usc1a-\d+: running, run 1 on v5e-usc1a-\d+", err), err

    def all_started(times: int) -> bool:
        return len(starts(tmp_path)) == 4 and min(starts(tmp_path).values()) >= times

    until(fleet, lambda: all_started(1), "first run")
    ask(fleet.place, "preempt", name=machine(fleet), ending="preempted")
    until(fleet, lambda: all_started(2), "run after a preemption")
    ask(fleet.place, "maintenance", name=machine(fleet))
    until(fleet, lambda: all_started(3), "run after a maintenance")
    ask(fleet.place, "preempt", name=machine(fleet), ending="gone")
    for _ in range(3):  # at any moment of what it does about it
        time.sleep(chance.uniform(0.2, 2.0))
        keeper.kill()
        keeper.wait()
        keeper = start_keeper(fleet)
    until(fleet, lambda: all_started(4), "run after a preemption and three killed keepers")
    (seat,) = fleet.jobs()["train"]
    assert seat["phase"] == "running" and seat["failed"] == 0 and seat["lost"] == 3, seat
    lines = fleet.run("logs", "train")[0].splitlines()
    assert sorted(line.partition(" │ ")[2] for line in lines) == [f"began on {n}" for n in range(4)]

    (tmp_path / "finish").touch()
    until(fleet, lambda: fleet.jobs()["train"][0]["phase"] == "done", "end")
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    assert starts(tmp_path) == dict.fromkeys("0123", seat["run"])
    keeper.send_signal(signal.SIGINT)
    keeper.wait()


def test_one_command_gets_a_machine_runs_a_program_until_it_succeeds_and_deletes_it(spot_fleet):
    fleet = spot_fleet
    line = "if [ -e tried ]; then exit 0; fi; touch tried; exit 5"
    words = ["up", "--type", "v2-8", "--spot", "--keep", "--provider", "rehearsal", "--paid", "--yes"]
    err = fleet.run(*words, "--down-when", "done", "--", line)[1]
    assert "running, run 1 on v2-" in err and "nobody keeps" not in err
    log = "state/tpuswarm/fleets/rehearsal/v2-8/keeper.log"
    until(fleet, lambda: "deleting: down_when: the work is done" in (fleet.folder / log).read_text(), "end", log)
    until(fleet, lambda: "v2-8" not in {machine["type"] for machine in fleet.machines()}, "deletion", log)
    (seat,) = fleet.run_json("jobs", "v2-8")["jobs"][0]["seats"]
    assert (seat["phase"], seat["failed"], seat["run"]) == ("done", 1, 2)
    assert "'b' is too much" in fleet.run("up", "a.toml", "b", "--", "true", code=2)[1]
    assert "-- CMD goes with --type" in fleet.run("up", "--", "true", code=2)[1]

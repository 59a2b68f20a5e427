"""Jobs beside keeper processes: preemptions, maintenance, keepers that are killed, and a keeper in the background."""

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.remote.conftest import INTERVALS
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.fleet.store.fleets import find_fleet

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


def leader() -> int:
    there = find_fleet(None)[0]
    lease = there.store(there.provider()).load().lease
    return lease.pid if lease else 0


def starts(folder: Path) -> dict[str, int]:
    lines = (folder / "began").read_text().splitlines() if (folder / "began").exists() else []
    workers = [line.split()[0] for line in lines]
    return {worker: workers.count(worker) for worker in workers}


def test_job_survives_preemptions_maintenance_and_killed_keepers_and_never_runs_twice(
    spot_fleet, tmp_path, monkeypatch
):
    fleet, chance = spot_fleet.enter(monkeypatch), random.Random(5)
    keeper = start_keeper(fleet)
    err = fleet.detach("slice", "train", PROGRAM.format(folder=tmp_path))
    assert re.search(r"v5e-usc1a-\d+: running, run 1 on v5e-usc1a-\d+", err), err

    def all_started(times: int) -> bool:
        return len(starts(tmp_path)) == 4 and min(starts(tmp_path).values()) >= times

    until(lambda: all_started(1))
    send_command(fleet.place, "preempt", name=fleet.ready_machine(), ending="preempted")
    until(lambda: all_started(2))
    send_command(fleet.place, "maintenance", name=fleet.ready_machine())
    until(lambda: all_started(3))
    send_command(fleet.place, "preempt", name=fleet.ready_machine(), ending="gone")
    for _ in range(3):
        until(lambda: leader() == keeper.pid)  # noqa: B023
        time.sleep(chance.uniform(0.0, 1.0))
        keeper.kill()
        keeper.wait()
        keeper = start_keeper(fleet)
    until(lambda: all_started(4))
    (seat,) = fleet.jobs()["train"]
    assert seat["phase"] == "running" and seat["failed"] == 0 and seat["lost"] == 3, seat
    lines = fleet.run("logs", "train")[0].splitlines()
    assert sorted(line.partition(" │ ")[2] for line in lines) == [f"began on {n}" for n in range(4)]

    (tmp_path / "finish").touch()
    until(lambda: fleet.jobs()["train"][0]["phase"] == "done")
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    assert starts(tmp_path) == dict.fromkeys("0123", seat["run"])
    keeper.send_signal(signal.SIGINT)
    keeper.wait()


def test_one_line_sends_the_folder_reports_a_failing_program_once_and_deletes_the_machine_after_success(
    spot_fleet, tmp_path
):
    fleet, program = spot_fleet, tmp_path / "train.py"
    words = ["up", "--type", "v2-8", "--spot", "--keep", "--provider", "rehearsal", "--paid", "--yes"]
    words += ["--down-when", "done", "--", "python", "train.py"]

    def job() -> tuple[str, int]:
        (seat,) = fleet.run_json("jobs", "v2-8")["jobs"][0]["seats"]
        return seat["phase"], seat["run"]

    program.write_text("import jax, no_such_module")
    out, err = fleet.run(*words, code=1, cwd=tmp_path)
    assert "No module named 'no_such_module'" in out and "no keeper runs" not in err
    assert re.search(r"`python train.py` failed: v2-\S+/0: exit 1 after \d+ s, so it is not run again", err), err
    assert job() == ("failed", 1)

    program.write_text("import jax, tpuswarm")
    fleet.run(*words, cwd=tmp_path)
    log = fleet.folder / "state/tpuswarm/fleets/rehearsal/v2-8/keeper.log"
    until(lambda: "deleting: down_when: the work is done" in log.read_text())
    until(lambda: "v2-8" not in {machine["type"] for machine in fleet.machines()})
    assert job() == ("done", 2)
    assert "unexpected argument 'b'" in fleet.run("up", "a.toml", "b", "--", "true", code=2)[1]
    assert "-- CMD needs --type" in fleet.run("up", "--", "true", code=2)[1]

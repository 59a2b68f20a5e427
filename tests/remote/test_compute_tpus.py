"""A fleet of TPUs that Compute Engine creates: the same commands, jobs and keeper as with the TPU API."""

import json
import signal

import pytest

from tests.remote.conftest import fleet_of, swarm_toml
from tests.remote.test_doctor import SET_UP
from tests.remote.test_keepers import start_keeper
from tests.waiting import until
from tpuswarm.cloud.google.instances import list_aggregated
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.fleet.spec.providers import open_access

ONE, SLICE = "v5p-use5a-0", "v5p-use5a-1"


@pytest.fixture(scope="module")
def duo(tmp_path_factory):
    """A TPU of one host, and a slice of two."""
    api = 'api = "compute"'
    file = swarm_toml("duo", "us-east5", f"one v5p-8 us-east5-a 1\n{api}", f"slice v5p-16 us-east5-a 1\n{api}")
    with fleet_of(tmp_path_factory.mktemp("duo"), file) as fleet:
        yield fleet


def test_commands_jobs_and_keeper_work_on_tpus_of_compute_engine(duo, tmp_path, monkeypatch, capfd):
    fleet = duo.enter(monkeypatch)
    rows = {row["name"]: (row["type"], row["state"], len(row["workers"])) for row in fleet.run_json("list")["machines"]}
    assert rows == {ONE: ("v5p-8", "ready", 1), SLICE: ("v5p-16", "ready", 2)}
    out = fleet.exec("all", "echo sees $(hostname)")
    assert sorted(line.split()[0] for line in out.splitlines()) == [f"{ONE}/0", f"{SLICE}/0", f"{SLICE}/1"]
    project = tmp_path / "project"
    project.mkdir()
    (project / "program.py").write_text("print('synced')\n")
    fleet.run("sync", "all", "--fleet", "duo", cwd=project)
    assert fleet.exec("all", "python3 project/program.py").count("synced") == 3
    fleet.run("ssh", f"{SLICE}/1", "--", "echo", "by-ssh")
    assert capfd.readouterr().out == "by-ssh\n"
    fleet.exec("all", SET_UP)
    assert f"{SLICE}: JAX adds on all 8 devices" in fleet.run("doctor", "all", "--run")[0]
    fleet.run("doctor", "all", "--report")
    assert json.loads((fleet.folder / "tpuswarm-report.json").read_text())["contradicted"] == {}

    keeper = start_keeper(fleet)
    began = tmp_path / "began"
    line = f"echo $TPUSWARM_WORKER >> {began}; while [ ! -e {tmp_path}/finish ]; do sleep 0.1; done"
    fleet.detach("all", "train", line)
    until(lambda: began.exists() and len(began.read_text().splitlines()) == 3)
    send_command(fleet.place, "preempt", name=ONE)
    cloud = GoogleProvider(open_access("rehearsal", None))
    (slice_,) = [machine for machine in cloud.machines([]).machines if machine.name == SLICE]
    send_command(fleet.place, "preempt", name=slice_.workers[1].name)  # so the whole slice is made anew
    until(lambda: len(began.read_text().splitlines()) == 6, 90)
    assert {(seat["failed"], seat["lost"]) for seat in fleet.jobs()["train"]} == {(0, 1)}
    (tmp_path / "finish").touch()
    until(lambda: all(seat["phase"] == "done" for seat in fleet.jobs()["train"]))
    keeper.send_signal(signal.SIGINT)
    keeper.wait()

    fleet.run("down", "--yes")
    assert not any(cloud.machines([]))
    kinds = ("instanceTemplates", "resourcePolicies", "instanceGroupManagers", "instances", "disks")
    assert not any(list_aggregated(cloud.access, kind)[0] for kind in kinds)

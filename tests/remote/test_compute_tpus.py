"""A fleet of TPUs that Compute Engine creates: the same commands, jobs and keeper as with the TPU API."""

import signal

import pytest

from tests.local_cloud import until
from tests.remote.conftest import fleet_of, swarm_toml
from tests.remote.test_keepers import start_keeper
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.fleet.spec.providers import open_access

ONE = "tpu7x-usc1c-0"


@pytest.fixture(scope="module")
def ironwood(tmp_path_factory):
    """A TPU7x, which only Compute Engine has."""
    file = swarm_toml("iron", "us-central1", "one tpu7x-8 us-central1-c 1")
    with fleet_of(tmp_path_factory.mktemp("iron"), file) as fleet:
        yield fleet


def test_commands_jobs_and_keeper_work_on_a_tpu_of_compute_engine(ironwood, tmp_path, monkeypatch, capfd):
    fleet = ironwood.enter(monkeypatch)
    (row,) = fleet.run_json("list")["machines"]
    assert (row["name"], row["type"], row["state"]) == (ONE, "tpu7x-8", "ready")
    assert "sees the machine" in fleet.exec(ONE, "echo sees the machine")
    project = tmp_path / "project"
    project.mkdir()
    (project / "program.py").write_text("print('synced')\n")
    fleet.run("sync", "--fleet", "iron", cwd=project)
    assert "synced" in fleet.exec(ONE, "python3 project/program.py")
    fleet.run("ssh", ONE, "--", "echo", "by-ssh")
    assert capfd.readouterr().out == "by-ssh\n"
    fleet.run("doctor", ONE)  # finds nothing wrong

    keeper = start_keeper(fleet)
    line = f"echo began >> {tmp_path}/began; while [ ! -e {tmp_path}/finish ]; do sleep 0.1; done"
    fleet.detach(ONE, "train", line)
    until(lambda: (tmp_path / "began").exists())
    send_command(fleet.place, "preempt", name=ONE)
    until(lambda: (tmp_path / "began").read_text().count("began") == 2, 240)
    (seat,) = fleet.jobs()["train"]
    assert (seat["failed"], seat["lost"]) == (0, 1)
    (tmp_path / "finish").touch()
    until(lambda: fleet.jobs()["train"][0]["phase"] == "done")
    keeper.send_signal(signal.SIGINT)
    keeper.wait()

    fleet.run("down", "--yes")
    cloud = GoogleProvider(open_access("rehearsal", None))
    assert not cloud.machines([]).machines

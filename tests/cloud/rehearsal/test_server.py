"""The server: it outlives what started it and may be killed; what it knew it knows again."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from google.cloud import storage, tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tests.cloud.rehearsal.conftest import PROJECT, TPU, until
from tests.local_cloud import local_cloud
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect, is_running, running, stop
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.errors import InputError, RunFailed

HERE = f"{PROJECT}/locations/us-central1-b"


@pytest.fixture
def place(tmp_path):
    with local_cloud(tmp_path / "cloud") as place:
        yield place


def client(endpoints):
    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=endpoints.channel()))


def states(endpoints):
    return {each.name.rsplit("/", 1)[-1]: each.state.name for each in client(endpoints).list_nodes(parent=f"{HERE}")}


def test_a_server_that_was_killed_knows_everything_again_and_what_was_under_way_goes_on(place):
    endpoints = connect(place.folder)
    node = tpu_v2.Node(TPU, metadata={"startup-script": "sleep 300"})
    client(endpoints).create_node(parent=HERE, node_id="old", node=node)
    until(lambda: states(endpoints) == {"old": "READY"})
    (worker,) = ask(place, "status")["machines"][0]["workers"]
    (before,) = until(lambda: [pid for pid in processes.find([worker["id"]]) if b"sleep" in command(pid)])
    where = {"api_endpoint": endpoints.http}
    bucket = storage.Client(project="p", credentials=endpoints.credentials(), client_options=where)
    bucket.create_bucket("kept").blob("a").upload_from_string(b"kept")
    ask(place, "speed", speed=20.0)
    creating = client(endpoints).create_node(parent=HERE, node_id="new", node=TPU).operation.name
    assert states(endpoints) == {"old": "READY", "new": "CREATING"}
    os.kill(place.read_address()["pid"], signal.SIGKILL)
    until(lambda: not is_running(place))

    again = connect(place.folder)
    assert again == endpoints  # under the same addresses, with the same token
    until(lambda: client(again).get_operation({"name": creating}).done)
    assert states(again) == {"old": "READY", "new": "READY"}
    assert before in processes.find([worker["id"]])  # its machines went on meanwhile
    assert (
        requests.get(
            f"http://{worker['internal']}:2223/computeMetadata/v1/instance/preempted",
            headers={"Metadata-Flavor": "Google"},
        ).text
        == "FALSE"
    )
    bucket = storage.Client(project="p", credentials=again.credentials(), client_options=where)
    assert bucket.bucket("kept").blob("a").download_as_bytes() == b"kept"


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return b""


def test_stopping_ends_what_runs_on_machines_and_starting_boots_them(place):
    endpoints = connect(place.folder)
    script = tpu_v2.Node(TPU, metadata={"startup-script": "echo booted >> $HOME/boots; sleep 300"})
    client(endpoints).create_node(parent=HERE, node_id="one", node=script)
    until(lambda: states(endpoints) == {"one": "READY"})
    (worker,) = ask(place, "status")["machines"][0]["workers"]
    boots = Path(worker["folder"]) / "root" / "boots"
    until(lambda: boots.exists() and boots.read_text() == "booted\n")
    assert stop(place) and not processes.find([worker["id"]]) and running(place) is None
    assert not stop(place)
    with pytest.raises(InputError, match=r"no local cloud runs in .*; `tpuswarm rehearsal start` starts it"):
        ask(place, "preempt", name="one")
    connect(place.folder)
    until(lambda: boots.read_text() == "booted\nbooted\n")


def test_the_server_ends_with_its_folder(place):
    endpoints = connect(place.folder)
    node = tpu_v2.Node(TPU, metadata={"startup-script": "sleep 300"})
    client(endpoints).create_node(parent=HERE, node_id="one", node=node)
    until(lambda: states(endpoints) == {"one": "READY"})
    (worker,) = ask(place, "status")["machines"][0]["workers"]
    until(lambda: processes.find([worker["id"]]))
    pid = place.read_address()["pid"]
    shutil.rmtree(place.folder, ignore_errors=True)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert not processes.find([worker["id"]])


def test_of_all_who_start_it_one_serves(tmp_path):
    place = Place(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        try:
            assert len(set(pool.map(lambda _: connect(tmp_path), range(3)))) == 1
        finally:
            stop(place)


def test_it_outlives_the_command_that_started_it(tmp_path):
    starting = "import sys; from pathlib import Path; from tpuswarm.cloud.rehearsal.connect import connect"
    starting += "; connect(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", starting, tmp_path], check=True, timeout=120)
    try:
        assert running(Place(tmp_path)) is not None
    finally:
        stop(Place(tmp_path))


@pytest.mark.parametrize("damage", ["noise", "a document"])
def test_a_damaged_state_file_is_said(tmp_path, damage):
    place = Place(tmp_path)
    if damage == "noise":
        place.make()
        place.state.write_bytes(b"\0 no database" * 1000)
    else:
        from tpuswarm.cloud.rehearsal.common.records import Records

        place.make()
        records = Records(place.state)
        records.table("node", lambda body: body, lambda node: node).put("n", b"\xff no node")
        records.close()
    with pytest.raises(RunFailed, match=r"state.sqlite is damaged \(.*\): .* delete .* to begin a new one"):
        connect(tmp_path)


def test_a_server_ends_when_the_process_is_gone_for_which_it_was_started(tmp_path, monkeypatch):
    with subprocess.Popen(["sleep", "300"]) as owner:
        monkeypatch.setenv("TPUSWARM_REHEARSAL_OWNER", str(owner.pid))
        with local_cloud(tmp_path / "cloud") as place:
            owner.kill()
            owner.wait()
            until(lambda: not is_running(place))

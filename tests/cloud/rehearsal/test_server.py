"""The local cloud's server: it outlives the command that started it, and remembers everything after a kill."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.cloud import tpu_v2

from tests.cloud.rehearsal.conftest import PARENT, TPU, metadata, storage_client, tpu_client, wait_until_done
from tests.local_cloud import local_cloud
from tests.waiting import until
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.connect import CloudFolder, connect, find_running, is_running, send_command, stop
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.errors import InputError, RunFailed

pytestmark = pytest.mark.slow


def states(tpu):
    return {node.name.rsplit("/", 1)[-1]: node.state.name for node in tpu.list_nodes(parent=PARENT)}


def create_ready_node(place, tpu, name, script):
    """Return its worker."""
    node = tpu_v2.Node(TPU, metadata={"startup-script": script})
    wait_until_done(tpu, tpu.create_node(parent=PARENT, node_id=name, node=node))
    (worker,) = send_command(place, "status")["machines"][0]["workers"]
    return worker


def test_killed_and_stopped_servers_continue_where_they_were(tmp_path):
    with local_cloud(tmp_path / "cloud") as place:
        endpoints = connect(place.path)
        tpu = tpu_client(endpoints)
        worker = create_ready_node(place, tpu, "old", "echo booted >> $HOME/boots; exec sleep 300")
        boots = Path(worker["folder"]) / "root" / "boots"
        until(lambda: boots.exists() and boots.read_text() == "booted\n")
        (process,) = until(lambda: processes.find([worker["id"]]))
        storage_client(endpoints).create_bucket("kept").blob("a").upload_from_string(b"kept")
        send_command(place, "speed", speed=1.0)
        creating = tpu.create_node(parent=PARENT, node_id="new", node=TPU)
        os.kill(place.read_address()["pid"], signal.SIGKILL)
        until(lambda: not is_running(place))

        assert connect(place.path) == endpoints  # the same addresses and token
        tpu = tpu_client(endpoints)
        assert states(tpu) == {"old": "READY", "new": "CREATING"}
        send_command(place, "speed", speed=300.0)
        wait_until_done(tpu, creating)
        assert states(tpu) == {"old": "READY", "new": "READY"}
        assert process in processes.find([worker["id"]])  # machines went on meanwhile
        assert metadata(worker, "instance/preempted") == "FALSE"
        assert storage_client(endpoints).bucket("kept").blob("a").download_as_bytes() == b"kept"

        assert stop(place) and not processes.find([worker["id"]]) and find_running(place) is None
        assert not stop(place)
        with pytest.raises(InputError, match=r"no local cloud runs in .*; `tpuswarm rehearsal start` starts it"):
            send_command(place, "preempt", name="old")
        connect(place.path)
        until(lambda: boots.read_text() == "booted\nbooted\n")


def test_one_of_several_started_servers_serves_and_ends_with_its_folder(tmp_path):
    place = CloudFolder(tmp_path / "cloud")
    try:
        with ThreadPoolExecutor(3) as pool:
            (endpoints,) = set(pool.map(lambda _: connect(place.path), range(3)))
        send_command(place, "speed", speed=300.0)
        worker = create_ready_node(place, tpu_client(endpoints), "one", "sleep 300")
        until(lambda: processes.find([worker["id"]]))
        pid = place.read_address()["pid"]
        shutil.rmtree(place.path, ignore_errors=True)
        until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
        assert not processes.find([worker["id"]])
    finally:
        stop(place)


def test_server_outlives_its_command_and_ends_with_its_owner(tmp_path, monkeypatch):
    place = CloudFolder(tmp_path)
    program = "import sys; from pathlib import Path; from tpuswarm.cloud.rehearsal.connect import connect"
    with subprocess.Popen(["sleep", "300"]) as owner:
        monkeypatch.setenv("TPUSWARM_REHEARSAL_OWNER", str(owner.pid))
        try:
            subprocess.run([sys.executable, "-c", f"{program}; connect(Path(sys.argv[1]))", tmp_path], check=True)
            assert find_running(place) is not None
            owner.kill()
            owner.wait()
            until(lambda: not is_running(place))
        finally:
            owner.kill()
            stop(place)


def test_damaged_state_file_is_reported(tmp_path):
    place = CloudFolder(tmp_path)
    place.make()
    records = Records(place.state)
    records.table("node", lambda body: body, lambda node: node).put("n", b"\xff no node")
    records.commit()
    sentence = r"state.sqlite is damaged \(.*\): .* delete .* to begin a new one"
    with pytest.raises(RunFailed, match=sentence):
        records.table("node")
    records.close()
    place.state.write_bytes(b"\0 no database" * 1000)
    with pytest.raises(RunFailed, match=sentence):
        connect(tmp_path)

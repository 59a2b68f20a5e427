"""Machines are folders and processes: SSH, start-up scripts, metadata, stand-ins, kills."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.cloud.rehearsal.conftest import PROJECT, TPU, metadata, storage_client
from tests.local_cloud import slow_clock
from tests.waiting import until
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.timetable import Event
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.errors import InputError

PARENT = f"{PROJECT}/locations/europe-west4-a"
ANY_HOST = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
SCRIPT = "echo started as $USER on $(hostname | wc -l) computer; sudo apt-get install -y tmux; echo $XLA_FLAGS"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def pod(tpu, place, key):
    keys = f"old:ssh-rsa broken\nalice:{key.with_suffix('.pub').read_text()}"
    node = tpu_v2.Node(
        accelerator_type="v2-32",
        runtime_version="tpu-ubuntu2204-base",
        network_config={"enable_external_ips": True},
        metadata={"ssh-keys": keys, "startup-script": SCRIPT},
    )
    tpu.create_node(parent=PARENT, node_id="pod", node=node)
    return until(lambda: workers(place, "pod"))


def workers(place, name):
    machine = next(machine for machine in send_command(place, "status")["machines"] if machine["name"] == name)
    return machine["workers"] if machine["state"] == "READY" else None


@pytest.fixture(scope="module")
def ssh(key, pod):

    def run(worker, *words, user="alice", options=(), stdin=""):
        line = ["ssh", "-F", "none", "-i", key, "-p", "2222", *options, *ANY_HOST, f"{user}@{worker['external']}"]
        return subprocess.run([*line, *words], input=stdin, capture_output=True, text=True, timeout=240)

    for worker in pod:
        until(lambda worker=worker: run(worker, "true").returncode == 0)
    return run


def test_ssh_accepts_keys_of_the_metadata_only_and_host_keys_can_be_checked(pod, ssh, tpu, tmp_path):
    assert "Permission denied" in ssh(pod[0], "true", user="bob").stderr
    assert "Permission denied" in ssh(pod[0], "true", options=["-o", "PubkeyAuthentication=no"]).stderr
    request = {"name": f"{PARENT}/nodes/pod", "query_path": "hostkeys/"}
    hosts = tpu.get_guest_attributes(request=request).guest_attributes
    assert len({host.query_value.items[0].value for host in hosts}) == 4
    request["worker_ids"] = ["2"]
    (entry,) = tpu.get_guest_attributes(request=request).guest_attributes[0].query_value.items
    known = tmp_path / "known_hosts"
    known.write_text(f"[{pod[2]['external']}]:2222 {entry.key} {entry.value}\n")
    strict = ("-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes")
    assert ssh(pod[2], "true", options=strict).returncode == 0
    known.write_text(f"[{pod[3]['external']}]:2222 {entry.key} {entry.value}\n")
    assert "Host key verification failed" in ssh(pod[3], "true", options=strict).stderr


def test_terminals_copies_and_signals_work(pod, ssh, key, tmp_path):
    assert ssh(pod[1], "tty", options=["-tt"]).stdout.startswith("/dev/pts/")
    (tmp_path / "sent").write_text("text")
    copy = f"alice@{pod[1]['external']}:copy"
    for protocol in ([], ["-O"]):
        scp = ["scp", *protocol, "-F", "none", "-q", "-i", key, "-P", "2222", *ANY_HOST]
        subprocess.run([*scp, tmp_path / "sent", copy], check=True)
        subprocess.run([*scp, copy, tmp_path / "back"], check=True)
        assert (tmp_path / "back").read_text() == "text"
    assert ssh(pod[1], "kill -TERM $$").returncode == 255 and ssh(pod[1], "cat copy").stdout == "text"


def test_output_just_before_exit_arrives(pod, ssh):
    with ThreadPoolExecutor(8) as pool:
        printed = pool.map(lambda n: ssh(pod[1], f"echo {n} is here", options=["-tt"]).stdout, range(16))
        assert list(printed) == [f"{n} is here\n" for n in range(16)]
    runs_on = ssh(pod[1], "set -m; sleep 90 & echo $!", options=["-tt"])  # a timeout of 60 s
    assert ssh(pod[1], f"kill {runs_on.stdout.split()[-1]}").returncode == 0


def test_exit_code_arrives_from_a_command_that_ignores_its_input(pod, ssh):
    with ThreadPoolExecutor(8) as pool:
        codes = pool.map(lambda n: ssh(pod[1], f"exit {n}", stdin="x" * 2**22).returncode, range(16))
        assert list(codes) == list(range(16))
    assert ssh(pod[1], "sleep 1; wc -c", stdin="x" * 2**23).stdout == f"{2**23}\n"  # a late reader gets it all


def test_startup_script_runs_as_root_and_sees_the_chips_of_its_host(pod):
    log = Path(pod[2]["folder"]) / "var/log/startup-script.log"
    until(lambda: log.exists() and "exit status" in log.read_text())
    assert "started as root" in log.read_text() and "Setting up tmux" in log.read_text()
    assert "--xla_force_host_platform_device_count=8" in log.read_text()  # 4 chips of 2 cores
    assert sorted(device.name for device in (Path(pod[2]["folder"]) / "dev").iterdir()) == [
        f"accel{n}" for n in range(4)
    ]


def test_metadata_server_describes_the_worker(pod):
    assert metadata(pod[3], "instance/attributes/agent-worker-number") == "3"
    assert "CHIPS_PER_HOST_BOUNDS: '2,2,1'" in metadata(pod[3], "instance/attributes/tpu-env")
    peers = metadata(pod[3], "instance/attributes/worker-network-endpoints").split(",")
    assert [peer.split(":")[2] for peer in peers] == [worker["internal"] for worker in pod]
    assert metadata(pod[3], "instance/preempted") == "FALSE"
    for headers in ({"Metadata-Flavor": "no"}, {"X-Forwarded-For": "1.2.3.4"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            metadata(pod[3], "instance/preempted", **headers)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        metadata(pod[3], "instance/attributes/no-such-key")


def test_system_commands_change_the_machine_folder_not_the_computer(pod, ssh):
    def computer():
        etc = sorted((str(path), path.lstat().st_mtime_ns) for path in Path("/etc").rglob("*"))
        return etc, Path("/proc/mounts").read_text(), Path("/proc/swaps").read_text()

    before = computer()
    script = """set -e
        sudo apt-get update -q; sudo DEBIAN_FRONTEND=noninteractive apt-get install -y rsync
        sudo systemctl stop tpu-runtime; systemctl is-active tpu-runtime || true
        sudo systemctl enable --now docker.service; systemctl is-active docker
        sudo timedatectl set-timezone Asia/Tokyo; timedatectl | head -1
        sudo swapon /swapfile; swapon; sudo swapoff /swapfile; swapon
        sudo mkdir -p /mnt/data; sudo mount -o ro /dev/sdb /mnt/data; mount; sudo umount /mnt/data
        echo line | sudo tee -a /etc/environment; sudo reboot || echo stays on"""
    done = ssh(pod[0], script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-6:] == ["active", "Time zone: Asia/Tokyo", "/swapfile", "/dev/sdb on /mnt/data", "line", "stays on"]
    root = Path(pod[0]["folder"])
    assert "line" in (root / "etc/environment").read_text() and (root / "mnt/data").is_dir()
    assert computer() == before


def test_preemption_is_announced_then_kills_the_processes_of_the_machine_only(tpu, place, weather, tmp_path):
    stubborn = f"trap '' TERM; touch {tmp_path}/stubborn; while true; do sleep 0.05; done"
    polite = f"trap 'touch {tmp_path}/polite.gone; exit' TERM; touch {tmp_path}/polite; while true; do sleep 0.05; done"
    hidden = f"setsid env -u TPUSWARM_REHEARSAL_MACHINE sleep 300 & echo $! > {tmp_path}/other"
    script = f"({stubborn}) & ({polite}) & {hidden}; wait"
    node = tpu_v2.Node(TPU, metadata={"startup-script": script})
    tpu.create_node(parent=PARENT, node_id="leaving", node=node)
    (worker,) = until(lambda: workers(place, "leaving"))
    until(lambda: all((tmp_path / name).exists() for name in ("stubborn", "polite", "other")))
    bystander = subprocess.Popen(["sleep", "300"])

    def metadata_server_has_ended():
        try:
            metadata(worker, "instance/preempted")
        except OSError:
            return True

    try:
        with slow_clock(place):
            weather("preempt", name="leaving")
            assert metadata(worker, "instance/preempted") == "TRUE"
            until(lambda: (tmp_path / "polite.gone").exists())
            assert processes.find([worker["id"]])  # the stubborn one
        until(lambda: tpu.get_node(name=f"{PARENT}/nodes/leaving").state.name == "PREEMPTED")
        until(lambda: not processes.find([worker["id"]]))
        other = int((tmp_path / "other").read_text())
        assert bystander.poll() is None and Path(f"/proc/{other}").exists()
        os.kill(other, signal.SIGKILL)
        until(metadata_server_has_ended)
    finally:
        bystander.kill()
        bystander.wait()


def test_host_accepts_connections_some_time_after_it_was_started(tmp_path):
    cloud = Cloud(tmp_path / "state", "127.9")
    changed = []
    cloud.hosts.on_change = changed.append
    cloud.timetable.speed = 0.01
    cloud.hosts.add("projects/p/locations/z/nodes/n", 0, has_external=True)
    (host,) = cloud.hosts.all()
    cloud.timetable.run_due()
    cloud.records.commit()
    assert host.on and not host.has_booted
    (event,) = cloud.records.table("event", lambda body: Event(*json.loads(body))).values()
    assert 20 <= (event.due - time.time()) * 0.01 <= 40
    cloud.hosts.turn_off(host.owner)
    cloud.hosts.boot(host.owner)  # the first boot never ends
    cloud.timetable.speed = 1e9
    changed.clear()
    until(lambda: cloud.timetable.run_due() or host.has_booted)
    assert changed == [host.id]


def test_deleted_machine_leaves_nothing(tpu, place, ready):
    made = ready(PARENT, "brief", tpu_v2.Node(TPU, metadata={"startup-script": "sleep 300"}))
    (worker,) = workers(place, "brief")
    until(lambda: processes.find([worker["id"]]))
    tpu.delete_node(name=made.name)
    until(lambda: not processes.find([worker["id"]]) and not Path(worker["folder"]).exists())
    with pytest.raises(exceptions.NotFound):
        tpu.get_guest_attributes(request={"name": made.name, "query_path": "hostkeys/"})


def test_programs_on_a_machine_find_buckets_and_devices_without_settings(tpu, place, endpoints, pod, tmp_path):
    """Google's default credentials come from the metadata server."""
    program = """
        import jax
        from tpuswarm.train.storage.bucket import Bucket
        Bucket("gs://of-a-machine").put("devices", str(jax.device_count()).encode())
    """
    storage_client(endpoints).create_bucket("of-a-machine", location="us-central1")
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    node = tpu_v2.Node(TPU, metadata={"startup-script": f"exec {sys.executable} {tmp_path}/program.py"})
    tpu.create_node(parent=PARENT, node_id="reading", node=node)
    (worker,) = until(lambda: workers(place, "reading"))
    log = Path(worker["folder"]) / "var/log/startup-script.log"
    until(lambda: log.exists() and "exit status" in log.read_text(), seconds=120)
    assert log.read_text().endswith("exit status 0\n"), log.read_text()
    assert storage_client(endpoints).bucket("of-a-machine").blob("devices").download_as_bytes() == b"8"
    send_command(place, "break", name="reading", fault="outage")  # for this machine alone
    for caller, code in {"": 200, f"~{worker['id']}": 503, f"~{pod[0]['id']}": 200}.items():
        headers = {"Authorization": f"Bearer {endpoints.token}{caller}"}
        url = f"{endpoints.http}/storage/v1/b/of-a-machine"
        assert requests.get(url, headers=headers, timeout=240).status_code == code
    send_command(place, "break", name="reading", fault="outage", mend=True)
    with pytest.raises(InputError, match="retention is a fault of a bucket, not of the machine reading"):
        send_command(place, "break", name="reading", fault="retention")

"""Machines are folders and processes: SSH by OpenSSH, start-up scripts, metadata, stand-ins, and what is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.api_core import exceptions
from google.cloud import storage, tpu_v2

from tests.cloud.rehearsal.conftest import PROJECT, TPU, until
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.machines import processes

PARENT = f"{PROJECT}/locations/europe-west4-a"
SCRIPT = "echo started as $USER on $(hostname | wc -l) computer; sudo apt-get install -y tmux; echo $XLA_FLAGS"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def pod(tpu, place, key):
    """A slice of four hosts: its workers as the local cloud shows them."""
    keys = f"old:ssh-rsa broken\nalice:{key.with_suffix('.pub').read_text()}"
    node = tpu_v2.Node(
        accelerator_type="v2-32",
        runtime_version="tpu-ubuntu2204-base",
        network_config={"enable_external_ips": True},
        metadata={"ssh-keys": keys, "startup-script": SCRIPT},
    )
    tpu.create_node(parent=PARENT, node_id="touched", node=node)
    return until(lambda: workers(place, "touched"))


def workers(place, name):
    found = next(each for each in ask(place, "status")["machines"] if each["name"] == name)
    return found["workers"] if found["state"] == "READY" else None


@pytest.fixture
def ssh(key):
    """Runs a command on a worker by OpenSSH."""

    def run(worker, *words, user="alice", options=(), given=""):
        address = worker["external"] or worker["internal"]
        loose = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        line = ["ssh", "-F", "none", "-i", key, "-p", "2222", *options, *loose, f"{user}@{address}", *words]
        return subprocess.run(line, input=given, capture_output=True, text=True, timeout=60)

    return run


def answers(ssh, worker):
    return until(lambda: ssh(worker, "true").returncode == 0)


def metadata(worker, path, **headers):
    url = f"http://{worker['internal']}:2223/computeMetadata/v1/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google", **headers})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def silent(worker):
    """Its metadata server, which ends after the machine's last process, answers no more."""
    try:
        metadata(worker, "instance/preempted")
    except OSError:
        return True
    return False


def test_each_host_is_a_machine_of_its_own(pod, ssh):
    answers(ssh, pod[3])
    seen = [ssh(worker, "pwd; echo $GCE_METADATA_HOST; cat 1>&2; exit 3", given=f"{n}") for n, worker in enumerate(pod)]
    assert [(done.returncode, done.stderr) for done in seen] == [(3, f"{n}") for n in range(4)]
    homes = [done.stdout.splitlines()[0] for done in seen]
    assert homes == [f"{worker['folder']}/home/alice" for worker in pod] and len(set(homes)) == 4
    addresses = [worker[kind] for worker in pod for kind in ("internal", "external")]
    assert len(set(addresses)) == 8 and all(each.startswith("127.") for each in addresses)


def test_only_the_keys_of_the_metadata_come_in_and_host_keys_can_be_checked(pod, ssh, tpu, tmp_path):
    answers(ssh, pod[0])
    assert "Permission denied" in ssh(pod[0], "true", user="bob").stderr
    assert "Permission denied" in ssh(pod[0], "true", options=["-o", "PubkeyAuthentication=no"]).stderr
    about = {"name": f"{PARENT}/nodes/touched", "query_path": "hostkeys/"}
    found = until(lambda: tpu.get_guest_attributes(request=about).guest_attributes)
    assert len({each.query_value.items[0].value for each in found}) == 4
    about["worker_ids"] = ["2"]
    (entry,) = tpu.get_guest_attributes(request=about).guest_attributes[0].query_value.items
    known = tmp_path / "known_hosts"
    known.write_text(f"[{pod[2]['external']}]:2222 {entry.key} {entry.value}\n")
    strict = ("-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes")
    assert ssh(pod[2], "true", options=strict).returncode == 0
    known.write_text(f"[{pod[3]['external']}]:2222 {entry.key} {entry.value}\n")
    assert "Host key verification failed" in ssh(pod[3], "true", options=strict).stderr


def test_terminals_files_and_signals_work_as_on_any_machine(pod, ssh, key, tmp_path):
    answers(ssh, pod[1])
    assert ssh(pod[1], "tty", options=["-tt"]).stdout.startswith("/dev/pts/")
    (tmp_path / "sent").write_text("text")
    common = ["-F", "none", "-q", "-i", key, "-P", "2222", "-o", "StrictHostKeyChecking=no"]
    common += ["-o", "UserKnownHostsFile=/dev/null"]
    there = f"alice@{pod[1]['external']}"
    for how in ([], ["-O"]):
        subprocess.run(["scp", *how, *common, tmp_path / "sent", f"{there}:copy"], check=True)
        subprocess.run(["scp", *how, *common, f"{there}:copy", tmp_path / "back"], check=True)
        assert (tmp_path / "back").read_text() == "text"
    assert ssh(pod[1], "kill -TERM $$").returncode == 255 and ssh(pod[1], "cat copy").stdout == "text"


def test_what_a_command_wrote_on_a_terminal_arrives_however_soon_it_ended(pod, ssh):
    answers(ssh, pod[1])
    with ThreadPoolExecutor(8) as several:
        said = several.map(lambda n: ssh(pod[1], f"echo {n} is here", options=["-tt"]).stdout, range(32))
        assert list(said) == [f"{n} is here\n" for n in range(32)]
    runs_on = ssh(pod[1], "set -m; sleep 90 & echo $!", options=["-tt"])  # a time-out of 60 s
    assert ssh(pod[1], f"kill {runs_on.stdout.split()[-1]}").returncode == 0


def test_a_command_that_ends_without_reading_its_input_says_how_it_ended(pod, ssh):
    answers(ssh, pod[1])
    with ThreadPoolExecutor(8) as several:
        seen = several.map(lambda n: ssh(pod[1], f"exit {n}", given="x" * 2**22).returncode, range(32))
        assert list(seen) == list(range(32))
    assert ssh(pod[1], "sleep 1; wc -c", given="x" * 2**23).stdout == f"{2**23}\n"  # one that begins late gets it all


def test_the_startup_script_runs_as_root_would_and_sees_its_share_of_the_chips(pod):
    log = Path(pod[2]["folder"]) / "var/log/startup-script.log"
    until(lambda: log.exists() and "exit status" in log.read_text())
    assert "started as root" in log.read_text() and "Setting up tmux" in log.read_text()
    assert "--xla_force_host_platform_device_count=8" in log.read_text()  # 4 chips of 2 cores
    assert sorted(each.name for each in (Path(pod[2]["folder"]) / "dev").iterdir()) == [f"accel{n}" for n in range(4)]


def test_the_metadata_server_says_who_and_where_one_is(pod):
    assert metadata(pod[3], "instance/attributes/agent-worker-number") == "3"
    assert "CHIPS_PER_HOST_BOUNDS: '2,2,1'" in metadata(pod[3], "instance/attributes/tpu-env")
    peers = metadata(pod[3], "instance/attributes/worker-network-endpoints").split(",")
    assert [each.split(":")[2] for each in peers] == [worker["internal"] for worker in pod]
    assert metadata(pod[3], "instance/preempted") == "FALSE"
    for headers in ({"Metadata-Flavor": "no"}, {"X-Forwarded-For": "1.2.3.4"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            metadata(pod[3], "instance/preempted", **headers)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        metadata(pod[3], "instance/attributes/no-such-key")


def test_what_would_change_the_computer_changes_the_machines_folder(pod, ssh):
    answers(ssh, pod[0])
    before = the_computer()
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
    said = done.stdout.splitlines()
    assert said[-6:] == ["active", "Time zone: Asia/Tokyo", "/swapfile", "/dev/sdb on /mnt/data", "line", "stays on"]
    root = Path(pod[0]["folder"])
    assert "line" in (root / "etc/environment").read_text() and (root / "mnt/data").is_dir()
    assert the_computer() == before


def the_computer():
    """What stand-ins keep from being changed."""
    etc = sorted((str(path), path.lstat().st_mtime_ns) for path in Path("/etc").rglob("*"))
    return etc, Path("/proc/mounts").read_text(), Path("/proc/swaps").read_text()


def test_faults_are_planted_and_mended(pod, weather):
    root = Path(pod[1]["folder"])
    lock, last = root / "tmp/libtpu_lockfile", root / "dev/accel3"
    weather("break", name="touched/1", fault="missing-device")
    weather("break", name="touched/1", fault="lock")
    assert lock.exists() and not last.exists() and not processes.find([pod[1]["id"]])
    weather("break", name="touched/1", fault="missing-device", mend=True)
    weather("break", name="touched/1", fault="lock", mend=True)
    assert not lock.exists() and last.exists()

    weather("break", name="touched/1", fault="holder")
    first = (root / "dev/accel0").stat()
    (pid,) = until(lambda: [each for each in processes.find([pod[1]["id"]]) if processes.has_open(each, first)])
    assert lock.exists()
    weather("break", name="touched/1", fault="holder", mend=True)
    until(lambda: not processes.find([pod[1]["id"]]))
    assert not lock.exists() and not processes.has_open(pid, first)


def test_a_preemption_is_announced_and_kills_in_the_end_what_carries_the_id_and_nothing_else(
    tpu, place, weather, tmp_path
):
    stubborn = f"trap '' TERM; touch {tmp_path}/stubborn; while true; do sleep 0.05; done"
    polite = f"trap 'touch {tmp_path}/polite.gone; exit' TERM; touch {tmp_path}/polite; while true; do sleep 0.05; done"
    hidden = f"setsid env -u TPUSWARM_REHEARSAL_MACHINE sleep 300 & echo $! > {tmp_path}/other"
    script = f"({stubborn}) & ({polite}) & {hidden}; wait"
    node = tpu_v2.Node(TPU, metadata={"startup-script": script})
    tpu.create_node(parent=PARENT, node_id="leaving", node=node)
    (worker,) = until(lambda: workers(place, "leaving"))
    until(lambda: all((tmp_path / name).exists() for name in ("stubborn", "polite", "other")))
    bystander = subprocess.Popen(["sleep", "300"])
    ask(place, "speed", speed=30.0)  # a second between the notice and the end
    try:
        weather("preempt", name="leaving")
        assert metadata(worker, "instance/preempted") == "TRUE"
        until(lambda: (tmp_path / "polite.gone").exists())
        assert processes.find([worker["id"]])  # the other one does not listen
        until(lambda: tpu.get_node(name=f"{PARENT}/nodes/leaving").state.name == "PREEMPTED")
        until(lambda: not processes.find([worker["id"]]))
        other = int((tmp_path / "other").read_text())
        assert bystander.poll() is None and Path(f"/proc/{other}").exists()
        os.kill(other, signal.SIGKILL)
        until(lambda: silent(worker))
    finally:
        ask(place, "speed", speed=300.0)
        bystander.kill()
        bystander.wait()


def test_a_deleted_machine_leaves_nothing(tpu, place, ready):
    made = ready(PARENT, "brief", tpu_v2.Node(TPU, metadata={"startup-script": "sleep 300"}))
    (worker,) = workers(place, "brief")
    until(lambda: processes.find([worker["id"]]))
    tpu.delete_node(name=made.name)
    until(lambda: not processes.find([worker["id"]]) and not Path(worker["folder"]).exists())
    with pytest.raises(exceptions.NotFound):
        tpu.get_guest_attributes(request={"name": made.name, "query_path": "hostkeys/"})


def test_programs_on_a_machine_find_its_buckets_and_devices_by_themselves(tpu, place, endpoints, tmp_path):
    """Google's default credentials come from the metadata server: nothing is set but the machine's environment."""
    program = """
        import jax
        from gcsfs.core import GCSFileSystem
        files = GCSFileSystem()
        files.mkdir("by-a-machine", location="us-central1")
        files.pipe_file("by-a-machine/devices", str(jax.device_count()).encode(), mode="create")
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    node = tpu_v2.Node(TPU, metadata={"startup-script": f"exec {sys.executable} {tmp_path}/program.py"})
    tpu.create_node(parent=PARENT, node_id="reading", node=node)
    (worker,) = until(lambda: workers(place, "reading"))
    log = Path(worker["folder"]) / "var/log/startup-script.log"
    until(lambda: log.exists() and "exit status" in log.read_text(), seconds=120)
    assert log.read_text().endswith("exit status 0\n"), log.read_text()
    where = {"api_endpoint": endpoints.http}
    client = storage.Client(project="p", credentials=endpoints.credentials(), client_options=where)
    assert client.bucket("by-a-machine").blob("devices").download_as_bytes() == b"8"

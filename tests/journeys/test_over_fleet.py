"""`train swarm.toml` on the local cloud: machines that come and go, a head that dies with its disk, nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.local_cloud import delete_machine, local_cloud
from tests.processes import ONE_DEVICE, PROGRAM, Forked
from tests.remote.conftest import Fleet, swarm_toml
from tpuswarm.cloud.rehearsal.connect import send_command

POOLS = "one v5e-1 us-central1-a 1", "slice v5p-16 us-central1-a 1"
FILE = (
    swarm_toml("duo", "us-central1", *POOLS)
    + """
[head]
type = "n2-highmem-8"
zone = "us-central1-f"
network = "tpuswarm-duo"
listen = true

[[grant]]
type = "v5e-1"
zone = "us-central1-a"
how = "spot"
count = 8

[setup]
python = "3.12"

[train]
recipe = "gpt2-tiny"
options = { layers = 2, width = 64, heads = 2, context = 32 }
data = "fake"
batch = 8
cycle = 8
steps = 1000000
"""
)
URL = "gs://rehearsal-duo/runs/duo"
PATIENCE = 420.0

pytestmark = pytest.mark.long


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    with local_cloud(tmp_path / "cloud") as place:
        yield Fleet(tmp_path, place)


def read_status(fleet: Fleet) -> dict:
    process = fleet.start("status", URL, "--json")
    out, _ = process.communicate()
    return json.loads(out) if process.returncode == 0 else {}


def until(fleet: Fleet, condition, what: str) -> dict:
    end = time.monotonic() + PATIENCE
    while not condition(seen := read_status(fleet)):
        if time.monotonic() > end:
            printed = [fleet.run(*words)[0] for words in (["jobs"], ["list"])]
            logs = [
                fleet.start("logs", job).communicate()[0][-3000:] for job in ("head", "members-one", "members-slice")
            ]
            raise AssertionError("\n".join([what, str(seen), *printed, *logs]))
        time.sleep(5.0)  # a status costs a second of processor time
    return seen


def alive(seen: dict) -> set[str]:
    return {item["id"] for item in seen.get("members", ()) if item["state"] == "alive"}


def machine(fleet: Fleet, pool: str) -> str:
    shown = json.loads(fleet.run("list", "--json")[0])["machines"]
    (name,) = [row["name"] for row in shown if row["pool"] == pool]
    return name


def test_model_is_trained_over_machines_that_come_and_go(fleet):
    fleet.run("init", "--yes")
    out, err = fleet.run("train", "swarm.toml", "--yes", "--paid", "--detach")
    assert "then: the head runs on head" in out and f"tpuswarm status {URL}" in out, out + err
    first = until(fleet, lambda seen: (seen.get("version") or 0) >= 2 and len(alive(seen)) == 2, "both train")
    one, slice_ = machine(fleet, "one"), machine(fleet, "slice")
    assert alive(first) == {f"j-{one}", f"j-{slice_}"}

    assert {machine["kind"] for machine in first["machines"]} == {"training", "head"} and first["dollars"] > 0
    assert int(first["address"].rpartition(":")[2]) in range(24_000, 32_768), "Ray's ports are the machine's own"
    secret = secrets_of(fleet)
    assert len(set(secret.values())) == 1 and len(secret) == 4

    invite_of = ["python", "-m", "tpuswarm", "invite", URL, "ada"]
    (invite,) = re.findall(r"tps1-\S+", fleet.run("exec", machine(fleet, "head"), "--", *invite_of)[0])
    assert f"tpuswarm invite {URL}" in " ".join(fleet.run("invite", URL, code=2)[1].split())
    guest = Forked(
        [PROGRAM, "join", invite, "--name", "home"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ONE_DEVICE, "TPUSWARM_CACHE": str(fleet.folder / "home")},
    )  # fmt: skip
    until(fleet, lambda seen: "ada-home" in alive(seen), "a member has come from anywhere")
    guest.send_signal(signal.SIGINT)
    assert guest.communicate()[1].splitlines()[-1] == "left" and guest.returncode == 0
    until(fleet, lambda seen: "ada-home" not in alive(seen), "it has left")

    for name in (one, slice_):
        send_command(fleet.place, "preempt", name=name, ending="preempted")
        until(fleet, lambda seen, name=name: f"j-{name}" not in alive(seen), f"{name} is lost")
        until(fleet, lambda seen, name=name: f"j-{name}" in alive(seen), f"{name} is back as the same member")
    lives = incarnation(read_status(fleet), one)
    send_command(fleet.place, "maintenance", name=one)
    until(fleet, lambda seen: incarnation(seen, one) not in (lives, None), "it is back after a maintenance")
    assert set(secrets_of(fleet).values()) == set(secret.values()), "as long as the head lives"

    send_command(fleet.place, "stockout", zone="us-central1-a")
    for name in (one, slice_):
        send_command(fleet.place, "preempt", name=name, ending="preempted")
    waits = until(fleet, is_waiting_for_both, "it waits for machines, and says so")
    assert [machine["machine"] for machine in waits["machines"] if machine["kind"] == "head"] and waits["dollars"] > 0
    send_command(fleet.place, "stockout", zone="us-central1-a", over=True)
    until(fleet, lambda seen: {f"j-{one}", f"j-{slice_}"} <= alive(seen), "both are back")

    before = read_status(fleet)
    delete_machine(fleet.place, machine(fleet, "head"))  # with its disk
    after = until(fleet, lambda seen: (seen.get("epoch") or 0) > before["epoch"], "another head continues")
    after = until(fleet, lambda seen: (seen.get("version") or 0) > after["version"] + 1, "it commits")
    assert after["tokens"]["applied"] > before["tokens"]["applied"]
    until(fleet, lambda seen: {f"j-{one}", f"j-{slice_}"} <= alive(seen), "both have found the new head")
    drawn = secrets_of(fleet)
    assert len(drawn) == 4 and len(set(drawn.values())) == 1 and not set(drawn.values()) & set(secret.values())

    shutil.rmtree(fleet.folder / "state")  # another laptop
    out, _ = fleet.run("train", "swarm.toml", "--yes", "--detach")
    assert "no machine needs a change" in out
    seen = read_status(fleet)
    assert seen["loss"] < first["loss"]

    out, err = fleet.run("stop", URL)
    jobs = json.loads(fleet.run("jobs", "--json")[0])["jobs"]
    assert all(seat["phase"] in ("done", "stopped") for job in jobs for seat in job["seats"]), out + err + str(jobs)
    assert not any("ray" in command for command in machine_commands(fleet)), "nothing is left training"
    fleet.run("train", "swarm.toml", "--yes", "--detach")
    until(fleet, lambda now: (now.get("version") or 0) > seen["version"] and len(alive(now)) == 2, "it goes on")
    last = secrets_of(fleet)

    for found in {*secret.values(), *drawn.values(), *last.values()}:
        assert not leaks(fleet, found)
    fleet.run("down", "--yes")
    end = time.monotonic() + PATIENCE  # deleted machines take a moment to end their processes
    while remaining := [command for command in machine_commands(fleet) if "ray" in command]:
        assert time.monotonic() < end, remaining
        time.sleep(0.5)
    out, _ = fleet.run("ledger", "verify", URL)
    assert "is sound" in out


def is_waiting_for_both(seen: dict) -> bool:
    """Return whether both pools have no machine, and status says since when they wait."""
    missing = [
        machine for machine in seen["machines"] if machine["kind"] == "missing" and "no capacity" in machine["why"]
    ]
    return not alive(seen) and {item["pool"] for item in missing} == {"one", "slice"}


def secrets_of(fleet: Fleet) -> dict[str, str]:
    found = list(fleet.place.machines.glob("*/**/.tpuswarm/swarm-token"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)
    return {str(path): path.read_text() for path in found}


def leaks(fleet: Fleet, secret: str) -> list[str]:
    """Return files of the cloud, its bucket and the laptop, and command lines, that contain a secret."""
    text, machines = secret.encode(), fleet.place.machines
    found = []
    for path in fleet.folder.rglob("*"):
        with suppress(FileNotFoundError):  # an object of the bucket that was deleted meanwhile
            if not path.is_relative_to(machines) and path.is_file() and text in path.read_bytes():
                found.append(str(path))
    return found + [command for command in machine_commands(fleet) if secret in command]


def incarnation(seen: dict, name: str) -> str | None:
    (found,) = [member for member in seen["members"] if member["id"] == f"j-{name}"]
    return found["incarnation"] if found["state"] == "alive" else None


def machine_commands(fleet: Fleet) -> list[str]:
    mark = f"TPUSWARM_REHEARSAL={fleet.place.path}".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [item for item in found if item and str(os.getpid()) not in item]

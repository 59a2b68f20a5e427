"""A fleet on the local cloud: up, preemptions, keepers that are killed, down, nothing left."""

import json
import random
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.local_cloud import use_local_cloud
from tests.processes import PATIENCE, PROGRAM
from tests.waiting import until
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.errors import TpuswarmError

pytestmark = pytest.mark.slow
FILE = """\
name = "trio"
provider = "rehearsal"

[storage]
bucket = "rehearsal-trio"
region = "us-central1"

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f", "us-central1-b"]
count = 2
network = "tpuswarm-trio"

[[pool]]
name = "slice"
type = "v5e-16"
zones = ["us-central1-a"]
count = 2
network = "tpuswarm-trio"

[[pool]]
name = "line"
type = "v3-8"
zones = ["us-central1-a", "us-central1-b"]
count = 2
how = "queued"
network = "tpuswarm-trio"

[[grant]]
type = "v2-8"
zone = "us-central1-f"
how = "spot"
count = 100
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    with use_local_cloud(tmp_path, monkeypatch, 60.0) as found:
        yield found


def run(line: str) -> str:
    """Run a command, which has to succeed; return what it prints."""
    done = subprocess.run([PROGRAM, *shlex.split(line)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"tpuswarm {line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def keep(name: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a keeper; return it and its log."""
    path = Path(f"{name}.log")
    with path.open("wb") as log:
        return subprocess.Popen([PROGRAM, "keep"], stdout=log, stderr=log), path


def machines(place: Place) -> list[dict]:
    return ask(place, "status")["machines"]


def all_ready(found: list[dict]) -> bool:
    return len(found) == 6 and all(item["state"] == "READY" for item in found)


def test_fleet_survives_preemptions_and_killed_keepers(place, tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    chance = random.Random(7)
    run("init --yes")
    run("up --yes --paid")
    assert all_ready(machines(place))
    assert {machine["type"]: len(machine["workers"]) for machine in machines(place)}["v5litepod-16"] > 1

    for number in range(5):  # each keeper finds some machines gone, and is killed at a random moment
        there = machines(place)
        for item in chance.sample(there, min(2, len(there))):
            with suppress(TpuswarmError):  # it may be gone already
                ask(place, "preempt", name=item["name"], ending=chance.choice(["preempted", "terminated", "gone"]))
        keeper, log = keep(f"killed-{number}")
        until(lambda log=log: log.stat().st_size, shown=lambda: machines(place))  # it has acted, or seen a change
        time.sleep(chance.uniform(0.0, 1.5))
        keeper.send_signal(signal.SIGKILL)
        assert keeper.wait() == -signal.SIGKILL, log.read_text()
    keeper, log = keep("last")
    until(lambda: all_ready(machines(place)), shown=lambda: f"{machines(place)}\n{log.read_text()}")
    shown = json.loads(run("list --json"))
    assert len(shown["machines"]) == 6 and sum(machine["preemptions"] for machine in shown["machines"]) >= 1

    assert "nothing that carries the id trio-" in run("down --yes")
    assert keeper.wait(PATIENCE) == 0  # without a fleet there is nothing to keep
    status = ask(place, "status")
    assert status["machines"] == [] and status["requests"] == [], status

"""`tpuswarm demo --cloud`: a local cloud preempts machines and loses the head, and the model trains on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tpuswarm.cli.console import make_console
from tpuswarm.cli.demo.folder import prepare_folder
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.spec.file import read_swarm
from tpuswarm.fleet.store.fleets import end_background_keeper, find_fleet, fleet_of_file
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import EVENTS, read_rows_back
from tpuswarm.train.storage.copy import download_run
from tpuswarm.watch.state import State

FOLDER = Path("runs/demo-cloud")
CLOCK_FACTOR = 300
"""Fast enough that the cloud creates and preempts machines within a second."""
STEP_TIMEOUT_S = 900.0
POLL_INTERVAL_S = 1.0
FILE = """\
name = "demo"
provider = "rehearsal"

[storage]
bucket = "rehearsal-demo"
region = "us-central1"

[head]
type = "n2-highmem-8"
zone = "us-central1-f"
network = "tpuswarm-demo"

[[pool]]
name = "one"
type = "v5e-1"
zones = ["us-central1-a"]
count = 1
network = "tpuswarm-demo"

[[pool]]
name = "slice"
type = "v5p-16"
zones = ["us-central1-a"]
count = 1
network = "tpuswarm-demo"

[train]
recipe = "gpt2-tiny"
options = { layers = 2, width = 64, heads = 2, context = 32, lr = 3e-3 }
batch = 8
cycle = 4
steps = 1000000
"""


def demo_cloud() -> None:
    """Run the demo and print its commands. Raises RunFailed if a step takes too long."""
    prepare_folder(FOLDER)
    (FOLDER / "swarm.toml").write_text(FILE)
    start = time.monotonic()
    echo(
        "Two machines of a local cloud, one of them a slice of two hosts, train one model; their head is a third.\n"
        "Then one of them is preempted, and the head is deleted with its disk. Three to four minutes.",
        err=True,
    )
    demo = CloudDemo(FOLDER.absolute())
    try:
        demo.run("rehearsal", "start", "--speed", str(CLOCK_FACTOR), shows=False)
        demo.run("init", "--yes", shows=False)
        demo.run("train", "swarm.toml", "--yes", "--paid", "--detach")
        first = demo.wait_until("both train", lambda state: version_of(state) >= 2 and len(training(state)) == 2)
        victim = next(name for name in training(first) if "v5e" in name)
        demo.run("rehearsal", "preempt", victim)
        before = demo.wait_until(f"{victim} is lost", lambda state: victim not in training(state))
        demo.delete("demo-head")
        demo.wait_until(
            f"another head commits, and {victim} is back as the same member",
            lambda state: commit_epoch(download_run(demo.url)) > epoch_of(before) and victim in training(state),
        )
        demo.run("stop", demo.url)
        demo.run("ledger", "verify", demo.url)
    finally:
        demo.run("down", "--yes", check=False)
        demo.run("rehearsal", "stop", check=False, shows=False)
        end_background_keeper(fleet_of_file(read_swarm(Path("swarm.toml"))))  # `down` may not have come so far
    echo(f"done in {time.monotonic() - start:.0f} s; the fleet's file is {FOLDER}/swarm.toml")


class CloudDemo:
    """Runs commands in the demo's folder as a user would, with a home and a local cloud of their own."""

    def __init__(self, folder: Path):
        self.url = "gs://rehearsal-demo/runs/demo"
        self._console = make_console()
        environment = {
            FOLDER_VARIABLE: str(folder / "cloud"),
            "XDG_STATE_HOME": str(folder / "state"),
            "HOME": str(folder),
        }
        environment["TPUSWARM_CACHE"] = str(folder / "cache")  # not the copy of an earlier demo's run
        os.environ |= environment  # this process reads the run too
        os.chdir(folder)

    def run(self, *words: str, check: bool = True, shows: bool = True) -> None:
        """Run a command to its end. Its output is shown at once, or only if it fails."""
        echo(f"\n$ tpuswarm {' '.join(words)}")
        sys.stdout.flush()
        pipe = None if shows else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, "-m", "tpuswarm", *words], stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode and check:
            raise RunFailed(f"tpuswarm {' '.join(words)} ended with {done.returncode}: {done.stdout or 'see above'}")

    def read_state(self) -> State:
        """Read the training, without the time to its end: the demo stops it long before."""
        training = find_fleet_training(self.url)
        assert training is not None
        state = training.read()
        if state.swarm is None:
            return state
        return state._replace(run=replace(state.swarm, status=replace(state.swarm.status, left=None)))

    def wait_until(self, goal: str, is_reached: Callable[[State], bool]) -> State:
        """Draw the training until it reaches a state."""
        from tpuswarm.train.process.live_region import LiveRegion

        echo(f"\nwaiting until {goal}")
        end = time.monotonic() + STEP_TIMEOUT_S
        with LiveRegion(console=self._console, auto_refresh=False) as live:
            while not is_reached(state := self.read_state()):
                if time.monotonic() > end:
                    raise RunFailed(f"{goal}: not within {STEP_TIMEOUT_S:.0f} s")
                if self._console.is_terminal:
                    live.update(state.draw(self._console.width, self._console.height - 2), refresh=True)
                time.sleep(POLL_INTERVAL_S)
            live.update(state.draw(self._console.width, self._console.height - 2), refresh=True)
        return state

    def delete(self, name: str) -> None:
        """Delete a machine with its disk behind tpuswarm's back, as somebody in the console might."""
        echo(f"\n{name} is deleted in the console, with its disk")
        cloud = find_fleet(None)[0].provider()
        (machine,) = [machine for machine in self.read_state().there if machine.name == name]
        cloud.delete(machine)


def training(state: State) -> list[str]:
    """Return the machines whose members train."""
    members = state.swarm.status.members if state.swarm else ()
    return [member.id.removeprefix("j-") for member in members if member.is_alive]


def version_of(state: State) -> int:
    """Return the newest version; 0 before the first."""
    return (state.swarm.status.version or 0) if state.swarm else 0


def epoch_of(state: State) -> int:
    """Return the epoch of the head; 0 before the first."""
    return (state.swarm.status.epoch or 0) if state.swarm else 0


def commit_epoch(run: Path) -> int:
    """Return the epoch of a run's newest commit, 0 before the first: a head that only leads has no commit yet."""
    commits = (row for row in read_rows_back(run / EVENTS, b'"commit"') if row["event"] == "commit")
    return int(next(commits, {"epoch": 0})["epoch"])

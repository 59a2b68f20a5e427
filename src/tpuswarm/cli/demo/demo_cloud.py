"""`tpuswarm demo --cloud`: one model over machines of a local cloud that come and go, and a head that dies."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.watch.state import State

FOLDER = Path("runs/demo-cloud")
SPEED = 300
"""Of the cloud's clock: a machine comes within a second, and is taken away as fast."""
PATIENCE = 300.0
"""Seconds for each thing that is waited for."""
LOOK = 1.0
MARK = ".demo-cloud"
"""The file that says that a folder is a demo's, which the next one may replace."""
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
    """All of it, with its commands on the screen. Raises RunFailed for what does not come."""
    _make_room()
    began = time.monotonic()
    say(
        "Two machines of a local cloud, one of them a slice of two hosts, train one model; their head is a third.\n"
        "Then one of them is preempted, and the head is deleted with its disk. About four minutes.",
        err=True,
    )
    here = Here(FOLDER.absolute())
    try:
        here.run("rehearsal", "start", "--speed", str(SPEED), shows=False)
        here.run("init", "--yes", shows=False)
        here.run("train", "swarm.toml", "--yes", "--paid", "--detach")
        first = here.until("both train", lambda seen: version_of(seen) >= 2 and len(training(seen)) == 2)
        victim = next(each for each in training(first) if "v5e" in each)
        here.run("rehearsal", "preempt", victim)
        here.until(f"{victim} is lost", lambda seen: victim not in training(seen))
        here.until(f"{victim} is back, as the same member", lambda seen: victim in training(seen))
        before = here.see()
        here.delete("demo-head")
        here.until("another head goes on", lambda seen: epoch_of(seen) > epoch_of(before))
        here.until("it commits what a member has trained", lambda seen: version_of(seen) > version_of(before))
        here.run("stop", here.url)
        here.run("ledger", "verify", here.url)
    finally:
        here.run("down", "--yes", check=False)
        here.run("rehearsal", "stop", check=False, shows=False)
    say(f"{time.monotonic() - began:.0f} s; {FOLDER}/swarm.toml is what was trained with")


def _make_room() -> None:
    if FOLDER.exists() and not (FOLDER / MARK).exists():
        raise InputError(f"{FOLDER} is not a demo's, which would replace it: rename it, or use another folder")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / MARK).touch()
    (FOLDER / "swarm.toml").write_text(FILE)


class Here:
    """The folder of the demo: commands run in it as a person's would, with a home and a cloud of its own."""

    def __init__(self, folder: Path):
        from tpuswarm.cli.console import make_console
        from tpuswarm.cloud.rehearsal.place import VARIABLE

        self.url = "gs://rehearsal-demo/runs/demo"
        self._console, self._seen = make_console(), ""
        own = {VARIABLE: str(folder / "cloud"), "XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)}
        own["TPUSWARM_CACHE"] = str(folder / "cache")  # a copy of an earlier demo's run would be taken for this one's
        os.environ |= own  # for what looks on from this process, too
        os.chdir(folder)

    def run(self, *words: str, check: bool = True, shows: bool = True) -> None:
        """A command, to its end; what it prints is on the screen, or shown where it fails."""
        say(f"\n$ tpuswarm {' '.join(words)}")
        sys.stdout.flush()
        pipe = None if shows else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, "-m", "tpuswarm", *words], stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode and check:
            raise RunFailed(f"tpuswarm {' '.join(words)} ended with {done.returncode}: {done.stdout or 'see above'}")

    def see(self) -> "State":
        """The picture as it is now."""
        from tpuswarm.cli.fleet.training_view import training_here

        training = training_here(self.url)
        assert training is not None
        return training.see()

    def until(self, what: str, condition: "Callable[[State], bool]") -> "State":
        """Draw the picture until then."""
        from tpuswarm.train.process.drawn import Drawn

        say(f"\nwaiting until {what}")
        end = time.monotonic() + PATIENCE
        with Drawn(console=self._console, auto_refresh=False) as live:
            while not condition(seen := self.see()):
                if time.monotonic() > end:
                    raise RunFailed(f"{what}: not within {PATIENCE:.0f} s")
                if self._console.is_terminal:
                    live.update(seen.draw(self._console.width, self._console.height - 2), refresh=True)
                time.sleep(LOOK)
            live.update(seen.draw(self._console.width, self._console.height - 2), refresh=True)
        return seen

    def delete(self, name: str) -> None:
        """As somebody in the console would: with its disk."""
        from tpuswarm.fleet.store.fleets import find_fleet

        say(f"\n{name} is deleted in the console, with its disk")
        cloud = find_fleet(None)[0].provider()
        (machine,) = [each for each in self.see().there if each.name == name]
        cloud.delete(machine)


def training(seen: "State") -> list[str]:
    """Machines whose member trains."""
    members = seen.swarm.status.members if seen.swarm else ()
    return [each.id.removeprefix("j-") for each in members if each.lives]


def version_of(seen: "State") -> int:
    """The newest; 0 before the first."""
    return (seen.swarm.status.version or 0) if seen.swarm else 0


def epoch_of(seen: "State") -> int:
    """Of its head; 0 before the first."""
    return (seen.swarm.status.epoch or 0) if seen.swarm else 0

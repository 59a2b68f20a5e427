"""One model over machines of the local cloud: until it commits, after a preemption, after a head's death; its goodput.

Limits: the first version of gpt2-tiny within 60 s of `train swarm.toml` on ready machines; a preempted member
contributes within 45 s of its machine being back; commits within 60 s of the death of a head with its disk, another
keeper living; 95% of what is trained counts with a preemption a minute. What the machines take to come is the cloud's.
"""

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.chaos import SMALL
from benchmarks.goodput import measure
from benchmarks.report import Settings, Table, verdict
from tpuswarm.cli.demo.demo_cloud import CLOCK_FACTOR, FILE, CloudDemo, epoch_of, training, version_of
from tpuswarm.train.run.directory import EVENTS, read_rows
from tpuswarm.train.storage.copy import bring
from tpuswarm.watch.state import State

FIRST_S, BACK_S, HEAD_S, GOODPUT = 60.0, 45.0, 60.0, 0.95
MINUTES = 20.0
LOCAL = (
    "gpt2-tiny", *SMALL, "--lr", "3e-3", "--batch", "8", "--cycle", "4", "--steps", "1000000", "--members", "2",
)  # fmt: skip
"""The `[train]` of the demo's file, with local processes."""


def run(settings: Settings) -> Iterable[Table]:
    """In a folder, a home and a cloud of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), Path.cwd()
        (folder / "swarm.toml").write_text(FILE)
        environment = dict(os.environ)
        here = CloudDemo(folder)
        try:
            here.run("rehearsal", "start", "--speed", str(CLOCK_FACTOR), shows=False)
            here.run("init", "--yes", shows=False)
            yield _times(here)
            yield _goodput(here, 2.0 if settings.quick else MINUTES)
        finally:
            here.run("down", "--yes", check=False, shows=False)
            here.run("rehearsal", "stop", check=False, shows=False)
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)


def _times(here: CloudDemo) -> Table:
    here.run("up", "--yes", "--paid", "--keep", shows=False)
    began = time.time()
    here.run("train", "swarm.toml", "--yes", "--paid", "--detach", shows=False)
    here.wait_until("the first version", lambda seen: version_of(seen) >= 1)
    first = next(commit["time"] for commit in _events(here, "commit")) - began
    all_ = here.wait_until("all train", lambda seen: len(training(seen)) == 2)
    victim = next(each for each in training(all_) if "v5e" in each)
    back = _back(here, victim)
    lost = _lost_with_notice(here, victim)
    before = here.read_state()
    here.delete("demo-head")
    died = time.time()
    here.wait_until("another head", lambda seen: epoch_of(seen) > epoch_of(before))
    here.wait_until("a commit", lambda seen: version_of(seen) > version_of(before))
    head = next(each["time"] for each in _events(here, "commit") if each["epoch"] > epoch_of(before)) - died
    rows = [
        ("`train swarm.toml` on ready machines to version 1", f"{first:.0f} s", f"at most {FIRST_S:.0f} s",
         verdict(first <= FIRST_S)),
        ("a machine is back after a preemption to its member's contribution", f"{back:.0f} s",
         f"at most {BACK_S:.0f} s", verdict(back <= BACK_S)),
        ("a head is deleted with its disk to the next commit", f"{head:.0f} s", f"at most {HEAD_S:.0f} s",
         verdict(head <= HEAD_S)),
        ("what a preemption costs that is announced as Google announces it, 30 s before", f"{lost} tokens", "0 tokens",
         verdict(lost == 0)),
    ]  # fmt: skip
    notes = [
        "A head, a v5e-1 and a v5p-16 of two hosts, all on this machine; gpt2-tiny of two layers; times are those of "
        "the run's own events."
    ]
    return Table("One model over a fleet", ("what", "measured", "limit", "verdict"), rows, notes)


def _back(here: CloudDemo, victim: str) -> float:
    """Seconds from a machine's return until its member has a version of its own work."""
    here.run("rehearsal", "preempt", victim, shows=False)
    here.wait_until("it is gone", lambda seen: victim not in training(seen))
    here.wait_until("its machine is back", lambda seen: any(each.name == victim and each.state == "ready"
                                                       for each in seen.there))  # fmt: skip
    began = time.time()
    here.wait_until("its member trains", lambda seen: victim in training(seen))
    here.wait_until("it has contributed", lambda seen: bool(_contributions(here, victim, began)))
    return _contributions(here, victim, began)[0] - began


def _lost_with_notice(here: CloudDemo, victim: str) -> int:
    """Tokens lost by a preemption whose notice lasts as long as on a real machine; then its member is back."""
    _, before = here.wait_until("it trains again", lambda seen: victim in training(seen)), time.time()
    here.run("rehearsal", "start", "--speed", "1", shows=False)
    here.run("rehearsal", "preempt", victim, shows=False)
    here.wait_until("its member goes", lambda seen: victim not in training(seen))
    here.run("rehearsal", "start", "--speed", str(CLOCK_FACTOR), shows=False)
    here.wait_until("it trains again", lambda seen: victim in training(seen))
    return sum(each["tokens"] for each in _events(here, "lost") if each["time"] > before)


def _contributions(here: CloudDemo, machine: str, after: float) -> list[float]:
    """When commits came that have work of a machine's member, of its lives that began after a time."""
    joined = [each for each in _events(here, "joined") if each["time"] > after]
    lives = {each["incarnation"] for each in joined if each["member"].endswith(machine)}
    commits = _events(here, "commit")
    return [each["time"] for each in commits if lives & {one["incarnation"] for one in each["contributors"]}]


def _events(here: CloudDemo, kind: str) -> list[dict[str, Any]]:
    """What the run itself says and when; a look at its picture comes up to some seconds later."""
    return [each for each in read_rows(bring(here.url) / EVENTS) if each["event"] == kind]


def _goodput(here: CloudDemo, minutes: float) -> Table:
    first = here.wait_until("all train", lambda seen: len(training(seen)) == 2)
    began, preempted = time.monotonic(), 0
    while time.monotonic() - began < 60 * minutes:
        alive = training(here.read_state())
        if alive:
            here.run("rehearsal", "preempt", alive[preempted % len(alive)], check=False, shows=False)
            preempted += 1
        time.sleep(max(0.0, 60 * preempted - (time.monotonic() - began)))
    last = here.read_state()
    (settled, counted), (settled_before, counted_before) = _books(last), _books(first)
    share = (counted - counted_before) / max(1, settled - settled_before)
    here.run("stop", here.url, shows=False)
    here.run("ledger", "verify", here.url, shows=False)
    fleet = (
        "over machines, one preempted a minute", f"{minutes:.0f}", f"{preempted}",
        f"{version_of(last) - version_of(first)}", f"{share:.1%}", f"at least {GOODPUT:.0%}",
        verdict(share >= GOODPUT),
    )  # fmt: skip
    here.run("down", "--yes", shows=False)
    local = measure(60 * minutes, 60, "m", LOCAL)
    beside = (
        "local processes, one killed a minute", f"{local.took / 60:.0f}", f"{len(local.kills)}", f"{local.newest}",
        f"{local.goodput:.1%}", "", "" if not local.problems else local.problems[0],
    )  # fmt: skip
    columns = ("swarm", "minutes", "losses", "commits", "goodput", "limit", "verdict")
    notes = ["Both ledgers verify at the end. Two members: a v5e-1 and a v5p-16 of two hosts, or two processes."]
    return Table("Goodput with a loss a minute", columns, [fleet, beside], notes)


def _books(seen: State) -> tuple[int, int]:
    """Tokens that are settled, and those of them that count."""
    assert seen.swarm is not None
    tokens = seen.swarm.status.tokens
    return tokens.processed - tokens.outstanding, tokens.applied

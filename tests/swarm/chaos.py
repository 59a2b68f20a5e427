"""A swarm of real processes on this machine, and what kills them at random: for the slow test, the soak and goodput."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "32")
"""Of gpt2-tiny: a step of some milliseconds, so that commits are many and losses are seen."""

PATIENCE = 240.0
"""Seconds until something that is waited for will not come any more."""


@dataclass
class Swarm:
    """`tpuswarm train` as a process of its own, seen from outside as a user sees it."""

    run: Path
    arguments: Sequence[str]
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self) -> None:
        """Start it, or go on with it."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tpuswarm", "train", *self.arguments, "--run", str(self.run)]
        with (self.run.parent / f"{self.run.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> dict[str, Any]:
        """status.json; empty before there is one."""
        try:
            return json.loads((self.run / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What happened, of one kind."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def pids(self) -> dict[str, int]:
        """Of everything that may be killed."""
        status = self.status()
        members = {each["id"]: each["pid"] for each in status.get("members", []) if each["state"] == "alive"}
        return members | status.get("processes", {})

    def wait(self, until: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """What `until` gives, once it is true; raises where the process or the patience ends before."""
        end = time.monotonic() + seconds
        while not (found := until()):
            if self.process.poll() is not None or time.monotonic() > end:
                said = (self.run.parent / f"{self.run.name}.log").read_text()[-3000:]
                raise RuntimeError(f"waited in vain, exit status {self.process.poll()}:\n{said}")
            time.sleep(0.1)
        return found

    def end(self) -> None:
        """Ctrl-C, and the end of it all."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


@dataclass(frozen=True)
class Kill:
    """One kill -9."""

    name: str
    at: float
    """Seconds since the beginning."""
    back: float
    """Seconds until the same name was alive as another process."""


def torment(
    swarm: Swarm, rnd: random.Random, seconds: float, pause: Callable[[], float], names: str, stopped: float = 0.0
) -> list[Kill]:
    """Kill processes whose names begin with one of the letters in `names`, for so long; wait until all are back.

    pause: seconds from one kill to the next, drawn anew each time; stopped: share of the blows that only stop a process
    for a minute. What is not back yet is not killed again.
    """
    began, kills, away = time.monotonic(), [], dict[str, tuple[int, float]]()
    standing: dict[str, int] = {}
    due = began + pause()

    def over() -> bool:
        nonlocal due
        now, there = time.monotonic(), swarm.pids()
        for name, (pid, at) in list(away.items()):
            if there.get(name, pid) != pid:
                del away[name]
                kills.append(Kill(name, at - began, now - at))
                standing.pop(name, None)
            elif name in standing and now - at > 60.0:
                del away[name]
                with suppress(ProcessLookupError):
                    os.kill(standing.pop(name), signal.SIGCONT)
        if now - began >= seconds:
            return not away
        found = sorted(name for name in there.keys() - away.keys() if name[0] in names)
        if now >= due and found:
            name = rnd.choice(found)
            with suppress(ProcessLookupError):  # the status may be older than the end of a process
                if rnd.random() < stopped:
                    os.kill(there[name], signal.SIGSTOP)
                    standing[name] = there[name]
                else:
                    os.kill(there[name], signal.SIGKILL)
                away[name], due = (there[name], now), now + pause()
        return False

    swarm.wait(over, seconds + PATIENCE)
    return sorted(kills, key=lambda kill: kill.at)

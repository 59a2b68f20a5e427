"""A swarm of real processes on this machine, and random kills of its processes."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import ONE_DEVICE, PROGRAM, Forked

SMALL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "32")
"""Options of gpt2-tiny for steps of some milliseconds and many commits."""

WAIT_TIMEOUT_S = 240.0


@dataclass
class Swarm:
    """`tpuswarm train` as a separate process, seen from outside."""

    run: Path
    arguments: Sequence[str]
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self) -> None:
        """Start or resume it."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        command, environment = [PROGRAM, "train", *self.arguments, "--run", str(self.run)], {**os.environ, **ONE_DEVICE}
        with (self.run.parent / f"{self.run.name}.log").open("ab") as log:
            self.process = Forked(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def status(self) -> dict[str, Any]:
        """Return status.json; empty before it exists."""
        try:
            return json.loads((self.run / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def pids(self) -> dict[str, int]:
        """Return the processes that may be killed, by name."""
        status = self.status()
        members = {row["id"]: row["pid"] for row in status.get("members", []) if row["state"] == "alive"}
        return members | status.get("processes", {})

    def wait(self, until: Callable[[], Any], seconds: float = WAIT_TIMEOUT_S) -> Any:
        """Wait for a true result of `until` and return it. Raises RuntimeError if process or time ends first."""
        end = time.monotonic() + seconds
        while not (result := until()):
            if self.process.poll() is not None or time.monotonic() > end:
                log = (self.run.parent / f"{self.run.name}.log").read_text()[-3000:]
                raise RuntimeError(f"waited in vain, exit status {self.process.poll()}:\n{log}")
            time.sleep(0.1)
        return result

    def end(self) -> None:
        """Stop it with Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


@dataclass(frozen=True)
class Kill:
    """One kill -9. at: seconds since the start; back: seconds until another process had the name."""

    name: str
    at: float
    back: float


def torment(
    swarm: Swarm, rnd: random.Random, seconds: float, pause: Callable[[], float], names: str, stopped: float = 0.0
) -> list[Kill]:
    """Kill processes whose names begin with a letter in `names`, for some seconds; wait until all are back.

    pause: draws the seconds to the next kill; stopped: the share of kills that only stop a process for a minute. A
    process that is not back is not killed again.
    """
    start, kills, away = time.monotonic(), [], dict[str, tuple[int, float]]()
    standing: dict[str, int] = {}
    due = start + pause()

    def is_over() -> bool:
        nonlocal due
        now, pids = time.monotonic(), swarm.pids()
        for name, (pid, at) in list(away.items()):
            if pids.get(name, pid) != pid:
                del away[name]
                kills.append(Kill(name, at - start, now - at))
                standing.pop(name, None)
            elif name in standing and now - at > 60.0:
                del away[name]
                with suppress(ProcessLookupError):
                    os.kill(standing.pop(name), signal.SIGCONT)
        if now - start >= seconds:
            return not away
        candidates = sorted(name for name in pids.keys() - away.keys() if name[0] in names)
        if now >= due and candidates:
            name = rnd.choice(candidates)
            with suppress(ProcessLookupError):  # the status may be out of date
                if rnd.random() < stopped:
                    os.kill(pids[name], signal.SIGSTOP)
                    standing[name] = pids[name]
                else:
                    os.kill(pids[name], signal.SIGKILL)
                away[name], due = (pids[name], now), now + pause()
        return False

    swarm.wait(is_over, seconds + WAIT_TIMEOUT_S)
    return sorted(kills, key=lambda kill: kill.at)

"""Fake runs, of any size, with the files of real ones: a swarm's, and a plain one."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.views.status import MemberStatus, SwarmStatus, write_status
from tpuswarm.train.look.pictures import write_picture
from tpuswarm.train.run.directory import CONFIG, EVENTS, METRICS, append_event, append_rows
from tpuswarm.train.storage.folders import LOCK

CYCLE_TOKENS = 1000
"""Tokens of one contribution."""
START_TIME = 1_700_000_000.0
CYCLE_S = 30.0
"""Time between versions."""


def make_plain_run(folder: Path, steps: int) -> Path:
    """Write a finished plain run with everything that a page or a report can show."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(
        f'[recipe]\nname = "made"\ntarget = "made:Made"\n[recipe.options]\ntext = "{"a-long-path/" * 20}"\n'
        f"[train]\nsteps = {steps}\nbatch = 1\nseed = 0\n[chosen]\ntokens_per_row = {CYCLE_TOKENS}\n"
        'devices = 1\ndevice = "cpu"\nplatform = "cpu"\nreason = "one device"\n'
    )
    append_event(folder, "started", command="tpuswarm train made")
    for step in range(1, steps + 1):
        row = {"step": step, "tokens": step * CYCLE_TOKENS}
        times = {"lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1e3 + step, "wall_s": float(step)}
        evaluation = [{**row, "eval_loss": 2 + 3 / step**0.5}] if step % 10 == 0 else []
        append_rows(folder / METRICS, [{**row, "loss": 2 + 3 / step**0.5, **times}, *evaluation])
    append_event(folder, "sample", step=steps, text=f"<once> \x1b[31mupon{' a time' * 40}\n\tthere\x00 was")
    finding = {"kind": "host_sync", "message": "the host reads a device value in each step"}
    append_event(folder, "diagnostic", **finding)
    seconds = {"compile": 3.0, "step": 6.0, "evaluate": 1.0}
    append_event(
        folder, "summary", seconds=seconds, steps=steps, tokens_per_s=1e3, unit="tokens", flops_per_s=None, mfu=None,
        findings=[finding],
    )  # fmt: skip
    append_event(folder, "finished", message=f"finished: {steps} steps")
    write_picture(folder, f"{steps:08d}.png", np.full((8, 24, 3), 50, np.uint8))
    return folder


class FakeRun:
    """A run with members m0, m1, …; each version has a contribution of every member that is not lost."""

    def __init__(self, folder: Path, members: int, versions: int):
        """versions: how many the whole run has."""
        folder.mkdir(parents=True)
        self.folder, self.names = folder, [f"m{number}" for number in range(members)]
        self.versions, self.version, self.tokens = versions, 0, 0
        self.lost: set[str] = set()
        (folder / CONFIG).write_text(
            '[recipe]\nname = "made"\ntarget = "made:Made"\n[recipe.options]\n'
            f"[train]\nsteps = {versions * members}\nbatch = 1\nseed = 0\n"
            f"[chosen]\ntokens_per_row = {CYCLE_TOKENS}\n[swarm]\nmembers = {members}\n"
        )
        (folder / "logs").mkdir()
        self._lock = (folder / LOCK).open("w+")
        self.event(START_TIME, "started", message="made up")

    def take_lock(self) -> "FakeRun":
        """Take the run's lock, as a running trainer does."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        return self

    def release(self) -> None:
        self._lock.close()

    def event(self, at: float, event: str, **facts: Any) -> None:
        with (self.folder / EVENTS).open("a") as file:
            file.write(json.dumps({"time": at, "event": event, **facts}) + "\n")

    def grow(self, count: int, evaluated: int = 10) -> None:
        """Write `count` versions with a row of each member, and an evaluation every `evaluated` versions."""
        with (self.folder / EVENTS).open("a") as events, (self.folder / METRICS).open("a") as metrics:
            for _ in range(count):
                alive = [name for name in self.names if name not in self.lost]
                version = self.version + 1
                losses = 2 + 3 / np.sqrt(version) + np.random.default_rng(version).normal(size=len(alive)) / 20
                for name, loss in zip(alive, losses, strict=True):
                    row = {"step": version, "tokens": version * CYCLE_TOKENS, "loss": float(loss), "lr": 1e-3,
                           "grad_norm": 0.5, "tokens_per_s": CYCLE_TOKENS / CYCLE_S, "wall_s": version * CYCLE_S,
                           "member": name, "version": self.version}  # fmt: skip
                    metrics.write(json.dumps(row) + "\n")
                self.version, self.tokens = version, self.tokens + CYCLE_TOKENS * len(alive)
                part = {"incarnation": "0" * 32, "tokens": CYCLE_TOKENS, "weight": 1 / len(alive), "fate": "applied",
                        "reason": ""}  # fmt: skip
                commit = {"time": START_TIME + version * CYCLE_S, "event": "commit", "version": version, "epoch": 1,
                          "tokens": self.tokens, "contributors": [{"member": name, **part} for name in alive],
                          "others": [], "rule": "nesterov", "rate": 0.7}  # fmt: skip
                events.write(json.dumps(commit) + "\n")
                if version % evaluated == 0:
                    row = {"step": version, "tokens": self.tokens, "eval_loss": 2 + 3 / version**0.5, "eval_rows": 8,
                           "member": "m0", "version": version}  # fmt: skip
                    metrics.write(json.dumps(row) + "\n")
        self.write_status()

    def lose_member(self, name: str) -> None:
        self.lost.add(name)
        self.event(START_TIME + self.version * CYCLE_S, "lost", member=name, message="killed", tokens=CYCLE_TOKENS)
        self.write_status()

    def write_status(self, alarms: tuple[str, ...] = ()) -> None:
        write_status(self.folder, self.status(alarms))

    def status(self, alarms: tuple[str, ...] = ()) -> SwarmStatus:
        loss = 2 + 3 / max(1, self.version) ** 0.5
        members = tuple(
            MemberStatus(
                id=name, state="lost" if name in self.lost else "alive", pid=1000 + number,
                incarnation=f"{number:032x}",
                base=self.version, tokens=self.version * CYCLE_TOKENS, lag=0, grad_norm=0.5,
                tokens_per_s=None if name in self.lost else CYCLE_TOKENS / CYCLE_S + number / 100 + self.version % 7,
                loss=loss + number / 1000,
            )
            for number, name in enumerate(self.names)
        )  # fmt: skip
        goal = self.versions * CYCLE_TOKENS * len(self.names)
        return SwarmStatus(
            time=START_TIME + self.version * CYCLE_S, began=START_TIME, version=self.version, epoch=1,
            phase="waiting for pushes",
            horizon=goal, tokens=Tokens(self.tokens + 2 * CYCLE_TOKENS, self.tokens, CYCLE_TOKENS, 0, CYCLE_TOKENS),
            goodput=self.tokens / (self.tokens + 2 * CYCLE_TOKENS), lag=0, left=60.0, loss=loss, eval_loss=2.5,
            tokens_per_s=sum(member.tokens_per_s or 0 for member in members), eval_version=self.version // 10 * 10,
            members=members, alarms=alarms, address="", processes={}, carried=12345,
        )  # fmt: skip

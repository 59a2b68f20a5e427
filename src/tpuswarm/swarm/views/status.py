"""What can be seen of a swarm from outside: status.json, written by its supervisor every second."""

import time as clock
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import read_config, reading, writing
from tpuswarm.train.run.life import read_life
from tpuswarm.train.run.schema import Stamp
from tpuswarm.train.storage.folders import shown

FILE = "status.json"


@dataclass(frozen=True)
class MemberStatus:
    """One member."""

    id: str
    state: Literal["alive", "evaluating", "joining", "lost", "left"]
    """evaluating: alive, and not training meanwhile."""
    pid: int | None
    incarnation: str | None
    base: int | None
    """The version it has adopted."""
    tokens: int
    """Trained by it, in all its incarnations."""
    tokens_per_s: float | None
    """None unless it is alive or joining."""
    loss: float | None
    """Mean over its last 20 steps."""
    grad_norm: float | None
    lag: int | None
    """Versions behind the newest."""
    carried: int = 0
    """Bytes between it and what serves it so far: a payload there and a version back for each contribution."""

    @property
    def lives(self) -> bool:
        """Whether it takes part."""
        return self.state in ("alive", "evaluating")


@dataclass(frozen=True)
class SwarmStatus:
    """All of it."""

    time: Stamp
    """Seconds since 1970."""
    began: Stamp
    """When its command was given; seconds since 1970."""
    version: int | None
    epoch: int | None
    phase: str
    horizon: int
    """Tokens of the whole run."""
    tokens: Tokens
    goodput: float | None
    """Applied tokens as a share of processed ones that are not outstanding: 1 where none is lost or dropped."""
    tokens_per_s: float
    """Of all members that are alive, at their last steps."""
    lag: int | None
    """Versions that the furthest behind of them is behind the newest."""
    left: float | None
    """Seconds until all tokens are counted, at the pace of the last two minutes; None while nothing is."""
    loss: float | None
    """Mean of the losses of the members that are not lost."""
    eval_loss: float | None
    """The newest on held-out rows."""
    eval_version: int | None
    """The version that has it."""
    members: tuple[MemberStatus, ...]
    alarms: tuple[str, ...]
    address: str
    """Where others join."""
    processes: dict[str, int]
    """Pids of coordinator and aggregators, by name."""
    carried: int = 0
    """Bytes between members and what serves them so far: a payload there and a version back for each contribution."""

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return self.time - self.began


@dataclass(frozen=True)
class Progress:
    """What a supervisor knows of a run besides its members."""

    began: float
    counted_per_s: float | None = None
    """Tokens, of late."""
    eval_loss: float | None = None
    eval_version: int | None = None
    carried: int = 0
    """Bytes, of the whole run."""


FINISHED, STOPPED = "the run is finished", "the run was stopped"
"""The phases after the last: who looks for a head by the run's folder alone looks no further."""

_STATUS: TypeAdapter[SwarmStatus] = TypeAdapter(SwarmStatus)


def compose(
    summary: Summary | None,
    members: Sequence[MemberStatus],
    horizon: int,
    alarms: Sequence[str],
    address: str,
    processes: dict[str, int],
    time: float,
    progress: Progress,
) -> SwarmStatus:
    """One picture of what the coordinator and the supervisor know."""
    tokens = summary.tokens if summary else Tokens(0, 0, 0, 0, 0)
    settled = tokens.processed - tokens.outstanding
    alive = [each for each in members if each.lives]
    losses = [each.loss for each in members if each.loss is not None and each.state != "lost"]
    speed = progress.counted_per_s
    return SwarmStatus(
        time=time,
        began=progress.began,
        version=summary.version if summary else None,
        epoch=summary.epoch if summary else None,
        phase=summary.phase if summary else "initializing the model",
        horizon=horizon,
        tokens=tokens,
        goodput=tokens.applied / settled if settled > 0 else None,
        tokens_per_s=sum(each.tokens_per_s or 0.0 for each in alive),
        lag=max((each.lag for each in alive if each.lag is not None), default=None),
        left=max(0, horizon - tokens.applied) / speed if speed else None,
        loss=fmean(losses) if losses else None,
        eval_loss=progress.eval_loss,
        eval_version=progress.eval_version,
        members=tuple(members),
        alarms=tuple(alarms),
        address=address,
        processes=processes,
        carried=progress.carried,
    )


def write_status(folder: Path, status: SwarmStatus) -> None:
    """Write status.json, whole or not at all; RunFailed where it cannot be."""
    with writing(folder / FILE):
        write_atomically(folder / FILE, _STATUS.dump_json(status).decode())


def read_status(folder: Path) -> SwarmStatus | None:
    """The last status that was written; None before the first."""
    if not (folder / FILE).exists():
        return None
    with reading(folder / FILE):
        written = (folder / FILE).read_bytes()
    try:
        return _STATUS.validate_json(written)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{folder / FILE} is not a swarm status ({where + ': ' if where else ''}{first['msg']}); remove it: "
            "a run writes it again every second"
        ) from error


def parse_status(data: bytes) -> SwarmStatus:
    """What `write_status` has written; raises ValidationError."""
    return _STATUS.validate_json(data)


@dataclass(frozen=True)
class Look:
    """A swarm's run as its directory shows it."""

    run: str
    recipe: str
    state: str
    """As in train/run/directory.py."""
    pid: int | None
    message: str
    """Why it stopped or failed, where it did."""
    steps: int
    tokens_per_step: int
    unit: str
    """What these tokens are: tokens, or rows where a row counts for one."""
    status: SwarmStatus

    @property
    def step(self) -> int:
        """Whole steps counted, of `steps`."""
        return self.tokens // self.tokens_per_step

    @property
    def tokens(self) -> int:
        """Counted."""
        return self.status.tokens.applied

    @property
    def tokens_per_s(self) -> float:
        """Of all members together."""
        return self.status.tokens_per_s

    @property
    def loss(self) -> float | None:
        """Of the members' training."""
        return self.status.loss

    @property
    def eval_loss(self) -> float | None:
        """The newest on held-out rows."""
        return self.status.eval_loss

    def json(self) -> dict[str, Any]:
        """As one object, with the keys of a plain run's status but for `tokens`, which says where they are."""
        own = {name: getattr(self, name) for name in ("run", "recipe", "state", "pid", "message", "step", "steps")}
        return own | asdict(self.status)


def look(folder: Path) -> Look:
    """A swarm's run from outside, whether it lives or not. Raises InputError if the folder is no swarm's run."""
    config = read_config(folder)
    if "swarm" not in config:
        raise InputError(f"{folder} is a plain run: it has no members and no ledger")
    life = read_life(folder)
    tokens_per_step = config["train"]["batch"] * config["chosen"]["tokens_per_row"]
    status = read_status(folder)
    if status is None:
        now = clock.time()
        status = compose(None, (), config["train"]["steps"] * tokens_per_step, (), "", {}, now, Progress(now))
    if life.pid is None:
        members = tuple(after_the_end(each, life.state) for each in status.members)
        phase = f"ended; last status from {clock.strftime('%Y-%m-%d %H:%M:%S', clock.localtime(status.time))}"
        status = replace(
            status, members=members, phase=phase, tokens_per_s=0.0, lag=None, left=None, alarms=(), processes={},
            address="",
        )  # fmt: skip
    return Look(
        run=shown(folder),
        recipe=config["recipe"]["name"],
        state=life.state,
        pid=life.pid,
        message=life.message,
        steps=config["train"]["steps"],
        tokens_per_step=tokens_per_step,
        unit=token_unit(config["chosen"]["tokens_per_row"]),
        status=status,
    )


def after_the_end(member: MemberStatus, ended: str) -> MemberStatus:
    """A member of a run of which no process is left; ended: how, as in train/run/directory.py."""
    left = member.state == "left" or ended == "finished"
    return replace(member, state="left" if left else "lost", pid=None, tokens_per_s=None)

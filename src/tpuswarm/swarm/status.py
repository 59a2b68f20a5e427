"""What can be seen of a swarm from outside: status.json, written by its supervisor every second."""

import json
import mmap
import time as clock
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.train.files import write_atomically
from tpuswarm.train.run import METRICS, read_config, read_life, writing

FILE = "status.json"


@dataclass(frozen=True)
class MemberStatus:
    """One member."""

    id: str
    state: Literal["alive", "joining", "lost", "left"]
    pid: int | None
    incarnation: str | None
    base: int | None
    """The version it has adopted."""
    tokens: int
    """Trained by its incarnation."""
    tokens_per_s: float | None
    """None unless it is alive or joining."""
    loss: float | None
    grad_norm: float | None
    lag: int | None
    """Versions behind the newest."""


@dataclass(frozen=True)
class SwarmStatus:
    """All of it."""

    time: float
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
    members: tuple[MemberStatus, ...]
    alarms: tuple[str, ...]
    address: str
    """Where others join."""
    processes: dict[str, int]
    """Pids of coordinator and aggregators, by name."""


_STATUS: TypeAdapter[SwarmStatus] = TypeAdapter(SwarmStatus)


def compose(
    summary: Summary | None,
    members: Sequence[MemberStatus],
    horizon: int,
    alarms: Sequence[str],
    address: str,
    processes: dict[str, int],
    time: float,
) -> SwarmStatus:
    """One picture of what the coordinator and the supervisor know."""
    tokens = summary.tokens if summary else Tokens(0, 0, 0, 0, 0)
    settled = tokens.processed - tokens.outstanding
    alive = [each for each in members if each.state == "alive"]
    return SwarmStatus(
        time=time,
        version=summary.version if summary else None,
        epoch=summary.epoch if summary else None,
        phase=summary.phase if summary else "the first state is being made",
        horizon=horizon,
        tokens=tokens,
        goodput=tokens.applied / settled if settled > 0 else None,
        tokens_per_s=sum(each.tokens_per_s or 0.0 for each in alive),
        lag=max((each.lag for each in alive if each.lag is not None), default=None),
        members=tuple(members),
        alarms=tuple(alarms),
        address=address,
        processes=processes,
    )


def write_status(folder: Path, status: SwarmStatus) -> None:
    """Write status.json, whole or not at all; RunFailed where it cannot be."""
    with writing(folder / FILE):
        write_atomically(folder / FILE, _STATUS.dump_json(status).decode())


def read_status(folder: Path) -> SwarmStatus | None:
    """The last status that was written; None before the first."""
    try:
        return _STATUS.validate_json((folder / FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{folder / FILE} is no status of a swarm ({where + ': ' if where else ''}{first['msg']}); remove it: "
            "a run writes it again every second"
        ) from error


@dataclass(frozen=True)
class Look:
    """A swarm's run as its directory shows it."""

    run: str
    recipe: str
    state: str
    """As in train/run.py."""
    pid: int | None
    message: str
    """Why it stopped or failed, where it did."""
    steps: int
    tokens_per_step: int
    eval_loss: float | None
    """The newest."""
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
        """Mean over the last step of each member that is alive; of all that were where none is."""
        known = [each for each in self.status.members if each.loss is not None]
        alive = [each for each in known if each.state == "alive"]
        losses = [each.loss for each in alive or known if each.loss is not None]
        return fmean(losses) if losses else None

    def json(self) -> dict[str, Any]:
        """As one object, with the keys of a plain run's status but for `tokens`, which says where they are."""
        own = {name: getattr(self, name) for name in ("run", "recipe", "state", "pid", "message", "step", "steps")}
        return own | {"loss": self.loss, "eval_loss": self.eval_loss} | asdict(self.status)


def look(folder: Path) -> Look:
    """A swarm's run from outside, whether it lives or not. Raises InputError if the folder is no swarm's run."""
    config = read_config(folder)
    if "swarm" not in config:
        raise InputError(f"{folder} is a run of the plain trainer: it has no members and no ledger")
    life = read_life(folder)
    tokens_per_step = config["train"]["batch"] * config["chosen"]["tokens_per_row"]
    status = read_status(folder)
    if status is None:
        status = compose(None, (), config["train"]["steps"] * tokens_per_step, (), "", {}, clock.time())
    if life.pid is None:
        members = tuple(_after_the_end(each, life.state) for each in status.members)
        phase = f"over; this is how it stood at {clock.strftime('%Y-%m-%d %H:%M:%S', clock.localtime(status.time))}"
        status = replace(
            status, members=members, phase=phase, tokens_per_s=0.0, lag=None, alarms=(), processes={}, address=""
        )
    return Look(
        run=str(folder),
        recipe=config["recipe"]["name"],
        state=life.state,
        pid=life.pid,
        message=life.message,
        steps=config["train"]["steps"],
        tokens_per_step=tokens_per_step,
        eval_loss=_newest(folder / METRICS, "eval_loss"),
        status=status,
    )


def _after_the_end(member: MemberStatus, ended: str) -> MemberStatus:
    left = member.state == "left" or ended == "finished"
    return replace(member, state="left" if left else "lost", pid=None, tokens_per_s=None)


def _newest(path: Path, name: str) -> float | None:
    """The last value of that name in the whole lines of a JSON lines file, without parsing the others."""
    if not path.exists() or not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        whole = text.rfind(b"\n")
        at = text.rfind(f'"{name}"'.encode(), 0, max(whole, 0))
        if at < 0:
            return None
        found: float | None = json.loads(text[text.rfind(b"\n", 0, at) + 1 : text.find(b"\n", at)])[name]
        return found

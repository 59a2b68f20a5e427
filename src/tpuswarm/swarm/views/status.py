"""The status of a swarm: status.json, which its supervisor writes every second."""

import time as clock
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import read_config, reading, writing
from tpuswarm.train.run.life import read_life
from tpuswarm.train.run.schema import UnixTime
from tpuswarm.train.storage.folders import shown

FILE = "status.json"


@dataclass(frozen=True)
class MemberStatus:
    id: str
    state: Literal["alive", "evaluating", "joining", "lost", "left"]
    """evaluating: alive, but not training."""
    pid: int | None
    incarnation: str | None
    base: int | None
    """The version that it has adopted."""
    tokens: int
    """Trained in all its incarnations."""
    tokens_per_s: float | None
    """None unless it is alive or joining."""
    loss: float | None
    """Mean of its last 20 steps."""
    grad_norm: float | None
    lag: int | None
    """Versions behind the newest."""
    carried: int = 0
    """Bytes transferred: a payload there and a version back for each contribution."""
    push_bytes_per_s: float | None = None
    """Speed of its last push."""
    round_trip_s: float | None = None
    """Duration of its last heartbeat."""

    @property
    def link(self) -> str:
        """The connection of a member that dialled in; empty for others."""
        if not person_of(self.id) or self.round_trip_s is None:
            return ""
        speed = "" if self.push_bytes_per_s is None else f"{8e-6 * self.push_bytes_per_s:.3g} Mbit/s, "
        return f"{speed}{1000 * self.round_trip_s:.0f} ms"

    @property
    def is_alive(self) -> bool:
        return self.state in ("alive", "evaluating")


@dataclass(frozen=True)
class SwarmStatus:
    """The whole swarm."""

    time: UnixTime
    """Seconds since 1970."""
    began: UnixTime
    """When its command was started, in seconds since 1970."""
    version: int | None
    epoch: int | None
    phase: str
    horizon: int
    """Tokens of the whole run."""
    tokens: Tokens
    goodput: float | None
    """Applied tokens as a share of the processed ones that are not outstanding; 1 if none is lost or dropped."""
    tokens_per_s: float
    """Sum over live members, at their last steps."""
    lag: int | None
    """Lag of the slowest live member."""
    left: float | None
    """Seconds until all tokens are counted, at the rate of the last two minutes; None if the rate is 0."""
    loss: float | None
    """Mean over members that are not lost."""
    eval_loss: float | None
    """Newest held-out loss."""
    eval_version: int | None
    """Version of `eval_loss`."""
    members: tuple[MemberStatus, ...]
    alarms: tuple[str, ...]
    address: str
    """Address for other machines to join."""
    processes: dict[str, int]
    """Pids of coordinator and aggregators on the swarm's machine, by name."""
    carried: int = 0
    """Bytes transferred with all members: a payload there and a version back for each contribution."""
    eval_metrics: dict[str, float | None] = field(default_factory=dict)
    """The recipe's own metrics of the newest evaluation, by column of metrics.jsonl."""
    aggregators: dict[str, str] = field(default_factory=dict)
    """Machines of the aggregators on other machines, by name."""
    people: dict[str, int] = field(default_factory=dict)
    """Tokens counted of each person's members; the key of the swarm's own members is empty."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.time - self.began


@dataclass(frozen=True)
class Progress:
    """A supervisor's knowledge of a run besides its members."""

    began: float
    counted_per_s: float | None = None
    """Recent rate of counted tokens."""
    eval_loss: float | None = None
    eval_version: int | None = None
    carried: int = 0
    """Bytes transferred in the whole run."""
    eval_metrics: dict[str, float | None] = field(default_factory=dict)
    aggregators: dict[str, str] = field(default_factory=dict)
    people: dict[str, int] = field(default_factory=dict)


FINISHED, STOPPED = "the run is finished", "the run was stopped"
"""Final phases, after which machines stop looking for a head in the run's folder."""

EVALUATED = ("eval_loss", "eval_version", "eval_metrics")
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
    """Compose the status from the knowledge of coordinator and supervisor."""
    tokens = summary.tokens if summary else Tokens(0, 0, 0, 0, 0)
    settled = tokens.processed - tokens.outstanding
    alive = [member for member in members if member.is_alive]
    losses = [member.loss for member in members if member.loss is not None and member.state != "lost"]
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
        tokens_per_s=sum(member.tokens_per_s or 0.0 for member in alive),
        lag=max((member.lag for member in alive if member.lag is not None), default=None),
        left=max(0, horizon - tokens.applied) / speed if speed else None,
        loss=fmean(losses) if losses else None,
        eval_loss=progress.eval_loss,
        eval_version=progress.eval_version,
        members=tuple(members),
        alarms=tuple(alarms),
        address=address,
        processes=processes,
        carried=progress.carried,
        eval_metrics=progress.eval_metrics,
        aggregators=progress.aggregators,
        people=progress.people,
    )


def people_sentence(people: dict[str, int]) -> str:
    """Return who contributed how much, the most first; empty if only the swarm's own members did."""
    if not any(people):
        return ""
    whole, own = max(1, sum(people.values())), "the swarm's own"
    ranked = sorted(people.items(), key=lambda item: -item[1])
    return "contributed: " + ", ".join(f"{person or own} {tokens / whole:.0%}" for person, tokens in ranked)


def write_status(folder: Path, status: SwarmStatus) -> None:
    """Write status.json atomically. Raise RunFailed if that is impossible."""
    with writing(folder / FILE):
        write_atomically(folder / FILE, _STATUS.dump_json(status).decode())


def read_status(folder: Path) -> SwarmStatus | None:
    """Return the last status; None before the first."""
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
            "a run rewrites it every second"
        ) from error


def carry_over(folder: Path, began: float) -> None:
    """Write the status of a run that starts again: its commits and counters so far, and no process."""
    status = None
    with suppress(InputError):  # a damaged one is replaced
        status = read_status(folder)
    if status is None:
        (folder / FILE).unlink(missing_ok=True)
        return
    resumed = compose(None, (), status.horizon, (), "", {}, clock.time(), Progress(began, carried=status.carried))
    write_status(folder, resume(resumed, status))


def resume(status: SwarmStatus, before: SwarmStatus) -> SwarmStatus:
    """Return a status without knowledge of a coordinator, with the commits and counters of the status before."""
    if before.version is None:
        return status
    known = {name: getattr(before, name) for name in ("version", "epoch", "tokens", "goodput", "people", *EVALUATED)}
    return replace(status, **known, phase=f"resuming from commit {before.version}")


def parse_status(data: bytes) -> SwarmStatus:
    """Parse the output of `write_status`. Raise ValidationError."""
    return _STATUS.validate_json(data)


@dataclass(frozen=True)
class RunView:
    """A swarm's run as its folder shows it."""

    run: str
    recipe: str
    state: str
    """The run's state, from train/run/directory.py."""
    pid: int | None
    message: str
    """Why it stopped or failed."""
    steps: int
    tokens_per_step: int
    unit: str
    """`tokens`, or `rows` if each row counts as one."""
    status: SwarmStatus
    missing_rows: str = ""
    """Result of `missing_rows`; empty where nobody asked for it."""

    @property
    def step(self) -> int:
        """Whole steps counted."""
        return self.tokens // self.tokens_per_step

    @property
    def tokens(self) -> int:
        """Tokens counted."""
        return self.status.tokens.applied

    @property
    def steps_done(self) -> int | None:
        """None while the first process resumes and does not know it yet."""
        return None if self.status.version is None else self.step

    @property
    def tokens_done(self) -> int | None:
        return None if self.status.version is None else self.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.status.tokens_per_s

    @property
    def loss(self) -> float | None:
        return self.status.loss

    @property
    def eval_loss(self) -> float | None:
        return self.status.eval_loss

    def json(self) -> dict[str, Any]:
        """Return one object, with the keys of a plain run's status, but with `tokens` by their fate."""
        own = {
            name: getattr(self, name)
            for name in ("run", "recipe", "state", "pid", "message", "step", "steps", "missing_rows")
        }
        return own | asdict(self.status)


def read_run(folder: Path) -> RunView:
    """Read a swarm's run, whether it is running or not. Raise InputError if the folder holds no swarm's run."""
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
        members = tuple(after_the_end(member, life.state) for member in status.members)
        phase = f"ended; last status from {clock.strftime('%Y-%m-%d %H:%M:%S', clock.localtime(status.time))}"
        status = replace(
            status, members=members, phase=phase, tokens_per_s=0.0, lag=None, left=None, alarms=(), processes={},
            address="", aggregators={},
        )  # fmt: skip
    return RunView(
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
    """Return a member's status after all processes have ended; ended: the run's state, as in train/run/directory.py."""
    left = member.state == "left" or ended == "finished"
    return replace(member, state="left" if left else "lost", pid=None, tokens_per_s=None)

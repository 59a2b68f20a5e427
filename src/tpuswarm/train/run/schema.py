"""Validate config.toml, metrics.jsonl and events.jsonl, which a disk, a kill or an editor may have damaged."""

from typing import Annotated, Any, NotRequired, Required

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_strict = with_config(ConfigDict(extra="allow", strict=True))

UnixTime = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Seconds since 1970, before the year 10,000."""


class _Table(BaseModel):
    """Part of config.toml; further keys are allowed."""

    model_config = ConfigDict(strict=True)


class _Recipe(_Table):
    name: str
    target: str
    options: dict[str, Any]


class _Train(_Table):
    """Settings of train/settings.py, which checks their values."""

    steps: PositiveInt
    batch: PositiveInt
    seed: int
    precision: str | None = None
    accumulate: PositiveInt | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None
    deterministic: bool | None = None
    init_from: str | None = None
    init_only: str | None = None
    data: str | None = None
    overfit_batches: PositiveInt | None = None


class _MayChange(_Table):
    eval_batch: PositiveInt | None = None


class _Chosen(_Table):
    tokens_per_row: PositiveInt


class _Swarm(_Table):
    """Settings of swarm/processes/run_plan.py."""

    members: NonNegativeInt
    expected: NonNegativeInt = 0
    run: str | None = None
    cycle: PositiveInt | None = None
    outer: str | None = None
    outer_lr: float | None = None
    quantize: str | None = None
    overlap: bool | None = None
    fragments: PositiveInt | None = None
    devices_per_member: PositiveInt | None = None
    code: str | None = None
    base: str | None = None


class Config(_Table):
    recipe: _Recipe
    train: _Train
    may_change: _MayChange | None = None
    chosen: _Chosen | None = None
    numerics: dict[str, str] | None = None
    program: dict[str, str] | None = None
    data: dict[str, str] | None = None
    swarm: _Swarm | None = None

    @model_validator(mode="after")
    def _complete(self) -> "Config":
        if self.swarm and not self.chosen:
            raise ValueError("chosen is missing; a swarm needs it")
        return self


@_strict
class _MetricsRow(TypedDict, total=False):
    step: Required[int]
    tokens: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float
    wall_s: float
    member: str
    version: int


@_strict
class _EventRow(TypedDict, total=False):
    time: Required[UnixTime]
    event: Required[str]
    message: str
    member: str
    name: str
    version: int


@_strict
class _Sample(TypedDict):
    step: int
    text: str


@_strict
class _LearningRateScale(TypedDict):
    step: int
    total: float


@_strict
class _Finding(TypedDict):
    kind: str
    message: str


@_strict
class _Parameters(TypedDict):
    message: str
    table: list[str]


@_strict
class _Summary(TypedDict):
    seconds: dict[str, float]
    tokens_per_s: float | None
    unit: str
    mfu: float | None
    findings: list[_Finding]


@_strict
class _Commit(TypedDict):
    version: int


@_strict
class _Joined(TypedDict):
    member: str
    incarnation: str


@_strict
class _Lost(TypedDict):
    member: str
    message: str


@_strict
class _Left(TypedDict):
    member: str
    tokens: NotRequired[int]


@_strict
class _Process(TypedDict):
    name: str


_ROWS: dict[str, TypeAdapter[Any]] = {METRICS: TypeAdapter(_MetricsRow), EVENTS: TypeAdapter(_EventRow)}
_EVENTS: dict[str, TypeAdapter[Any]] = {
    "sample": TypeAdapter(_Sample),
    "lr_scale": TypeAdapter(_LearningRateScale),
    "diagnostic": TypeAdapter(_Finding),
    "parameters": TypeAdapter(_Parameters),
    "summary": TypeAdapter(_Summary),
    "commit": TypeAdapter(_Commit),
    "joined": TypeAdapter(_Joined),
    "lost": TypeAdapter(_Lost),
    "left": TypeAdapter(_Left),
    "coordinator": TypeAdapter(_Process),
    "shard": TypeAdapter(_Process),
}
"""Events that have values of their own, by kind."""


def parse_row(name: str, line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl or events.jsonl; None if it is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        row: dict[str, Any] = _ROWS[name].validate_json(line)
        if name == EVENTS and row["event"] in _EVENTS:
            _EVENTS[row["event"]].validate_python(row)
        return row
    except ValidationError:
        return None

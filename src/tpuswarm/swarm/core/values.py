"""What members send and the ledger keeps: plain values, the same in every engine."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tpuswarm.swarm.core.rows import Rows

Fate = Literal["applied", "returned", "dropped", "void"]
Form = Literal["plain", "int8", "int4"]
Rule = Literal["average", "nesterov"]


@dataclass(frozen=True, order=True)
class Incarnation:
    """One life of a member."""

    member: str
    name: str
    """128 random bits in hexadecimal, drawn by the member's own process."""


@dataclass(frozen=True, order=True)
class Identity:
    """Which contribution: the `sequence`-th push of an incarnation, counted from 1."""

    incarnation: Incarnation
    sequence: int


@dataclass(frozen=True)
class Header:
    """A contribution without its payload. Its existence in the run's storage is its acceptance."""

    identity: Identity
    run: str
    base: int
    """The version that its member had adopted."""
    rows: Rows
    tokens: int
    steps: int
    form: Form
    norm: float
    """Of the delta, float32 norms of the fragments combined; 0 where it is not finite."""
    finite: bool
    digests: tuple[str, ...]
    """SHA-256 of the payload of each fragment."""


@dataclass(frozen=True)
class Decision:
    """What a record says of one contribution, for ever."""

    identity: Identity
    fate: Fate
    reason: str
    rows: Rows
    base: int
    tokens: int
    weight: float = 0.0
    """Share in the sum; the weights of a record's applied contributions add up to 1."""
    clip: float = 1.0
    """Factor on its delta."""


@dataclass(frozen=True)
class Digests:
    """What all members of an epoch must agree in; SHA-256 each."""

    layout: str
    config: str
    data: str
    code: str


class Averaged(NamedTuple):
    """Elements first to last of a fragment that are running statistics: a momentum could bring them out of their range,
    a variance below 0.
    """

    fragment: int
    first: int
    last: int


@dataclass(frozen=True)
class Record:
    """A commit: one version of the shared state, and how it came about. `version` is the number of the commit."""

    run: str
    version: int
    """0 is genesis."""
    epoch: int
    """The life of the coordinator that made it, counted from 1."""
    parent: str
    """Digest of the record before; empty at genesis."""
    state: tuple[str, ...]
    """Digest of each fragment of the shared state."""
    outer: tuple[str, ...]
    """Digest of each fragment of the outer optimizer's state; empty where the rule has none."""
    decisions: tuple[Decision, ...]
    rule: Rule
    rate: float
    momentum: float
    share: float
    """Of a quorum, that its contributors are: 1, or less where the rule then delays its momentum."""
    gathered: float
    """Shares since the last momentum step, this record's included; 0 after such a step."""
    tokens: int
    """Of all counted contributions so far: the T of schedules."""
    changes: int
    """Records with contributors so far; staleness and retention count these."""
    processed: tuple[tuple[Incarnation, int], ...]
    """Tokens trained in its life, of each incarnation whose report changed since the record before."""
    digests: Digests
    time: float
    """Seconds since 1970, by the coordinator's clock; nothing is decided by it."""
    downlink: Form = "plain"
    """In which members are sent what this version changes."""
    updates: tuple[str, ...] = ()
    """Digest of each fragment of what was added to the version before; empty where that is not how it was made."""
    averaged: tuple[Averaged, ...] = ()
    """What is merged by its mean whatever the rule."""
    kept: float | None = None
    """What this commit left of the moving average, which is part of the outer state; None where there is none."""

    @property
    def objects(self) -> tuple[str, ...]:
        """The digests of all that it stands for."""
        return (*self.state, *self.outer, *self.updates)

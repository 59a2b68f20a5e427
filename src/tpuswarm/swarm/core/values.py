"""The values that members send and the ledger records."""

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
    """A contribution's name: the `sequence`-th push of an incarnation, counted from 1."""

    incarnation: Incarnation
    sequence: int


@dataclass(frozen=True)
class Header:
    """A contribution without its payload. Once stored, the contribution is accepted."""

    identity: Identity
    run: str
    base: int
    """The version that the member had adopted."""
    rows: Rows
    tokens: int
    steps: int
    form: Form
    norm: float
    """Norm of the delta as it is sent, a quantized one decoded; 0 if it is not finite."""
    finite: bool
    digests: tuple[str, ...]
    """SHA-256 of the payload of each fragment."""


@dataclass(frozen=True)
class Decision:
    """The verdict on one contribution."""

    identity: Identity
    fate: Fate
    reason: str
    rows: Rows
    base: int
    tokens: int
    weight: float = 0.0
    """Share of the sum; the weights of a record's applied contributions add up to 1."""
    clip: float = 1.0
    """Factor applied to its delta."""


@dataclass(frozen=True)
class Digests:
    """Digests that all members of an epoch must share; SHA-256."""

    layout: str
    config: str
    data: str
    code: str


class AveragedSlice(NamedTuple):
    """Elements first to last of a fragment that are running statistics. Momentum could push a variance below 0."""

    fragment: int
    first: int
    last: int


@dataclass(frozen=True)
class Record:
    """A commit: one version of the shared state and how it was made. `version` is the commit's number."""

    run: str
    version: int
    """0 is genesis."""
    epoch: int
    """Number of the coordinator's life that made it, from 1."""
    parent: str
    """Digest of the previous record; empty at genesis."""
    state: tuple[str, ...]
    """Digest of each fragment of the shared state."""
    outer: tuple[str, ...]
    """Digest of each fragment of the outer optimizer's state; empty if the rule has none."""
    decisions: tuple[Decision, ...]
    rule: Rule
    rate: float
    momentum: float
    share: float
    """Contributors as a share of a quorum: 1, or less if the rule then delays its momentum."""
    gathered: float
    """Shares since the last momentum step, including this record's; 0 after such a step."""
    tokens: int
    """Tokens of all contributions counted so far; schedules follow them."""
    changes: int
    """Records with contributors so far; staleness and retention count these."""
    processed: tuple[tuple[Incarnation, int], ...]
    """Tokens trained by each incarnation whose report changed since the previous record."""
    digests: Digests
    time: float
    """Seconds since 1970 by the coordinator's clock; no decision depends on it."""
    downlink: Form = "plain"
    """Form in which members receive this version's changes."""
    updates: tuple[str, ...] = ()
    """Digest of each fragment of the quantized change from the previous version; empty for a plain downlink."""
    averaged: tuple[AveragedSlice, ...] = ()
    """Elements merged by their mean under every rule."""
    kept: float | None = None
    """Share of the moving average that this commit kept; None if the run has no average."""

    @property
    def objects(self) -> tuple[str, ...]:
        """Digests of all objects that this record names."""
        return (*self.state, *self.outer, *self.updates)

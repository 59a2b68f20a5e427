"""Messages between members and coordinator, and the coordinator's orders to aggregators and storage."""

from dataclasses import dataclass, field

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.rounds import RoundTimeouts
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Header, Identity, Incarnation


@dataclass(frozen=True)
class Terms:
    """The settings that a run was started with."""

    run: str
    digests: Digests
    batch: int
    """Rows of a commit's unit of work: leases and contributions are whole batches. A member's step may be a part."""
    tokens_per_row: int
    horizon: int
    """Rows to count until the run ends; whole batches."""
    cycle: int
    """Rows of a cycle of the fastest member; whole batches."""
    members: tuple[str, ...]
    """Members that the run was started with. A round waits for them before they have reported."""
    outer: OuterRule
    staleness: Staleness = Staleness()  # noqa: RUF009  # frozen
    timeouts: RoundTimeouts = RoundTimeouts()  # noqa: RUF009  # frozen
    lease_seconds: float = 20.0
    """Lease time after a heartbeat; longer if many members have to send heartbeats less often."""


@dataclass(frozen=True)
class Heartbeat:
    """A member's report: its hello, its announcement to a new coordinator, and its regular sign of life. Idempotent."""

    incarnation: Incarnation
    digests: Digests
    joined: bool
    """Whether a coordinator has granted it a lease before."""
    base: int
    todo: Rows
    """Leased rows not yet trained."""
    outstanding: Rows
    """Trained rows without a known verdict, the undecided contribution's included."""
    undecided: Identity | None
    rows_per_s: float | None
    processed: int
    """Tokens trained by this incarnation."""
    stalled: float = 0.0
    """Seconds that the current device action has run; 0 if the devices are idle."""
    exchange_s: float = 0.0
    """Seconds in which a contribution and a version travel, without the wait for a verdict; 0 if unknown."""


@dataclass(frozen=True)
class Granted:
    """The whole lease, the newest version, and the verdict if there is one."""

    rows: Rows
    """All rows that the member holds, trained ones included."""
    cycle: int
    """Rows between two pushes, proportional to the member's speed."""
    version: int
    """The newest version."""
    tokens: int
    """Tokens counted at that version."""
    state: tuple[str, ...]
    """Digest of each fragment of that version; empty if the member has adopted it."""
    verdict: Decision | None
    """On the contribution that the member reported as undecided."""
    unknown: bool
    """The coordinator does not know that contribution: the member must push the same bytes again."""
    pause: float
    """Minimum seconds until the next heartbeat."""
    ended: bool


@dataclass(frozen=True)
class Refused:
    """The incarnation has ended. Its process continues as a new one."""

    reason: str


@dataclass(frozen=True)
class Superseded:
    """A member names a version above the coordinator's: if it exists, another coordinator has taken over."""

    version: int


@dataclass(frozen=True)
class StoreHeader:
    """Order: create the header if absent, then report to `header_stored`."""

    header: Header


@dataclass(frozen=True)
class Accepted:
    """The contribution is accepted. Its verdict will be in a record."""


@dataclass(frozen=True)
class PayloadDamaged:
    """A payload was damaged in transit: send it again."""

    reason: str


@dataclass(frozen=True)
class Merge:
    """Order: compute the next state from these decisions, then report to `make_record`."""

    version: int
    decisions: tuple[Decision, ...]
    outer: OuterRule
    rate: float
    share: float
    gathered: float
    kept: float | None
    reason: str


@dataclass(frozen=True)
class ShardResult:
    """A shard's result: digests of its fragments by number."""

    state: dict[int, str]
    outer: dict[int, str]
    """Empty if the rule has no outer state."""
    updates: dict[int, str]
    """Empty if the downlink is plain."""
    squares: dict[Identity, float] = field(default_factory=dict)
    """Sums of the squares of the deltas of people, over this shard's fragments."""


@dataclass(frozen=True)
class VersionDamaged:
    """A shard could neither read nor recompute the newest version."""

    reason: str


@dataclass(frozen=True)
class VersionExpired:
    """The requested version was deleted; request the newest."""


@dataclass(frozen=True)
class PayloadsLost:
    """A shard could not read these payloads."""

    identities: frozenset[Identity]


@dataclass(frozen=True)
class PayloadsNotFinite:
    """These payloads would make the state infinite or NaN, although their headers call them finite."""

    identities: frozenset[Identity]

"""What members and the coordinator say to each other, and what the coordinator asks to be done."""

from dataclasses import dataclass

from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.rounds import Patience
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Header, Identity, Incarnation


@dataclass(frozen=True)
class Terms:
    """What a run was started with."""

    run: str
    digests: Digests
    batch: int
    """Rows of a member's step, where its own batch is no part of it; leases and contributions are whole batches."""
    tokens_per_row: int
    horizon: int
    """Rows to count until the run ends; whole batches."""
    cycle: int
    """Rows of a cycle of the fastest member; whole batches."""
    members: tuple[str, ...]
    """Those the run was started with: a round waits for them before they were heard of."""
    outer: Outer
    staleness: Staleness = Staleness()  # noqa: RUF009  # frozen
    patience: Patience = Patience()  # noqa: RUF009  # frozen
    lease_seconds: float = 20.0
    """From a heartbeat on; longer where so many members share the coordinator that they have to say less."""


@dataclass(frozen=True)
class Beat:
    """What a member says at hello, as announcement to a new coordinator, and every few seconds: idempotent."""

    incarnation: Incarnation
    digests: Digests
    joined: bool
    """A coordinator has granted it a lease before."""
    base: int
    todo: Rows
    """Leased and not yet trained."""
    outstanding: Rows
    """Trained and without a verdict that it heard of, those of the undecided contribution included."""
    undecided: Identity | None
    rows_per_s: float | None
    processed: int
    """Tokens trained in its life."""
    stalled: float = 0.0
    """Seconds for which its devices have been at one thing; 0 where they have nothing to do."""


@dataclass(frozen=True)
class Granted:
    """The whole lease, and the news."""

    rows: Rows
    """All that the member holds, those it has trained included."""
    cycle: int
    """Rows between two pushes, in proportion to its speed."""
    version: int
    """The newest."""
    tokens: int
    """Counted at that version."""
    state: tuple[str, ...]
    """Digest of each fragment of that version; none where the member has adopted it."""
    verdict: Decision | None
    """On the contribution that the member said is undecided."""
    unknown: bool
    """Nothing is known here of that contribution: it has to be pushed again, the same bytes."""
    pause: float
    """Seconds until its next heartbeat, at least."""
    ended: bool


@dataclass(frozen=True)
class Refused:
    """The incarnation is over; its process goes on as a new one."""

    reason: str


@dataclass(frozen=True)
class Outdated:
    """The coordinator met a version above its own: another one rules, and it has to leave."""

    version: int


@dataclass(frozen=True)
class StoreHeader:
    """Create the header, only if absent; then report to `stored`."""

    header: Header


@dataclass(frozen=True)
class Accepted:
    """The contribution is accepted; its verdict will stand in a record."""


@dataclass(frozen=True)
class Damaged:
    """A payload changed on its way: send it again."""

    reason: str


@dataclass(frozen=True)
class Merge:
    """Compute the next state from these decisions; then report to `merged`."""

    version: int
    decisions: tuple[Decision, ...]
    outer: Outer
    rate: float
    share: float
    gathered: float
    kept: float | None
    reason: str


@dataclass(frozen=True)
class Part:
    """What a shard computed: the digest of each of its fragments, by number."""

    state: dict[int, str]
    outer: dict[int, str]
    """Empty for a rule without outer state."""
    updates: dict[int, str]
    """Empty where the downlink is plain."""


@dataclass(frozen=True)
class Damage:
    """A shard could not read the newest version, nor compute it again."""

    reason: str


@dataclass(frozen=True)
class Gone:
    """The version asked for was removed; the newest is there."""


@dataclass(frozen=True)
class Lost:
    """A shard could not read these payloads."""

    identities: frozenset[Identity]

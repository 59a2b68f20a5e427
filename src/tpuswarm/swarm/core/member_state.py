"""The member as a state machine: which rows to train next, when to push, how to adopt a verdict.

It counts rows and leaves the arrays to DeviceState. Rows are trained in whole batches, lowest first. A member's own
batch may divide the run's batch, but leases and contributions always consist of whole batches of the run.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tpuswarm.swarm.core.messages import Granted, Heartbeat, Terms
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Form, Header, Identity, Incarnation


@dataclass(frozen=True)
class Undecided:
    """A contribution without a verdict, from its snapshot on."""

    identity: Identity
    rows: Rows
    after: Rows = NO_ROWS
    """Rows trained after the snapshot."""
    finite: bool = True
    """Assumed until the snapshot is on the host."""


@dataclass(frozen=True)
class Adopt:
    """How to move the parameters to a published version, which then becomes the anchor.

    - `snapshot`: own_share * now + (1 - own_share) * new, after `applied`; error feedback advances.
    - `anchor`: now + (new - anchor), after `returned`, or with nothing undecided.
    - `replace`: new, after `dropped` and `void`.
    - `fresh`: new, with fresh inner state and as another incarnation: the member's own numbers were not finite.
    """

    how: Literal["snapshot", "anchor", "replace", "fresh"]
    verdict_on: Identity | None
    """The undecided contribution, if any. An adoption without one is outdated by a later snapshot."""
    version: int
    state: tuple[str, ...]
    """Digest of each fragment."""


@dataclass(frozen=True)
class MemberState:
    """A member's counts during one incarnation."""

    terms: Terms
    form: Form
    overlap: bool
    """Keep training while a contribution is undecided."""
    incarnation: Incarnation
    base: int
    tokens: int
    """Tokens counted in the whole run at version `base`."""
    joined: bool = False
    todo: Rows = NO_ROWS
    outstanding: Rows = NO_ROWS
    """Trained rows without a known verdict, the undecided contribution's included."""
    undecided: Undecided | None = None
    sequence: int = 0
    """Number of the last push."""
    cycle: int = 0
    processed: int = 0
    adoptions: int = 0
    """Adoptions so far. A lease requested before the last adoption is outdated."""
    batch: int | None = None
    """Rows of a step; they divide the run's batch, which is the default."""

    @property
    def step_rows(self) -> int:
        return self.batch or self.terms.batch

    @property
    def has_whole_batches(self) -> bool:
        """Whether the outstanding rows are whole batches of the run, as a push requires."""
        return not any(edge % self.terms.batch for rows in self.outstanding.ranges for edge in rows)

    @property
    def finite_pushes(self) -> int:
        """Number of finite pushes. A push that is not finite ends its incarnation."""
        return self.sequence - bool(self.undecided and not self.undecided.finite)

    @property
    def progress(self) -> tuple[int, int]:
        """Return the schedule's fraction: tokens counted or outstanding here, and tokens of the whole run."""
        per_row = self.terms.tokens_per_row
        return self.tokens + len(self.outstanding) * per_row, self.terms.horizon * per_row

    @property
    def own_share(self) -> float:
        """Share of its own progress that the member keeps when its contribution is applied.

        0 if the member waited for the verdict, half after another cycle: the share of outstanding rows that were
        trained after the snapshot.
        """
        return len(self.undecided.after) / len(self.outstanding) if self.undecided else 0.0

    @property
    def next_rows(self) -> Rows:
        """Rows of the next step: a whole batch, or none if the member has to wait."""
        if self.undecided and not self.overlap:
            return NO_ROWS
        return self.todo.first(self.step_rows)

    @property
    def push_due(self) -> bool:
        """Whether a cycle, or the whole lease, is trained."""
        if self.undecided or not self.outstanding:
            return False
        return not self.todo or (len(self.outstanding) >= self.cycle and self.has_whole_batches)


def after_step(member: MemberState, rows: Rows) -> MemberState:
    """Record a step on these rows."""
    undecided = member.undecided and replace(member.undecided, after=member.undecided.after | rows)
    return replace(
        member,
        todo=member.todo - rows,
        outstanding=member.outstanding | rows,
        undecided=undecided,
        processed=member.processed + len(rows) * member.terms.tokens_per_row,
    )


def after_snapshot(member: MemberState) -> MemberState:
    """Record a snapshot: all outstanding rows become one undecided contribution."""
    assert member.undecided is None and member.outstanding
    identity = Identity(member.incarnation, member.sequence + 1)
    return replace(member, sequence=member.sequence + 1, undecided=Undecided(identity, member.outstanding))


def finish_push(member: MemberState, norm: float, finite: bool, digests: tuple[str, ...]) -> tuple[MemberState, Header]:
    """Return the header of the undecided contribution, whose payload is now known."""
    assert member.undecided is not None
    rows = member.undecided.rows
    made = Header(
        identity=member.undecided.identity,
        run=member.terms.run,
        base=member.base,
        rows=rows,
        tokens=len(rows) * member.terms.tokens_per_row,
        steps=len(rows) // member.step_rows,
        form=member.form,
        norm=norm,
        finite=finite,
        digests=digests,
    )
    return replace(member, undecided=replace(member.undecided, finite=finite)), made


def make_heartbeat(
    member: MemberState, rows_per_s: float | None, stalled: float = 0.0, exchange_s: float = 0.0
) -> Heartbeat:
    return Heartbeat(
        incarnation=member.incarnation,
        digests=member.terms.digests,
        joined=member.joined,
        base=member.base,
        todo=member.todo,
        outstanding=member.outstanding,
        undecided=_undecided(member),
        rows_per_s=rows_per_s,
        processed=member.processed,
        stalled=stalled,
        exchange_s=exchange_s,
    )


def after_grant(member: MemberState, reply: Granted, adoptions: int) -> MemberState:
    """Record the lease of a reply to a heartbeat that was sent after `adoptions` adoptions."""
    if adoptions != member.adoptions:
        return replace(member, joined=True)
    return replace(member, joined=True, todo=reply.rows - member.outstanding, cycle=reply.cycle)


def find_adoption(member: MemberState, reply: Granted) -> Adopt | None:
    """Return the adoption that a reply allows: of a verdict, or of a newer version while nothing is undecided."""
    how: Literal["snapshot", "anchor", "replace", "fresh"] = "anchor"
    if member.undecided:
        if reply.verdict is None or reply.verdict.identity != member.undecided.identity:
            return None
        if reply.verdict.fate == "applied":
            how = "snapshot"
        elif reply.verdict.fate != "returned":
            how = "replace" if member.undecided.finite else "fresh"
    elif reply.version <= member.base:
        return None
    return Adopt(how, _undecided(member), reply.version, reply.state)


def is_still_valid(member: MemberState, adopt: Adopt) -> bool:
    """Whether a fetched adoption is still valid: no contribution became undecided meanwhile."""
    return adopt.verdict_on == _undecided(member)


def after_adoption(member: MemberState, adopt: Adopt, tokens: int) -> MemberState:
    """Record the adoption of a version at which `tokens` were counted; not for `fresh`."""
    assert adopt.how != "fresh"
    todo, outstanding = member.todo, member.outstanding
    if member.undecided and adopt.how == "snapshot":
        outstanding = member.undecided.after
    elif member.undecided and adopt.how == "replace":
        todo, outstanding = todo | member.undecided.after, NO_ROWS
    return replace(
        member,
        base=adopt.version,
        tokens=tokens,
        todo=todo,
        outstanding=outstanding,
        undecided=None,
        adoptions=member.adoptions + 1,
    )


def _undecided(member: MemberState) -> Identity | None:
    return member.undecided.identity if member.undecided else None

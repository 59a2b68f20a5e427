"""The member as a state machine: which rows to train next, when to push, what a verdict does to its parameters.

It keeps the books; the arrays are its engine's. Rows are trained in whole batches, lowest first. A member's own batch
may be a part of the run's: leases and contributions are whole batches of the run all the same.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tpuswarm.swarm.core.messages import Beat, Granted, Terms
from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.core.values import Form, Header, Identity, Incarnation


@dataclass(frozen=True)
class Undecided:
    """The contribution under way, from its snapshot on."""

    identity: Identity
    rows: Rows
    after: Rows = NOTHING
    """Trained after the snapshot."""
    finite: bool = True
    """Known once the snapshot is on the host."""


@dataclass(frozen=True)
class Adopt:
    """How the parameters come to a published version; the anchor is that version afterwards.

    - `snapshot`: keep * now + (1 - keep) * new, after `applied`; error feedback advances. See `Member.keep`.
    - `anchor`: now + (new - anchor), after `returned`, or with nothing undecided.
    - `take`: new, after `dropped` and `void`.
    - `fresh`: new, with fresh inner state and as another incarnation: its own numbers were not finite.
    """

    how: Literal["snapshot", "anchor", "take", "fresh"]
    verdict_on: Identity | None
    """The contribution that was undecided; a later snapshot makes an adoption without one out of date."""
    version: int
    state: tuple[str, ...]
    """Digest of each fragment of the version."""


@dataclass(frozen=True)
class Member:
    """One life of a member, from its hello on."""

    terms: Terms
    form: Form
    overlap: bool
    """Train on while a contribution is undecided."""
    incarnation: Incarnation
    base: int
    tokens: int
    """T at `base`: counted in the whole run."""
    joined: bool = False
    todo: Rows = NOTHING
    outstanding: Rows = NOTHING
    """Trained, and not yet heard to be decided; the undecided contribution's rows included."""
    undecided: Undecided | None = None
    sequence: int = 0
    """Of the last push."""
    cycle: int = 0
    processed: int = 0
    heard: int = 0
    """Adoptions so far: a lease that was asked for before the last one is out of date."""
    batch: int | None = None
    """Rows of one of its steps, which divide the run's batch; None: that batch."""

    @property
    def step_rows(self) -> int:
        """Rows of one of its steps."""
        return self.batch or self.terms.batch

    @property
    def whole(self) -> bool:
        """Whether what is trained is whole batches of the run, which alone can be handed in."""
        return not any(edge % self.terms.batch for each in self.outstanding.ranges for edge in each)

    @property
    def finite_pushes(self) -> int:
        """Of its pushes, those that are finite for all that is known; one that is not is the last of an incarnation."""
        return self.sequence - bool(self.undecided and not self.undecided.finite)

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens counted or outstanding here, and tokens of the whole run: the schedule's fraction."""
        per_row = self.terms.tokens_per_row
        return self.tokens + len(self.outstanding) * per_row, self.terms.horizon * per_row

    @property
    def keep(self) -> float:
        """Of its outstanding rows, the share that its undecided contribution is without.

        That much of its own a member keeps when the contribution is applied: nothing if it waited, half after another
        cycle.
        """
        return len(self.undecided.after) / len(self.outstanding) if self.undecided else 0.0

    @property
    def next_rows(self) -> Rows:
        """The rows of the next step, a whole batch; none where it has to wait."""
        if self.undecided and not self.overlap:
            return NOTHING
        return self.todo.first(self.step_rows)

    @property
    def push_due(self) -> bool:
        """A cycle is done, or everything it was leased."""
        if self.undecided or not self.outstanding:
            return False
        return not self.todo or (len(self.outstanding) >= self.cycle and self.whole)


def trained(member: Member, rows: Rows) -> Member:
    """A step was made on these rows."""
    undecided = member.undecided and replace(member.undecided, after=member.undecided.after | rows)
    return replace(
        member,
        todo=member.todo - rows,
        outstanding=member.outstanding | rows,
        undecided=undecided,
        processed=member.processed + len(rows) * member.terms.tokens_per_row,
    )


def snapshot(member: Member) -> Member:
    """A snapshot was taken: everything outstanding is a contribution, undecided from now on."""
    assert member.undecided is None and member.outstanding
    identity = Identity(member.incarnation, member.sequence + 1)
    return replace(member, sequence=member.sequence + 1, undecided=Undecided(identity, member.outstanding))


def header(member: Member, norm: float, finite: bool, digests: tuple[str, ...]) -> tuple[Member, Header]:
    """The header of the undecided contribution, now that its payload is known."""
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


def beat(member: Member, rows_per_s: float | None, stalled: float = 0.0) -> Beat:
    """What it says to a coordinator."""
    return Beat(
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
    )


def granted(member: Member, reply: Granted, heard: int) -> Member:
    """The lease of a reply to a beat that was sent after `heard` adoptions."""
    if heard != member.heard:
        return replace(member, joined=True)
    return replace(member, joined=True, todo=reply.rows - member.outstanding, cycle=reply.cycle)


def news(member: Member, reply: Granted) -> Adopt | None:
    """Whether a reply brings something to adopt: a verdict, or a newer version while nothing is undecided."""
    how: Literal["snapshot", "anchor", "take", "fresh"] = "anchor"
    if member.undecided:
        if reply.verdict is None or reply.verdict.identity != member.undecided.identity:
            return None
        if reply.verdict.fate == "applied":
            how = "snapshot"
        elif reply.verdict.fate != "returned":
            how = "take" if member.undecided.finite else "fresh"
    elif reply.version <= member.base:
        return None
    return Adopt(how, _undecided(member), reply.version, reply.state)


def fits(member: Member, adopt: Adopt) -> bool:
    """Whether an adoption that was worth fetching may still be made: nothing became undecided meanwhile."""
    return adopt.verdict_on == _undecided(member)


def adopted(member: Member, adopt: Adopt, tokens: int) -> Member:
    """The books after an adoption of version `adopt.version`, at which `tokens` were counted; not for `fresh`."""
    assert adopt.how != "fresh"
    todo, outstanding = member.todo, member.outstanding
    if member.undecided and adopt.how == "snapshot":
        outstanding = member.undecided.after
    elif member.undecided and adopt.how == "take":
        todo, outstanding = todo | member.undecided.after, NOTHING
    return replace(
        member,
        base=adopt.version,
        tokens=tokens,
        todo=todo,
        outstanding=outstanding,
        undecided=None,
        heard=member.heard + 1,
    )


def _undecided(member: Member) -> Identity | None:
    return member.undecided.identity if member.undecided else None

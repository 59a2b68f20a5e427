"""What follows from the ledger: which rows are spent, how far the run is, who got which verdict."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.core.values import Decision, Identity, Incarnation, Record

LANDMARK = 50
"""The state of each so many-th record with contributors stays for ever."""


class Broken(ValueError):
    """A record that cannot follow the ones before it."""


@dataclass(frozen=True)
class Sums:
    """What records add up to, from genesis on, apart from the lives of members: a few hundred numbers."""

    counted: Rows = NOTHING
    skipped: Rows = NOTHING
    idle: tuple[int, ...] = (0,)
    """The versions without contributors, genesis among them: sorted, and few."""
    landmarks: tuple[str, ...] = ()
    """Digests of the states that stay for ever."""
    dropped: int = 0
    """Tokens of dropped contributions."""


@dataclass(frozen=True, kw_only=True)
class View(Sums):
    """The ledger up to its newest record. Its size follows the lives of members, hardly their pushes."""

    newest: Record
    processed: dict[Incarnation, int] = field(default_factory=dict)
    """Tokens trained, as each incarnation reported them last. Not to be changed in place."""
    verdicts: dict[Incarnation, tuple[Decision, int]] = field(default_factory=dict)
    """The newest verdict on each incarnation, with the version of its record. Not to be changed in place.

    It stands for all before: a member pushes again only once it has heard the verdict on its last push.
    """

    @staticmethod
    def of(genesis: Record, records: Iterable[Record] = ()) -> "View":
        """From genesis on; Broken where a record does not fit."""
        if (genesis.version, genesis.parent, genesis.decisions, genesis.tokens) != (0, "", (), 0):
            raise Broken("the first record is not a genesis record")
        return View(newest=genesis, landmarks=genesis.state).through(records)

    @property
    def version(self) -> int:
        """Number of the newest record."""
        return self.newest.version

    @property
    def tokens(self) -> int:
        """Counted."""
        return self.newest.tokens

    @cached_property
    def spent(self) -> Rows:
        """Counted or skipped: rows that will never be leased again."""
        return self.counted | self.skipped

    def staleness(self, base: int) -> int:
        """Records with contributors since version `base`."""
        return self.newest.changes - self.changes(base)

    def changes(self, version: int) -> int:
        """Records with contributors up to `version`; Broken where there is no such version yet."""
        if version > self.version:
            raise Broken(f"there is no version {version}: the newest is {self.version}")
        return version + 1 - bisect_right(self.idle, version)

    def verdict(self, identity: Identity) -> Decision | None:
        """On a contribution, if it is the last of its incarnation that has one."""
        found = self.verdicts.get(identity.incarnation)
        return found[0] if found and found[0].identity == identity else None

    def decided_pushes(self, incarnation: Incarnation) -> int:
        """Of an incarnation, those with a verdict; they are its first ones."""
        found = self.verdicts.get(incarnation)
        return found[0].identity.sequence if found else 0

    def has_decided(self, identity: Identity) -> bool:
        """Whether there is a verdict on a contribution."""
        key = identity.incarnation
        return key in self.verdicts and identity.sequence <= self.decided_pushes(key)

    def after(self, record: Record) -> "View":
        """With one more record; Broken, naming what does not fit, where it cannot be the next."""
        return self.through([record])

    def through(self, records: Iterable[Record]) -> "View":
        """With more records, as `after`: what grows with the run is copied once."""
        view, verdicts, processed = self, dict(self.verdicts), dict(self.processed)
        for record in records:
            view = view._after(record, verdicts, processed)
        return view

    def _after(
        self, record: Record, verdicts: dict[Incarnation, tuple[Decision, int]], processed: dict[Incarnation, int]
    ) -> "View":
        """verdicts and processed: of this view; changed in place."""
        name = f"record {record.version}"
        if (record.run, record.version) != (self.newest.run, self.version + 1):
            raise Broken(f"{name} of run {record.run} does not follow record {self.version} of run {self.newest.run}")
        if record.epoch < self.newest.epoch:
            raise Broken(f"{name} has epoch {record.epoch}, the one before it epoch {self.newest.epoch}")
        counted, skipped, tokens, dropped = self.counted, self.skipped, self.tokens, self.dropped
        applied = 0
        for decision in record.decisions:
            key, sequence = decision.identity.incarnation, decision.identity.sequence
            if key in verdicts and (last := verdicts[key][0].identity.sequence) >= sequence:
                raise Broken(f"{name} decides push {sequence} of {key}, of which push {last} was already decided")
            verdicts[key] = (decision, record.version)
            if decision.fate in ("applied", "dropped") and decision.rows & (counted | skipped):
                raise Broken(f"{name} counts or skips rows twice: {decision.rows & (counted | skipped)}")
            if decision.fate == "applied":
                counted, tokens, applied = counted | decision.rows, tokens + decision.tokens, applied + 1
            elif decision.fate == "dropped":
                skipped, dropped = skipped | decision.rows, dropped + decision.tokens
        changes = self.newest.changes + (applied > 0)
        if (record.tokens, record.changes) != (tokens, changes):
            raise Broken(
                f"{name} says {record.tokens} tokens in {record.changes} changes, its decisions give {tokens} in "
                f"{changes}"
            )
        if not applied and (record.state, record.outer) != (self.newest.state, self.newest.outer):
            raise Broken(f"{name} has no contributors but a new state")
        if bool(record.updates) != (applied > 0 and record.downlink != "plain"):
            raise Broken(f"{name} has {applied} contributors and {len(record.updates)} updates ({record.downlink})")
        for incarnation, trained in record.processed:
            processed[incarnation] = max(trained, processed.get(incarnation, 0))
        return View(
            newest=record,
            counted=counted,
            skipped=skipped,
            idle=self.idle if applied else (*self.idle, record.version),
            landmarks=(*self.landmarks, *record.state) if applied and changes % LANDMARK == 0 else self.landmarks,
            dropped=dropped,
            processed=processed,
            verdicts=verdicts,
        )

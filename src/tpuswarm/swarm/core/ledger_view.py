"""A view of the ledger: spent rows, counted tokens, and the last verdict on each incarnation."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Decision, Identity, Incarnation, Record

LANDMARK_INTERVAL = 50
"""Every so many records with contributors, the state is kept for ever."""


class InvalidRecord(ValueError):
    """A record that cannot follow the previous ones."""


@dataclass(frozen=True)
class LedgerTotals:
    """Totals over all records: a few hundred numbers, which do not depend on the number of incarnations."""

    counted: Rows = NO_ROWS
    skipped: Rows = NO_ROWS
    idle: tuple[int, ...] = (0,)
    """Versions without contributors, genesis included: sorted, and few."""
    landmarks: tuple[str, ...] = ()
    """Digests of the states that are kept for ever."""
    dropped: int = 0
    """Tokens of dropped contributions."""


@dataclass(frozen=True, kw_only=True)
class LedgerView(LedgerTotals):
    """The ledger up to its newest record. It grows with the number of incarnations, hardly with their pushes."""

    newest: Record
    processed: dict[Incarnation, int] = field(default_factory=dict)
    """Tokens trained, from the last report of each incarnation. Do not change in place."""
    verdicts: dict[Incarnation, tuple[Decision, int]] = field(default_factory=dict)
    """The last verdict on each incarnation, and the version of its record. Do not change in place.

    It covers all earlier pushes: a member pushes again only after it knows the verdict on its last push.
    """

    @staticmethod
    def from_records(genesis: Record, records: Iterable[Record] = ()) -> "LedgerView":
        """Build the view from all records. Raise InvalidRecord if one does not fit."""
        if (genesis.version, genesis.parent, genesis.decisions, genesis.tokens) != (0, "", (), 0):
            raise InvalidRecord("the first record is not a genesis record")
        return LedgerView(newest=genesis, landmarks=genesis.state).through(records)

    @property
    def version(self) -> int:
        return self.newest.version

    @property
    def tokens(self) -> int:
        return self.newest.tokens

    @cached_property
    def spent(self) -> Rows:
        """Rows counted or skipped, which are never leased again."""
        return self.counted | self.skipped

    def staleness(self, base: int) -> int:
        """Return the number of records with contributors since version `base`."""
        return self.newest.changes - self.changes(base)

    def changes(self, version: int) -> int:
        """Return the number of records with contributors up to `version`. Raise InvalidRecord if it does not exist."""
        if version > self.version:
            raise InvalidRecord(f"there is no version {version}: the newest is {self.version}")
        return version + 1 - bisect_right(self.idle, version)

    def verdict(self, identity: Identity) -> Decision | None:
        """Return the verdict on a contribution, if it is the last verdict on its incarnation."""
        found = self.verdicts.get(identity.incarnation)
        return found[0] if found and found[0].identity == identity else None

    def decided_pushes(self, incarnation: Incarnation) -> int:
        """Return how many pushes of an incarnation have a verdict; these are its first ones."""
        found = self.verdicts.get(incarnation)
        return found[0].identity.sequence if found else 0

    def has_decided(self, identity: Identity) -> bool:
        key = identity.incarnation
        return key in self.verdicts and identity.sequence <= self.decided_pushes(key)

    def after(self, record: Record) -> "LedgerView":
        """Add a record. Raise InvalidRecord, naming the contradiction, if it cannot be the next."""
        return self.through([record])

    def through(self, records: Iterable[Record]) -> "LedgerView":
        """Add several records, as `after` does, copying the dictionaries once."""
        view = self
        for view in self.growing(records):  # noqa: B007
            pass
        return view

    def growing(self, records: Iterable[Record]) -> Iterator["LedgerView"]:
        """Yield the view after each record. They share dictionaries: the next one changes those of this one."""
        view, verdicts, processed = self, dict(self.verdicts), dict(self.processed)
        for record in records:
            view = view._after(record, verdicts, processed)
            yield view

    def _after(
        self, record: Record, verdicts: dict[Incarnation, tuple[Decision, int]], processed: dict[Incarnation, int]
    ) -> "LedgerView":
        """Add a record, changing `verdicts` and `processed` in place, unless it raises InvalidRecord."""
        name = f"record {record.version}"
        if (record.run, record.version) != (self.newest.run, self.version + 1):
            raise InvalidRecord(
                f"{name} of run {record.run} does not follow record {self.version} of run {self.newest.run}"
            )
        if record.epoch < self.newest.epoch:
            raise InvalidRecord(f"{name} has epoch {record.epoch}, the one before it epoch {self.newest.epoch}")
        counted, skipped, tokens, dropped = self.counted, self.skipped, self.tokens, self.dropped
        applied = 0
        decided: dict[Incarnation, tuple[Decision, int]] = {}
        for decision in record.decisions:
            key, sequence = decision.identity.incarnation, decision.identity.sequence
            before = decided.get(key) or verdicts.get(key)
            if before and (last := before[0].identity.sequence) >= sequence:
                raise InvalidRecord(
                    f"{name} decides push {sequence} of {key}, of which push {last} was already decided"
                )
            decided[key] = (decision, record.version)
            if decision.fate in ("applied", "dropped") and (decision.rows & counted or decision.rows & skipped):
                raise InvalidRecord(f"{name} counts or skips rows twice: {decision.rows & (counted | skipped)}")
            if decision.fate == "applied":
                counted, tokens, applied = counted | decision.rows, tokens + decision.tokens, applied + 1
            elif decision.fate == "dropped":
                skipped, dropped = skipped | decision.rows, dropped + decision.tokens
        changes = self.newest.changes + (applied > 0)
        if (record.tokens, record.changes) != (tokens, changes):
            raise InvalidRecord(
                f"{name} has {record.tokens} tokens in {record.changes} changes, its decisions give {tokens} in "
                f"{changes}"
            )
        if not applied and (record.state, record.outer) != (self.newest.state, self.newest.outer):
            raise InvalidRecord(f"{name} has no contributors but a new state")
        if bool(record.updates) != (applied > 0 and record.downlink != "plain"):
            raise InvalidRecord(
                f"{name} has {applied} contributors and {len(record.updates)} updates ({record.downlink})"
            )
        verdicts.update(decided)
        for incarnation, trained in record.processed:
            processed[incarnation] = max(trained, processed.get(incarnation, 0))
        return LedgerView(
            newest=record,
            counted=counted,
            skipped=skipped,
            idle=self.idle if applied else (*self.idle, record.version),
            landmarks=(*self.landmarks, *record.state)
            if applied and changes % LANDMARK_INTERVAL == 0
            else self.landmarks,
            dropped=dropped,
            processed=processed,
            verdicts=verdicts,
        )

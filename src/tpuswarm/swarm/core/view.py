"""What follows from the ledger: which rows are decided, how far the run is, who got which verdict."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.core.values import Decision, Identity, Incarnation, Record


class Broken(ValueError):
    """A record that cannot follow the ones before it."""


@dataclass(frozen=True)
class View:
    """The ledger up to its newest record."""

    newest: Record
    counted: Rows = NOTHING
    skipped: Rows = NOTHING
    changes: tuple[int, ...] = (0,)
    """Of each version: records with contributors up to it."""
    tokens: tuple[int, ...] = (0,)
    """Of each version: tokens counted up to it."""
    dropped: int = 0
    """Tokens of dropped contributions."""
    processed: dict[Incarnation, int] = field(default_factory=dict)
    """Tokens trained, as each incarnation reported them last. Not to be changed in place."""
    verdicts: dict[Identity, tuple[Decision, int]] = field(default_factory=dict)
    """Every verdict, with the version of its record. Not to be changed in place."""

    @staticmethod
    def of(genesis: Record, records: Iterable[Record] = ()) -> "View":
        """From genesis on; Broken where a record does not fit."""
        if (genesis.version, genesis.parent, genesis.decisions, genesis.tokens) != (0, "", (), 0):
            raise Broken("the first record is not a genesis record")
        return View(genesis).through(records)

    @property
    def version(self) -> int:
        """Number of the newest record."""
        return self.newest.version

    @cached_property
    def decided(self) -> Rows:
        """Rows that will never be leased again."""
        return self.counted | self.skipped

    def staleness(self, base: int) -> int:
        """Records with contributors since version `base`."""
        return self.changes[-1] - self.changes[base]

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
        self, record: Record, verdicts: dict[Identity, tuple[Decision, int]], processed: dict[Incarnation, int]
    ) -> "View":
        """verdicts and processed: of this view; changed in place."""
        name = f"record {record.version}"
        if (record.run, record.version) != (self.newest.run, self.version + 1):
            raise Broken(f"{name} of run {record.run} does not follow record {self.version} of run {self.newest.run}")
        if record.epoch < self.newest.epoch:
            raise Broken(f"{name} has epoch {record.epoch}, the one before it epoch {self.newest.epoch}")
        counted, skipped, tokens, dropped = self.counted, self.skipped, self.tokens[-1], self.dropped
        applied = 0
        for decision in record.decisions:
            if decision.identity in verdicts:
                raise Broken(f"{name} decides {decision.identity} twice")
            verdicts[decision.identity] = (decision, record.version)
            if decision.fate in ("applied", "dropped") and decision.rows & (counted | skipped):
                raise Broken(f"{name} counts or skips rows twice: {decision.rows & (counted | skipped)}")
            if decision.fate == "applied":
                counted, tokens, applied = counted | decision.rows, tokens + decision.tokens, applied + 1
            elif decision.fate == "dropped":
                skipped, dropped = skipped | decision.rows, dropped + decision.tokens
        changes = self.changes[-1] + (applied > 0)
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
            changes=(*self.changes, changes),
            tokens=(*self.tokens, tokens),
            dropped=dropped,
            processed=processed,
            verdicts=verdicts,
        )

"""Commits as rows of text for the screen and the report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tpuswarm.swarm.core.values import Decision, Fate, Record, Rule
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store

COMMIT_COLUMNS = ("commit", "time", "epoch", "contributors", "not counted", "tokens", "total", "rule")


@dataclass(frozen=True)
class Verdict:
    """A commit's verdict on one contribution."""

    member: str
    incarnation: str
    sequence: int
    fate: Fate
    reason: str
    rows: int
    """Number of rows."""
    base: int
    tokens: int
    weight: float
    clip: float


@dataclass(frozen=True)
class Commit:
    """A record in the form that is shown."""

    verdicts: list[Verdict]
    """Sorted by identity."""
    version: int
    epoch: int
    time: float
    """Seconds since 1970."""
    rule: Rule
    rate: float
    momentum: float
    tokens: int
    """Tokens counted in the whole run so far."""


def read_commits(store: Store, last: int) -> list[Commit]:
    """Return the last commits, oldest first; read only their records.

    Raise RunFailed if a record is damaged or missing.
    """
    ledger = Ledger(store)
    return [to_commit(record) for record in ledger.records(ledger.contiguous_versions()[-last:])]


def commit_row(commit: Commit) -> Sequence[str]:
    """Return a commit's cells for COMMIT_COLUMNS."""
    applied = [verdict for verdict in commit.verdicts if verdict.fate == "applied"]
    others = [verdict for verdict in commit.verdicts if verdict.fate != "applied"]
    rule = commit.rule + (f" at {commit.rate:g}" if commit.rule != "average" else "")
    return (
        str(commit.version),
        time.strftime("%m-%d %H:%M:%S", time.localtime(commit.time)),
        str(commit.epoch),
        ", ".join(f"{part.member} {part.weight:.0%} ({part.tokens:,})" for part in applied) or "–",
        "; ".join(f"{part.member} {part.fate}: {part.reason} ({part.tokens:,})" for part in others),
        f"{sum(verdict.tokens for verdict in applied):,}",
        f"{commit.tokens:,}",
        rule if applied else "–",
    )


def to_commit(record: Record) -> Commit:
    """Convert a record."""
    verdicts = [_verdict(decision) for decision in record.decisions]
    return Commit(
        verdicts, record.version, record.epoch, record.time, record.rule, record.rate, record.momentum, record.tokens
    )


def _verdict(decision: Decision) -> Verdict:
    key = decision.identity.incarnation
    return Verdict(
        key.member, key.name, decision.identity.sequence, decision.fate, decision.reason,
        len(decision.rows), decision.base, decision.tokens, decision.weight, decision.clip,
    )  # fmt: skip

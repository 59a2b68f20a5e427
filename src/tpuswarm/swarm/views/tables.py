"""Commits as rows of text: for the screen and for the report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tpuswarm.swarm.core.values import Decision, Fate, Record, Rule
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store

COMMIT_COLUMNS = ("commit", "time", "epoch", "contributors", "not counted", "tokens", "total", "rule")


@dataclass(frozen=True)
class Verdict:
    """What a commit says of one contribution."""

    member: str
    incarnation: str
    sequence: int
    fate: Fate
    reason: str
    rows: int
    """How many."""
    base: int
    tokens: int
    weight: float
    clip: float


@dataclass(frozen=True)
class Commit:
    """One record, as it is shown."""

    verdicts: list[Verdict]
    """In the order of identities."""
    version: int
    epoch: int
    time: float
    """Seconds since 1970."""
    rule: Rule
    rate: float
    momentum: float
    tokens: int
    """Counted in the whole run up to it."""


def read_commits(store: Store, last: int) -> list[Commit]:
    """The last so many commits, oldest first; only their records are read.

    Raises RunFailed for a record that is damaged or missing.
    """
    ledger = Ledger(store)
    return [commit_of(record) for record in ledger.records(ledger.unbroken()[-last:])]


def commit_row(commit: Commit) -> Sequence[str]:
    """A commit under COMMIT_COLUMNS."""
    applied = [each for each in commit.verdicts if each.fate == "applied"]
    others = [each for each in commit.verdicts if each.fate != "applied"]
    rule = commit.rule + (f" at {commit.rate:g}" if commit.rule != "average" else "")
    return (
        str(commit.version),
        time.strftime("%m-%d %H:%M:%S", time.localtime(commit.time)),
        str(commit.epoch),
        ", ".join(f"{each.member} {each.weight:.0%} ({each.tokens:,})" for each in applied) or "–",
        "; ".join(f"{each.member} {each.fate}: {each.reason} ({each.tokens:,})" for each in others),
        f"{sum(each.tokens for each in applied):,}",
        f"{commit.tokens:,}",
        rule if applied else "–",
    )


def commit_of(record: Record) -> Commit:
    """A record as it is shown."""
    verdicts = [_verdict(each) for each in record.decisions]
    return Commit(
        verdicts, record.version, record.epoch, record.time, record.rule, record.rate, record.momentum, record.tokens
    )


def _verdict(decision: Decision) -> Verdict:
    key = decision.identity.incarnation
    return Verdict(
        key.member, key.name, decision.identity.sequence, decision.fate, decision.reason,
        len(decision.rows), decision.base, decision.tokens, decision.weight, decision.clip,
    )  # fmt: skip

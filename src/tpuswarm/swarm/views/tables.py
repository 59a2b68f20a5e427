"""Commits as rows of text: for the screen and for the report."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpuswarm.swarm.core.values import Decision, Fate, Record, Rule
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, first_gap
from tpuswarm.swarm.storage.store import Missing, Store

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


class MemberTotals(NamedTuple):
    """What became of a member's contributions: their number, and tokens by fate."""

    member: str
    contributions: int
    applied: int
    returned: int
    dropped: int
    void: int


def read_commits(store: Store, last: int | None = None) -> list[Commit]:
    """The last so many commits, or all of them, oldest first; only their records are read.

    Raises RunFailed for a record that is damaged or missing.
    """
    ledger = Ledger(store)
    versions = ledger.versions()
    if (gap := first_gap(versions)) < len(versions):
        raise Missing(commit_name(gap), store.root)
    return [_commit(record) for record in ledger.records(versions if last is None else versions[-last:])]


def member_totals(commits: Iterable[Commit]) -> list[MemberTotals]:
    """What each member contributed to them, by name."""
    found: dict[str, list[Verdict]] = {}
    for commit in commits:
        for each in commit.verdicts:
            found.setdefault(each.member, []).append(each)

    def tokens(verdicts: Iterable[Verdict], fate: Fate) -> int:
        return sum(each.tokens for each in verdicts if each.fate == fate)

    return [
        MemberTotals(
            member,
            len(own),
            tokens(own, "applied"),
            tokens(own, "returned"),
            tokens(own, "dropped"),
            tokens(own, "void"),
        )
        for member, own in sorted(found.items())
    ]


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


def _commit(record: Record) -> Commit:
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

"""Commits as rows of text: for the screen and for the report."""

import time
from collections.abc import Sequence

from tpuswarm.swarm.storage.ledger import Ledger, commit_name, first_gap
from tpuswarm.swarm.storage.store import Missing, Store
from tpuswarm.swarm.views.index import Commit, Index, MemberTotals

COMMIT_COLUMNS = ("commit", "time", "epoch", "contributors", "not counted", "tokens", "total", "rule")


def read_commits(store: Store, last: int | None = None) -> tuple[list[Commit], list[MemberTotals]]:
    """The last so many commits, or all of them, oldest first; and what each member contributed to all of them.

    Raises RunFailed for a record that is damaged or missing.
    """
    ledger = Ledger(store)
    versions = ledger.versions()
    if (gap := first_gap(versions)) < len(versions):
        raise Missing(commit_name(gap), store.root)
    if last is not None:
        ledger.records(versions[-last:])  # the index would go on saying what a damaged one once said
    index = Index(ledger)
    try:
        return index.commits(len(versions) if last is None else last), index.members()
    finally:
        index.close()


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

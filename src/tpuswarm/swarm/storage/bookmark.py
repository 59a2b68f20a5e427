"""Bookmarks: the view of a ledger at one of its records, so that earlier records need not be read again.

They are a cache. A bookmark is used only if its record has the digest that it names.
"""

import re
from dataclasses import dataclass, fields
from typing import Literal

from tpuswarm.swarm.core.ledger_view import LANDMARK_INTERVAL, LedgerTotals, LedgerView
from tpuswarm.swarm.core.rows import Ranges, Rows
from tpuswarm.swarm.core.values import Decision, Fate, Identity, Incarnation, Record

BOOKMARK_INTERVAL = 100
"""Commits between two bookmarks, in a run with few incarnations."""
INCARNATIONS_PER_DOUBLING = 10_000
"""The interval doubles with the number of incarnations, to bound the cost of a bookmark per commit."""
KEPT_COUNT = 2
"""Bookmarks kept: the newest may be damaged or still being written."""
FOLDER = "views/"
_NAME = re.compile(rf"{FOLDER}(\d{{6,}})\.json")

VerdictRow = tuple[str, str, int, Fate, str, Ranges, int, int, float, float, int]
"""A verdict: member and name of the incarnation, sequence, fate, reason, rows, base, tokens, weight, clip; version.

A long run has many incarnations: a tuple costs microseconds, nested values a hundred times as much.
"""


@dataclass(frozen=True)
class Bookmark:
    """A view without its newest record."""

    form: Literal[2]
    """Version of the format; others are ignored."""
    digest: str
    """Digest of its record."""
    sums: LedgerTotals
    processed: tuple[tuple[str, str, int], ...]
    """Member, name and tokens of each incarnation; sorted."""
    verdicts: tuple[VerdictRow, ...]
    """Sorted."""


def make_bookmark(view: LedgerView, digest: str) -> Bookmark:
    """Make a bookmark at a view's newest record, which has this digest. The same view gives the same bytes."""
    return Bookmark(
        form=2,
        digest=digest,
        sums=LedgerTotals(**{total.name: getattr(view, total.name) for total in fields(LedgerTotals)}),
        processed=tuple(sorted((key.member, key.name, tokens) for key, tokens in view.processed.items())),
        verdicts=tuple(sorted(_to_row(*last) for last in view.verdicts.values())),
    )


def _to_row(decision: Decision, version: int) -> VerdictRow:
    key = decision.identity.incarnation
    return (
        key.member, key.name, decision.identity.sequence, decision.fate, decision.reason, decision.rows.ranges,
        decision.base, decision.tokens, float(decision.weight), float(decision.clip), version,
    )  # fmt: skip


def _from_row(row: VerdictRow) -> tuple[Decision, int]:
    member, name, sequence, fate, reason, ranges, base, tokens, weight, clip, version = row
    identity = Identity(Incarnation(member, name), sequence)
    return Decision(identity, fate, reason, Rows(ranges), base, tokens, weight, clip), version


def restore_view(found: Bookmark, newest: Record) -> LedgerView | None:
    """Restore the view from a bookmark and its record; None if they contradict each other."""
    try:
        verdicts = {last.identity.incarnation: (last, version) for last, version in map(_from_row, found.verdicts)}
    except ValueError:  # these are not rows
        return None
    processed = {Incarnation(member, name): tokens for member, name, tokens in found.processed}
    view = LedgerView(newest=newest, processed=processed, verdicts=verdicts, **vars(found.sums))
    return view if _agrees(view) else None


def _agrees(view: LedgerView) -> bool:
    """Whether the view agrees with its newest record."""
    newest = view.newest
    return (
        view.changes(view.version) == newest.changes
        and len(view.landmarks) == (1 + newest.changes // LANDMARK_INTERVAL) * len(newest.state)
        and all(view.verdict(decision.identity) == decision for decision in newest.decisions)
        and all(
            len(view.counted) * decision.tokens == newest.tokens * len(decision.rows)
            for decision in newest.decisions
            if decision.fate == "applied"
        )
    )


def is_bookmark_due(view: LedgerView) -> bool:
    """Whether to leave a bookmark at a view's newest record."""
    incarnations = max(len(view.processed), len(view.verdicts))
    interval = BOOKMARK_INTERVAL << (incarnations // INCARNATIONS_PER_DOUBLING).bit_length()
    return view.version > 0 and view.version % interval == 0


def bookmark_name(version: int) -> str:
    return f"{FOLDER}{version:06d}.json"


def bookmark_version(name: str) -> int | None:
    """Return the version of a bookmark's file; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def outdated_bookmarks(versions: list[int], version: int) -> list[int]:
    """Return the bookmarks that are not needed once there is one at `version`; versions: the stored ones.

    A newer one is kept: this may be a coordinator that stood still.
    """
    below = sorted({*(other for other in versions if other <= version), version})
    return [other for other in below[:-KEPT_COUNT] if other in versions]

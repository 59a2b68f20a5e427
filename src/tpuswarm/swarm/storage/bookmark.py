"""Bookmarks in a ledger: what follows from the records up to one of them, so that nobody has to read those again.

A cache: it is believed only where the record at which it stands has the digest that it names.
"""

import re
from dataclasses import dataclass, fields
from typing import Literal

from tpuswarm.swarm.core.rows import Ranges, Rows
from tpuswarm.swarm.core.values import Decision, Fate, Identity, Incarnation, Record
from tpuswarm.swarm.core.view import LANDMARK, Sums, View

EVERY = 100
"""Commits from one to the next, of a run with few lives of members behind it."""
LIVES = 10_000
"""With so many, twice as many commits, and so on: a commit pays for at most LIVES / EVERY of them."""
KEPT = 2
"""So many stay: while one is written, and in case the newest is damaged."""
FOLDER = "views/"
_NAME = re.compile(rf"{FOLDER}(\d{{6,}})\.json")

Ruled = tuple[str, str, int, Fate, str, Ranges, int, int, float, float, int]
"""A verdict: member and name of the incarnation, sequence, fate, reason, rows, base, tokens, weight, clip; version.

A long run has many lives of members behind it: one takes microseconds as a tuple, and a hundred as nested values.
"""


@dataclass(frozen=True)
class Bookmark:
    """A view without its newest record."""

    form: Literal[2]
    """Of what is in it and what follows from a record: another one is ignored."""
    digest: str
    """Of the record at which it stands."""
    sums: Sums
    processed: tuple[tuple[str, str, int], ...]
    """Member and name of each incarnation, and its tokens; sorted."""
    verdicts: tuple[Ruled, ...]
    """Sorted."""


def bookmark(view: View, digest: str) -> Bookmark:
    """At the newest record of a view; digest: of that record. The same view gives the same bytes."""
    return Bookmark(
        form=2,
        digest=digest,
        sums=Sums(**{each.name: getattr(view, each.name) for each in fields(Sums)}),
        processed=tuple(sorted((key.member, key.name, tokens) for key, tokens in view.processed.items())),
        verdicts=tuple(sorted(_ruled(*last) for last in view.verdicts.values())),
    )


def _ruled(on: Decision, version: int) -> Ruled:
    key = on.identity.incarnation
    return (
        key.member, key.name, on.identity.sequence, on.fate, on.reason, on.rows.ranges, on.base, on.tokens,
        float(on.weight), float(on.clip), version,
    )  # fmt: skip


def _read(ruled: Ruled) -> tuple[Decision, int]:
    member, name, sequence, fate, reason, ranges, base, tokens, weight, clip, version = ruled
    identity = Identity(Incarnation(member, name), sequence)
    return Decision(identity, fate, reason, Rows(ranges), base, tokens, weight, clip), version


def opened(found: Bookmark, newest: Record) -> View | None:
    """The view that a bookmark was made of; None where both do not agree. newest: the record at which it stands."""
    try:
        verdicts = {last.identity.incarnation: (last, version) for last, version in map(_read, found.verdicts)}
    except ValueError:  # these are no rows
        return None
    processed = {Incarnation(member, name): tokens for member, name, tokens in found.processed}
    view = View(newest=newest, processed=processed, verdicts=verdicts, **vars(found.sums))
    return view if _agrees(view) else None


def _agrees(view: View) -> bool:
    """Whether what the newest record says by itself is what the view says: whoever wrote it may have been another."""
    newest = view.newest
    return (
        view.changes(view.version) == newest.changes
        and len(view.landmarks) == (1 + newest.changes // LANDMARK) * len(newest.state)
        and all(view.verdict(each.identity) == each for each in newest.decisions)
        and all(
            len(view.counted) * each.tokens == newest.tokens * len(each.rows)
            for each in newest.decisions
            if each.fate == "applied"
        )
    )


def due(view: View) -> bool:
    """Whether a bookmark belongs at the newest record of a view."""
    lives = max(len(view.processed), len(view.verdicts))
    return view.version > 0 and view.version % (EVERY << (lives // LIVES).bit_length()) == 0


def bookmark_name(version: int) -> str:
    """Of a bookmark's file."""
    return f"{FOLDER}{version:06d}.json"


def bookmark_version(name: str) -> int | None:
    """Of the record at which a file of that name stands; None where it is no bookmark's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def outlived(versions: list[int], version: int) -> list[int]:
    """The bookmarks of which none is needed once there is one at `version`; versions: those that are there.

    One above it stays: a coordinator that stood still may be late with its own.
    """
    below = sorted({*(each for each in versions if each <= version), version})
    return [each for each in below[:-KEPT] if each in versions]

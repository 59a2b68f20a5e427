"""Bookmarks in a ledger: what follows from the records up to one of them, so that nobody has to read those again.

A cache: it is believed only where the record at which it stands has the digest that it names.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Incarnation, Record
from tpuswarm.swarm.core.view import LANDMARK, View

EVERY = 100
"""Commits from one to the next."""
KEPT = 2
"""So many stay: while one is written, and in case the newest is damaged."""
FOLDER = "views/"
_NAME = re.compile(rf"{FOLDER}(\d{{6,}})\.json")


@dataclass(frozen=True)
class Bookmark:
    """A view without its newest record."""

    form: Literal[1]
    """Of what is in it and what follows from a record: another one is ignored."""
    digest: str
    """Of the record at which it stands."""
    counted: Rows
    skipped: Rows
    idle: tuple[int, ...]
    landmarks: tuple[str, ...]
    dropped: int
    processed: tuple[tuple[Incarnation, int], ...]
    verdicts: tuple[tuple[Decision, int], ...]


def bookmark(view: View, digest: str) -> Bookmark:
    """At the newest record of a view; digest: of that record. The same view gives the same bytes."""
    return Bookmark(
        form=1,
        digest=digest,
        counted=view.counted,
        skipped=view.skipped,
        idle=view.idle,
        landmarks=view.landmarks,
        dropped=view.dropped,
        processed=tuple(sorted(view.processed.items())),
        verdicts=tuple(view.verdicts[key] for key in sorted(view.verdicts)),
    )


def opened(found: Bookmark, newest: Record) -> View | None:
    """The view that a bookmark was made of; None where both do not agree. newest: the record at which it stands."""
    view = View(
        newest=newest,
        counted=found.counted,
        skipped=found.skipped,
        idle=found.idle,
        landmarks=found.landmarks,
        dropped=found.dropped,
        processed=dict(found.processed),
        verdicts={decision.identity.incarnation: (decision, version) for decision, version in found.verdicts},
    )
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

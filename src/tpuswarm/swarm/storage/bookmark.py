"""Bookmarks in a ledger: what follows from the records up to one of them, so that nobody has to read those again.

A cache: it is believed only where the record at which it stands has the digest that it names.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Incarnation, Record
from tpuswarm.swarm.core.view import View

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
    record: str
    """Digest of the record at which it stands."""
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
        record=digest,
        counted=view.counted,
        skipped=view.skipped,
        idle=view.idle,
        landmarks=view.landmarks,
        dropped=view.dropped,
        processed=tuple(sorted(view.processed.items())),
        verdicts=tuple(view.verdicts[key] for key in sorted(view.verdicts)),
    )


def opened(found: Bookmark, newest: Record) -> View:
    """The view that a bookmark was made of. newest: the record at which it stands."""
    return View(
        newest=newest,
        counted=found.counted,
        skipped=found.skipped,
        idle=found.idle,
        landmarks=found.landmarks,
        dropped=found.dropped,
        processed=dict(found.processed),
        verdicts={decision.identity.incarnation: (decision, version) for decision, version in found.verdicts},
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

    One above it is of records that are no more, or of a coordinator that will write others.
    """
    kept = sorted({*(each for each in versions if each <= version), version})[-KEPT:]
    return [each for each in versions if each not in kept]

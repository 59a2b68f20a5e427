"""Inner states: what a member has and does not share, kept for its next incarnation and counted in nothing.

Losing one costs a ramp of some steps, so nothing here is an error: what cannot be read or does not fit is not there.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.values import Identity, Record
from tpuswarm.swarm.objects import checked_member
from tpuswarm.swarm.store import Store

INNER_SAVE = 600.0
"""Seconds between two saves of a member's inner state, at least."""


@dataclass(frozen=True)
class Saved:
    """A whole inner state in the run's storage; written after its pieces."""

    identity: Identity
    """The contribution with which it was saved."""
    base: int
    """The version that contribution started from."""
    specs: str
    """SHA-256 of the names, shapes and dtypes of its leaves."""
    digests: tuple[str, ...]
    """SHA-256 of each piece."""


_SAVED: TypeAdapter[Saved] = TypeAdapter(Saved)


def piece_digest(piece: np.ndarray) -> str:
    """SHA-256, in hexadecimal, of uint8[n]."""
    return hashlib.sha256(piece.data).hexdigest()


class InnerStates:
    """The files inner/MEMBER/BASE-INCARNATION-SEQUENCE/: pieces, and `saved.json`. Each is written whole, once."""

    def __init__(self, store: Store):
        self._store = store

    def put(self, identity: Identity, base: int, number: int, piece: np.ndarray) -> None:
        """Keep a piece; the same again changes nothing."""
        self._store.put(f"{_folder(identity, base)}/{number}", piece.tobytes())

    def finish(self, saved: Saved) -> None:
        """All pieces are there: this is the member's inner state now, and older ones go."""
        folder = _folder(saved.identity, saved.base)
        self._store.put(f"{folder}/saved.json", _SAVED.dump_json(saved))
        for name in self._names(saved.identity.incarnation.member):
            if name < folder:
                self._store.delete(name)

    def find(self, member: str) -> Saved | None:
        """The newest that is whole; None where there is none."""
        for name in reversed(self._names(member)):
            if name.endswith("/saved.json"):
                with suppress(RunFailed, ValidationError):
                    return _SAVED.validate_json(self._store.read(name))
        return None

    def get(self, saved: Saved, number: int) -> np.ndarray | None:
        """A piece, uint8[n]; None where it is missing or damaged."""
        with suppress(RunFailed):
            data = self._store.read(f"{_folder(saved.identity, saved.base)}/{number}")
            piece = np.frombuffer(data, np.uint8)
            if piece_digest(piece) == saved.digests[number]:
                return piece
        return None

    def drop(self, member: str) -> None:
        """Forget all of a member's."""
        for name in self._names(member):
            self._store.delete(name)

    def clean(self, records: Sequence[Record], limit: int) -> None:
        """Forget those that no incarnation can take up any more, whoever's they are.

        records: all of the ledger; limit: changes that the base of an inner state may be behind the newest version.
        """
        oldest = next(each.version for each in records if records[-1].changes - each.changes <= limit)
        for name in self._store.names("inner/"):
            if name.split("/")[2] < f"{oldest:08d}":
                self._store.delete(name)

    def _names(self, member: str) -> list[str]:
        return self._store.names(f"inner/{checked_member(member)}/")


def _folder(identity: Identity, base: int) -> str:
    key = identity.incarnation
    return f"inner/{checked_member(key.member)}/{base:08d}-{key.name}-{identity.sequence:08d}"

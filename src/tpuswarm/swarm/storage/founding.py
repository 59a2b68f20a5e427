"""The founding of a run: the layout of its shared parameters, in a file that is created once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tpuswarm.swarm.core.arithmetic.fragments import Layout, Piece
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

FOUNDING = "founding.json"


@dataclass(frozen=True)
class Founding:
    """The layout of the shared parameters, reported by the member that created the first ones."""

    fragments: tuple[tuple[Piece, ...], ...]
    chosen: dict[str, Any]
    """How its program runs (train/loop/run_config.py)."""

    def __post_init__(self) -> None:
        """Raise ValueError if the fragments are no layout."""
        self.layout  # noqa: B018

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.fragments)


_FOUNDING: TypeAdapter[Founding] = TypeAdapter(Founding)


def keep_founding(store: Store, founding: Founding) -> None:
    """Create the file if it does not exist."""
    store.create(FOUNDING, _FOUNDING.dump_json(founding))


def read_founding(store: Store) -> Founding | None:
    """Return the founding of a run, None before it. Raise Corrupt for a damaged file."""
    try:
        return _FOUNDING.validate_json(store.read(FOUNDING))
    except Missing:
        return None
    except ValidationError as error:
        raise Corrupt(FOUNDING, store.root, error.errors()[0]["msg"]) from error

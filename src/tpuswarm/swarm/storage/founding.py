"""What the founder of a run found: the layout of its shared state, in a file that is created once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tpuswarm.swarm.core.arithmetic.fragments import Layout, Leaf
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

FOUNDING = "founding.json"


@dataclass(frozen=True)
class Founding:
    """The layout of the shared state: reported by the member that made the first one."""

    fragments: tuple[tuple[Leaf, ...], ...]
    chosen: dict[str, Any]
    """How its program runs (train/loop/recorded.py)."""

    @cached_property
    def layout(self) -> Layout:
        """The layout of its fragments."""
        return Layout(self.fragments)


_FOUNDING: TypeAdapter[Founding] = TypeAdapter(Founding)


def keep_founding(store: Store, founding: Founding) -> None:
    """Create the file, where it is not there."""
    store.create(FOUNDING, _FOUNDING.dump_json(founding))


def read_founding(store: Store) -> Founding | None:
    """The founding of a run; None before it. Raises Corrupt where it is none."""
    try:
        return _FOUNDING.validate_json(store.read(FOUNDING))
    except Missing:
        return None
    except ValidationError as error:
        raise Corrupt(FOUNDING, store.root, error.errors()[0]["msg"]) from error

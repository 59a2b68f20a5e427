"""What an aggregator's process serves: the first state, the run's files, then its shard."""

from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.swarm.core.arithmetic.outer import Outer, first_state
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.founder import read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store


class Shard:
    """One life of an aggregator's process; the methods of its Aggregator are its own once the run is founded."""

    def __init__(self, store: Store, data: Path, index: int, shards: int):
        """data: the folder of the files that members fetch."""
        self._store, self._data, self._index, self._shards = store, data, index, shards
        self._objects = Objects(store)
        self._aggregator: Aggregator | None = None

    def found(self, fragment: np.ndarray, outer: Outer) -> tuple[str, str | None]:
        """Store a fragment, float32[n], of the first state; its digest, and that of its outer state if there is one."""
        first = first_state(outer, fragment)
        return self._objects.put_array(fragment), None if first is None else self._objects.put_array(first)

    def file(self, name: str, start: int, count: int) -> bytes:
        """A part of one of the run's data files."""
        with (self._data / Path(name).name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    def __getattr__(self, name: str) -> Any:
        if self._aggregator is None:
            founding = read_founding(self._store)
            if founding is None:
                raise AttributeError(f"{name}: the run has not been created yet")
            shards = min(self._shards, len(founding.fragments))
            ledger = Ledger(self._store)
            self._aggregator = Aggregator(ledger, self._objects, founding.layout.sizes, self._index, shards)
        return getattr(self._aggregator, name)

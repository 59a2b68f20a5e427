"""What an aggregator's process serves: the first state, the run's files, then its shard."""

from pathlib import Path

import numpy as np

from tpuswarm.swarm.core.arithmetic.outer import Outer, first_state
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.storage.founding import read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store


class Shard(Aggregator):
    """One life of an aggregator's process: an Aggregator that also takes part in the founding of its run."""

    def __init__(self, store: Store, data: Path, index: int, shards: int):
        """data: the folder of the files that members fetch."""
        super().__init__(Ledger(store), Objects(store), (), index, shards)
        self._store, self._data = store, data

    def found(self, fragment: np.ndarray, outer: Outer) -> tuple[str, str | None]:
        """Store a fragment, float32[n], of the first state; its digest, and that of its outer state if there is one."""
        first = first_state(outer, fragment)
        return self._objects.put_array(fragment), None if first is None else self._objects.put_array(first)

    def file(self, name: str, start: int, count: int) -> bytes:
        """A part of one of the run's data files."""
        with (self._data / Path(name).name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment, read once the run is founded: nobody asks for one before."""
        if not self._sizes and (founding := read_founding(self._store)) is not None:
            self._sizes = founding.layout.sizes
        return self._sizes

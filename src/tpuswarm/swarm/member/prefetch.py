"""Rows of a lease on their way to the devices, ahead of the steps."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.train.data.feed import DEPTH
from tpuswarm.train.recipe import Batch


class Prefetch:
    """Reads the batches that come next in a thread of its own.

    A lease has gaps, changes at any time, and rows may come back to its head: what was read and is not among the next
    batches any more is dropped.
    """

    def __init__(self, read: Callable[[Rows], Batch]):
        """read: brings the rows of one batch to the devices."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._coming: dict[Rows, Future[Batch]] = {}

    def next(self, rows: Rows, ahead: Rows) -> Batch:
        """The batch of `rows`; raises what reading it raised. ahead: what is leased after it."""
        wanted = [rows]
        while len(wanted) <= DEPTH and len(following := ahead.first(len(rows))) == len(rows):
            wanted.append(following)
            ahead = ahead - following
        for each in self._coming.keys() - set(wanted):
            self._coming.pop(each).cancel()
        for each in wanted:
            if each not in self._coming:
                self._coming[each] = self._thread.submit(self._read, each)
        return self._coming.pop(rows).result()

"""Fragments: the fixed parts in which the shared state is stored, sent and shared out among aggregators."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tpuswarm.swarm.core.values import Averaged

MEMBERS_PER_SHARD = 16
"""Whose contributions one aggregator takes in."""
FRAGMENT_BYTES = 2**27
"""The size of a fragment, about: each is one request of a push."""


def shards_for(members: int) -> int:
    """How many aggregators so many members want."""
    return max(1, -(-members // MEMBERS_PER_SHARD))


def fragments_for(size: int, members: int) -> int:
    """In how many fragments a state of so many bytes is divided: the same number for each aggregator."""
    shards = shards_for(members)
    return -(-max(1, size // FRAGMENT_BYTES) // shards) * shards


class Leaf(NamedTuple):
    """One float32 array of the shared state."""

    path: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Which leaves each fragment holds, one after the other; leaves are never divided."""

    fragments: tuple[tuple[Leaf, ...], ...]

    @staticmethod
    def of(leaves: Mapping[str, tuple[tuple[int, ...], Any]], fragments: int) -> "Layout":
        """At most `fragments` fragments of about equal size, the same for the same leaves in any order.

        leaves: shape and dtype (or its name) of each path. The largest leaf left goes to the smallest fragment so far;
        within a fragment leaves are in the order of their paths. Raises ValueError for a leaf that is not float32, for
        no leaf and for no fragment.
        """
        for path, (_, dtype) in sorted(leaves.items()):
            if str(dtype) != "float32":
                raise ValueError(f"a swarm shares float32 only, but {path} is {dtype}")
        if not leaves or fragments < 1:
            raise ValueError(f"{len(leaves)} leaves cannot be split into {fragments} fragments")
        packed: list[list[Leaf]] = [[] for _ in range(min(fragments, len(leaves)))]
        found = [Leaf(path, tuple(shape)) for path, (shape, _) in leaves.items()]
        for leaf in sorted(found, key=lambda leaf: (-leaf.size, leaf.path)):
            # The number of leaves counts second: leaves without elements must not leave a fragment without leaves.
            smallest = min(packed, key=lambda fragment: (sum(each.size for each in fragment), len(fragment)))
            smallest.append(leaf)
        return Layout(tuple(tuple(sorted(fragment)) for fragment in packed))

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Of each fragment."""
        return tuple(tuple(leaf.path for leaf in fragment) for fragment in self.fragments)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(sum(leaf.size for leaf in fragment) for fragment in self.fragments)

    def places(self, paths: Collection[str]) -> tuple[Averaged, ...]:
        """Where these leaves lie in the fragments."""
        found = []
        for number, leaves in enumerate(self.fragments):
            start = 0
            for leaf in leaves:
                if leaf.path in paths and leaf.size:
                    found.append(Averaged(number, start, start + leaf.size))
                start += leaf.size
        return tuple(found)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of names, shapes, dtype and packing."""
        value = {"dtype": "float32", "fragments": self.fragments}
        return hashlib.sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    def split(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The fragments of a state, each float32[size], copied.

        Raises ValueError where `arrays` has other names, shapes or dtypes than the layout.
        """
        wanted = {leaf.path: leaf.shape for fragment in self.fragments for leaf in fragment}
        if odd := sorted(wanted.keys() ^ arrays.keys()):
            raise ValueError(f"the layout and the state do not have the same leaves: {', '.join(odd)}")
        for path, shape in wanted.items():
            array = arrays[path]
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(f"{path} is {array.dtype}{list(array.shape)}, the layout says float32{list(shape)}")
        return [np.concatenate([arrays[path].ravel() for path in paths]) for paths in self.paths]

    def join(self, fragments: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The leaves by path, as views of the fragments.

        Raises ValueError where a fragment's length or dtype, or their number, is not the layout's.
        """
        given = [(*fragment.shape, fragment.dtype.name) for fragment in fragments]
        if given != [(size, "float32") for size in self.sizes]:
            raise ValueError(f"fragments of {given} are not float32 of the layout's sizes {list(self.sizes)}")
        arrays = {}
        for leaves, fragment in zip(self.fragments, fragments, strict=True):
            start = 0
            for leaf in leaves:
                arrays[leaf.path] = fragment[start : start + leaf.size].reshape(leaf.shape)
                start += leaf.size
        return arrays

"""Split the shared parameters into fragments: the unit of storage, of transfer, and of work for an aggregator."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tpuswarm.swarm.core.values import AveragedSlice

MEMBERS_PER_AGGREGATOR = 16
FRAGMENT_BYTES = 2**27
"""Approximate size of a fragment; each is one request of a push."""


def aggregators_for(members: int) -> int:
    """Return how many aggregators serve this many members."""
    return max(1, -(-members // MEMBERS_PER_AGGREGATOR))


def fragments_for(size: int, members: int) -> int:
    """Return the number of fragments for a state of `size` bytes: the same number for each aggregator."""
    shards = aggregators_for(members)
    return -(-max(1, size // FRAGMENT_BYTES) // shards) * shards


class Leaf(NamedTuple):
    """One float32 array of the shared state."""

    path: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The leaves of each fragment, one after the other. Leaves are never divided."""

    fragments: tuple[tuple[Leaf, ...], ...]

    @staticmethod
    def pack(leaves: Mapping[str, tuple[tuple[int, ...], Any]], fragments: int) -> "Layout":
        """Pack the leaves into at most `fragments` fragments of about equal size, whatever their order.

        leaves: shape and dtype (or its name) of each path. The largest leaf left goes to the smallest fragment so far;
        within a fragment leaves are sorted by path. Raise ValueError for a leaf that is not float32, for no leaves and
        for no fragments.
        """
        for path, (_, dtype) in sorted(leaves.items()):
            if str(dtype) != "float32":
                raise ValueError(f"a swarm shares float32 only, but {path} is {dtype}")
        if not leaves or fragments < 1:
            raise ValueError(f"{len(leaves)} leaves cannot be split into {fragments} fragments")
        packed: list[list[Leaf]] = [[] for _ in range(min(fragments, len(leaves)))]
        found = [Leaf(path, tuple(shape)) for path, (shape, _) in leaves.items()]
        for leaf in sorted(found, key=lambda leaf: (-leaf.size, leaf.path)):
            # Count leaves second: leaves without elements must not leave a fragment without leaves.
            smallest = min(packed, key=lambda fragment: (sum(leaf.size for leaf in fragment), len(fragment)))
            smallest.append(leaf)
        return Layout(tuple(tuple(sorted(fragment)) for fragment in packed))

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(leaf.path for leaf in fragment) for fragment in self.fragments)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(sum(leaf.size for leaf in fragment) for fragment in self.fragments)

    def find_slices(self, paths: Collection[str]) -> tuple[AveragedSlice, ...]:
        """Return the slice of each of the given leaves in its fragment."""
        found = []
        for number, leaves in enumerate(self.fragments):
            start = 0
            for leaf in leaves:
                if leaf.path in paths and leaf.size:
                    found.append(AveragedSlice(number, start, start + leaf.size))
                start += leaf.size
        return tuple(found)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of names, shapes, dtype and packing."""
        value = {"dtype": "float32", "fragments": self.fragments}
        return hashlib.sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    def split(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Copy a state into fragments, each float32[size].

        Raise ValueError if `arrays` has other names, shapes or dtypes than the layout.
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
        """Return the leaves by path, as views of the fragments.

        Raise ValueError if the number of fragments, or a length or dtype, differs from the layout.
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

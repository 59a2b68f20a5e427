"""Split the shared parameters into fragments: the unit of storage, of transfer, and of work for an aggregator."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE
from tpuswarm.swarm.core.values import AveragedSlice

MEMBERS_PER_AGGREGATOR = 16
FRAGMENT_BYTES = 2**27
"""Approximate size of a fragment; each is one request of a push."""


def aggregators_for(members: int) -> int:
    """Return how many aggregators serve this many members."""
    return max(1, -(-members // MEMBERS_PER_AGGREGATOR))


def fragments_for(elements: int, members: int) -> int:
    """Return the number of fragments of so many float32 elements: the same number for each aggregator."""
    shards = aggregators_for(members)
    fragments = -(-max(1, 4 * elements // FRAGMENT_BYTES) // shards) * shards
    return len(fragment_sizes(elements, fragments))


def fragment_sizes(elements: int, fragments: int) -> tuple[int, ...]:
    """Return the sizes of at most so many fragments, which differ by at most BLOCK_SIZE elements.

    All but the last are whole blocks, so that the blocks of quantization do not depend on the number of fragments.
    """
    blocks = max(1, -(-elements // BLOCK_SIZE))
    count = min(fragments, blocks)
    ends = [min(elements, number * blocks // count * BLOCK_SIZE) for number in range(count + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


class Piece(NamedTuple):
    """One float32 array of the shared state (a leaf), or elements of it."""

    path: str
    shape: tuple[int, ...]
    """Of the whole array."""
    span: tuple[int, int] | None = None
    """The first element and the one after the last; None for all."""

    @property
    def elements(self) -> tuple[int, int]:
        return self.span or (0, math.prod(self.shape))

    @property
    def size(self) -> int:
        start, stop = self.elements
        return stop - start

    def cut(self, leaf: Any) -> Any:
        """Return these elements of the whole array, flat."""
        if self.span is None:
            return leaf.ravel()
        start, stop = self.span
        if leaf.ndim < 2:
            return leaf[start:stop]
        row = math.prod(self.shape[1:])
        first = start // row  # touch only rows with these elements: the others may be on other devices
        return leaf[first : -(-stop // row)].ravel()[start - first * row : stop - first * row]


@dataclass(frozen=True)
class Layout:
    """The pieces of each fragment, one after the other."""

    fragments: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the pieces of each leaf are, in order, the whole of it."""
        done: dict[str, int] = {}
        for piece in (piece for fragment in self.fragments for piece in fragment):
            start, stop = piece.elements
            if start != done.get(piece.path, 0) or piece.shape != self.leaves[piece.path] or not start <= stop:
                raise ValueError(f"elements {start} to {stop} of {piece.path} do not follow those before them")
            done[piece.path] = stop
        for path, shape in self.leaves.items():
            if done[path] != math.prod(shape):
                raise ValueError(f"{path} has {math.prod(shape)} elements, its pieces end at {done[path]}")

    @staticmethod
    def pack(leaves: Mapping[str, tuple[tuple[int, ...], Any]], fragments: int) -> "Layout":
        """Put the leaves one after the other, sorted by path, and cut them as `fragment_sizes` says.

        leaves: shape and dtype (or its name) of each path. Raise ValueError for a leaf that is not float32, for no
        leaves and for no fragments.
        """
        for path, (_, dtype) in sorted(leaves.items()):
            if str(dtype) != "float32":
                raise ValueError(f"a swarm shares float32 only, but {path} is {dtype}")
        if not leaves or fragments < 1:
            raise ValueError(f"{len(leaves)} leaves cannot be split into {fragments} fragments")
        whole = [Piece(path, tuple(shape)) for path, (shape, _) in sorted(leaves.items())]
        sizes = fragment_sizes(sum(leaf.size for leaf in whole), fragments)
        packed: list[list[Piece]] = [[] for _ in sizes]
        number, room = 0, sizes[0]
        for leaf in whole:
            start = 0
            while leaf.size - start > room:
                if room:
                    packed[number].append(leaf._replace(span=(start, start + room)))
                start, number = start + room, number + 1
                room = sizes[number]
            packed[number].append(leaf._replace(span=(start, leaf.size)) if start else leaf)
            room -= leaf.size - start
        return Layout(tuple(map(tuple, packed)))

    @cached_property
    def leaves(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf by path."""
        return {piece.path: piece.shape for fragment in self.fragments for piece in fragment}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(sum(piece.size for piece in fragment) for fragment in self.fragments)

    def find_slices(self, paths: Collection[str]) -> tuple[AveragedSlice, ...]:
        """Return the slices of the given leaves in each fragment."""
        places = [place for path in self.leaves if path in paths for place in self._places[path]]
        return tuple(AveragedSlice(*place) for place in sorted(places) if place[1] < place[2])

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int, int]]]:
        """The pieces of each leaf in order: number of the fragment, first element in it and the one after the last."""
        places: dict[str, list[tuple[int, int, int]]] = {path: [] for path in self.leaves}
        for number, fragment in enumerate(self.fragments):
            start = 0
            for piece in fragment:
                places[piece.path].append((number, start, start + piece.size))
                start += piece.size
        return places

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of names, shapes, dtype and packing."""
        packing = [[piece if piece.span else piece[:2] for piece in fragment] for fragment in self.fragments]
        value = {"dtype": "float32", "fragments": packing}
        return hashlib.sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    def split(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Copy a state, NumPy or JAX arrays, into fragments, each float32[size].

        Raise ValueError if `arrays` has other names, shapes or dtypes than the layout.
        """
        if odd := sorted(self.leaves.keys() ^ arrays.keys()):
            raise ValueError(f"the layout and the state do not have the same leaves: {', '.join(odd)}")
        for path, shape in self.leaves.items():
            array = arrays[path]
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(f"{path} is {array.dtype}{list(array.shape)}, the layout says float32{list(shape)}")
        parts = [[piece.cut(arrays[piece.path]) for piece in fragment] for fragment in self.fragments]
        return [pieces[0].__array_namespace__().concatenate(pieces) for pieces in parts]

    def join(self, fragments: Sequence[Any]) -> dict[str, Any]:
        """Return the leaves by path: a view of a fragment, or a copy if it lies in several.

        Raise ValueError if the number of fragments, or a length or dtype, differs from the layout.
        """
        self.require_fit(fragments)
        return {path: self.leaf(path, fragments) for path in self.leaves}

    def require_fit(self, fragments: Sequence[Any]) -> None:
        """Raise ValueError if the number of fragments, or a length or dtype, differs from the layout."""
        given = [(*fragment.shape, fragment.dtype.name) for fragment in fragments]
        if given != [(size, "float32") for size in self.sizes]:
            raise ValueError(f"fragments of {given} are not float32 of the layout's sizes {list(self.sizes)}")

    def leaf(self, path: str, fragments: Sequence[Any]) -> Any:
        """Return one leaf, as `join` does, from fragments that fit."""
        parts = [fragments[number][start:stop] for number, start, stop in self._places[path]]
        whole = parts[0] if len(parts) == 1 else parts[0].__array_namespace__().concatenate(parts)
        return whole.reshape(self.leaves[path])

"""The leaves of a program's state that it does not share: moments, counters, averages; as bytes and back."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.swarm.arrays import leaf_to_devices, to_host
from tpuswarm.train.fit import Placed
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.placing import within_host
from tpuswarm.train.recipe import State

PIECE = 2**25
"""Bytes sent at a time."""


class InnerLeaves:
    """Of one program and mesh.

    `copy` costs their bytes on the devices once more, until `pack` has brought them to the host.
    """

    def __init__(self, placed: Placed):
        exchange = placed.program.exchange()
        marks = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            exchange.get(placed.state),
        )
        shared = {id(mark) for mark in jax.tree.leaves(marks)}
        marked = exchange.put(placed.state, marks)
        self._own = [id(leaf) not in shared for leaf in jax.tree.leaves(marked)]
        self._abstract = self._of(placed.state)
        names = [name for name, own in zip(leaf_paths(placed.state), self._own, strict=True) if own]
        specs = [(name, leaf.shape, str(leaf.dtype)) for name, leaf in zip(names, self._abstract, strict=True)]
        self.specs = hashlib.sha256(repr(specs).encode()).hexdigest()
        """Digest of names, shapes and dtypes."""
        self.copy = jax.jit(
            lambda state: [_raw(leaf).copy() for leaf in self._of(state)],
            out_shardings=[within_host(leaf.sharding) for leaf in self._abstract],
        )
        """The leaves of a state, copied on the devices; the step donates the originals."""
        self._raws = jax.eval_shape(lambda state: [_raw(leaf) for leaf in self._of(state)], placed.state)

    def pack(self, copied: Sequence[jax.Array]) -> list[np.ndarray]:
        """Their bytes, uint8, in pieces."""
        parts = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in to_host(copied)]
        whole = np.concatenate([np.zeros(0, np.uint8), *parts])
        return [whole[start : start + PIECE] for start in range(0, whole.size, PIECE)]

    def unpack(self, state: State, pieces: Sequence[np.ndarray]) -> State | None:
        """The state with these leaves in it; None where the pieces do not have their size."""
        whole = np.concatenate([np.zeros(0, np.uint8), *pieces])
        sizes = [raw.size * raw.dtype.itemsize for raw in self._raws]
        if whole.size != sum(sizes):
            return None
        leaves, treedef = jax.tree.flatten(state)
        places = [place for place, own in enumerate(self._own) if own]
        start = 0
        for place, raw, size, abstract in zip(places, self._raws, sizes, self._abstract, strict=True):
            array = whole[start : start + size].view(raw.dtype).reshape(raw.shape)
            leaves[place] = _unraw(leaf_to_devices(array, abstract.sharding), leaves[place])
            start += size
        return jax.tree.unflatten(treedef, leaves)

    def _of(self, state: State) -> list[Any]:
        return [leaf for leaf, own in zip(jax.tree.leaves(state), self._own, strict=True) if own]


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _unraw(raw: jax.Array, like: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like))
    return raw

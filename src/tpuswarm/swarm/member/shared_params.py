"""The shared parameters on the devices, as fragments: snapshots, payloads and adoptions.

Results have the bytes that NumPy computes from the same arrays. Only subnormal numbers differ: devices flush them to 0,
so that error feedback loses what is below 2^-126.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuswarm.swarm.core.arithmetic.adopt import add, adopt_mean, mix
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.arithmetic.quantize import BITS, BLOCK_SIZE, decode, encode, feedback
from tpuswarm.swarm.core.values import Form
from tpuswarm.train.data.placing import replicate_over_hosts, to_host, within_host_sharding
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import Placed
from tpuswarm.train.program.exchanged import exchanged, exchanged_parameters
from tpuswarm.train.program.mesh import AXIS
from tpuswarm.train.recipe import State

Flat = list[jax.Array]
"""A float32 vector for each fragment, in equal parts on all devices, padded with zeros if there are several."""


class Coded(NamedTuple):
    """A contribution on the devices, one array for each fragment. Every host has the whole, except of `left`."""

    codes: list[jax.Array]
    """Quantized codes, or the plain snapshot; then `scales` and `left` are empty."""
    scales: list[jax.Array]
    left: Flat
    """The next error feedback, once the contribution is applied."""
    squares: list[jax.Array]
    """Sums of the squares of the delta as it is sent, block by block."""


def split_sharding(mesh: Mesh) -> NamedSharding:
    """Divide first axes evenly among all devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


class SharedParams:
    """Functions on the shared parameters, compiled for one program, mesh and layout: `snapshot` and `mix` at once.

    Each vector costs 4 bytes a parameter divided by the number of devices, however the state is sharded. With several
    hosts, the devices of each host hold all bytes of a contribution until it is fetched.
    While `code` runs it takes 5 more bytes, divided likewise: temporaries and codes. On several devices `snapshot`,
    `mix` and `add` hold up to 6 bytes a parameter of a fragment, undivided, for a moment.
    """

    def __init__(self, placed: Placed, layout: Layout, form: Form):
        self._exchange, self._layout, self._mesh = exchanged(placed.program, placed.state), layout, placed.mesh
        self._bits = BITS.get(form, 0)
        self._shared = self._exchange.get(placed.state)
        self._statistics = [leaf.statistic for leaf in exchanged_parameters(placed.program, placed.state)]
        devices = placed.mesh.size
        unit = BLOCK_SIZE * devices if devices > 1 else 1
        self._lengths = [-(-size // unit) * unit for size in layout.sizes]
        split = split_sharding(placed.mesh)
        whole = within_host_sharding(split)
        flat = [jax.ShapeDtypeStruct((length,), np.float32, sharding=split) for length in self._lengths]
        self.snapshot: Callable[[State], Flat] = (
            jax.jit(lambda state: self._flat(self._exchange.get(state)), out_shardings=split)
            .lower(placed.state)
            .compile()
        )
        """Copy the shared parameters."""
        self.mix: Callable[[State, Flat, Flat, np.float32], State] = (
            jax.jit(partial(self._adopted, mix), donate_argnums=0, out_shardings=placed.shardings)
            .lower(placed.state, flat, flat, jax.ShapeDtypeStruct((), np.float32))
            .compile()
        )
        """Mix (state, new, snapshot, own_share) as core/arithmetic/adopt.py defines; donates the state."""
        self.add: Callable[[State, Flat, Flat], State] = jax.jit(
            partial(self._adopted, add), donate_argnums=0, out_shardings=placed.shardings
        )
        """Return now + (new - anchor) of (state, new, anchor); donates the state."""
        self.blend: Callable[[State, Flat, np.float32], State] = jax.jit(
            self._blended, donate_argnums=0, out_shardings=placed.shardings
        )
        """Return before + share * (now - before) of (state, before, share); donates the state."""
        self.tree: Callable[[Flat], Any] = jax.jit(
            self._tree, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self._shared)
        )
        """Convert fragments to the shared part of a state."""
        self.squares: Callable[[Flat, Flat], list[jax.Array]] = jax.jit(
            lambda snapshot, anchor: [_squares(a - s) for s, a in zip(snapshot, anchor, strict=True)],
            out_shardings=whole,
        )
        """Compute the squares of (snapshot, anchor), as in Coded."""
        self.code: Callable[[Flat, Flat, Flat], Coded] = jax.jit(
            self._coded, out_shardings=Coded._make((whole, whole, split, whole))
        )
        """Quantize anchor - snapshot + left of (snapshot, anchor, left)."""

    def replace(self, state: State, new: Flat) -> State:
        """Replace the shared parameters of a state."""
        return self._exchange.put(state, self.tree(new))

    def put_average(self, state: State, average: Flat) -> State:
        """Replace the moving average of a state."""
        assert self._exchange.average is not None
        return self._exchange.average.put(state, self.tree(average))

    def to_devices(self, fragments: Sequence[np.ndarray]) -> Flat:
        """Bring fragments, float32[size] each, to the devices."""
        self._layout.require_fit(fragments)
        return [
            _fragment_to_devices(fragment, length, self._mesh)
            for fragment, length in zip(fragments, self._lengths, strict=True)
        ]

    def plain(self, snapshot: Flat, anchor: Flat) -> Coded:
        """Return a plain contribution."""
        return Coded(replicate_over_hosts(snapshot), [], [], self.squares(snapshot, anchor))

    def zeros(self) -> Flat:
        """Return an empty error feedback."""
        make = jax.jit(
            lambda: [jnp.zeros(length, jnp.float32) for length in self._lengths],
            out_shardings=split_sharding(self._mesh),
        )
        return make()

    def fragments(self, flat: Flat) -> list[np.ndarray]:
        """Bring fragments to the host, float32[size] each."""
        return [array[:size] for array, size in zip(to_host(list(flat)), self._layout.sizes, strict=True)]

    def codes(self, coded: Coded) -> list[dict[str, np.ndarray]]:
        """Bring a quantized contribution to the host, as `encode` of core/arithmetic/quantize.py gives it."""
        number = len(coded.codes)
        arrays = to_host([*coded.codes, *coded.scales])
        blocks = [-(-size // BLOCK_SIZE) for size in self._layout.sizes]
        return [
            {"codes": codes[:count], "scales": scales[:count]}
            for codes, scales, count in zip(arrays[:number], arrays[number:], blocks, strict=True)
        ]

    def _flat(self, shared: Any) -> list[Any]:
        vectors = self._layout.split(dict(zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)))
        return [
            jnp.pad(vector, (0, length - vector.size)) for vector, length in zip(vectors, self._lengths, strict=True)
        ]

    def _tree(self, flat: Sequence[Any]) -> Any:
        arrays = self._layout.join([vector[:size] for vector, size in zip(flat, self._layout.sizes, strict=True)])
        return jax.tree.unflatten(jax.tree.structure(self._shared), [arrays[path] for path in leaf_paths(self._shared)])

    def _adopted(
        self, how: Callable[..., Any], state: State, new: Sequence[Any], reference: Sequence[Any], *own_share: Any
    ) -> State:
        trees = self._exchange.get(state), self._tree(new), self._tree(reference)
        leaves = zip(self._statistics, *map(jax.tree.leaves, trees), strict=True)
        adopted = [adopt_mean(*leaf) if statistic else how(*leaf, *own_share) for statistic, *leaf in leaves]
        return self._exchange.put(state, jax.tree.unflatten(jax.tree.structure(self._shared), adopted))

    def _blended(self, state: State, before: Sequence[Any], share: Any) -> State:
        now = self._exchange.get(state)
        mixed = jax.tree.map(lambda old, new: old + share * (new - old), self._tree(before), now)
        return self._exchange.put(state, mixed)

    def _coded(self, snapshot: Sequence[Any], anchor: Sequence[Any], left: Sequence[Any]) -> Coded:
        made = Coded([], [], [], [])
        for s, a, e in zip(snapshot, anchor, left, strict=True):
            delta = a - s
            wanted = delta + e
            codes, scales = encode(wanted, self._bits)
            made.codes.append(codes)
            made.scales.append(scales)
            made.left.append(feedback(wanted, codes, scales, self._bits))
            sent = decode(codes, scales, delta.size, self._bits)
            made.squares.append(_squares(jnp.where(jnp.isfinite(delta), sent, jnp.nan)))
        return made


def norm(squares: Sequence[jax.Array]) -> float:
    """Return the norm of the delta, possibly inf or NaN. Sum on the host in float64: float32 sums lose bits."""
    return float(np.sqrt(sum(np.sum(blocks, dtype=np.float64) for blocks in to_host(list(squares)))))


def _fragment_to_devices(fragment: np.ndarray, length: int, mesh: Mesh) -> jax.Array:
    """Pad a fragment to `length` and divide it among the devices; each byte is sent once."""

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(length)
        found = fragment[start:stop]
        missing = stop - start - len(found)
        return np.pad(found, (0, missing)) if missing else found

    return jax.make_array_from_callback((length,), split_sharding(mesh), part)


def _squares(delta: Any) -> Any:
    blocks = -(-delta.size // BLOCK_SIZE)
    return jnp.square(jnp.pad(delta, (0, blocks * BLOCK_SIZE - delta.size)).reshape(blocks, BLOCK_SIZE)).sum(axis=1)

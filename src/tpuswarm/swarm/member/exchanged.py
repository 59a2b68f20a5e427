"""The exchanged part of a state on the devices, as fragments: what a snapshot, a payload and an adoption compute.

The bytes are those that NumPy makes of the same arrays. Only subnormal numbers are not: devices flush them to 0, so
that error feedback loses what is below 2^-126.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.swarm.core.arithmetic.adopt import add, adopt_mean, mix
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.arithmetic.quantize import BITS, BLOCK, encode, feedback
from tpuswarm.swarm.core.values import Form
from tpuswarm.swarm.member.arrays import fragment_to_devices, split_sharding, to_host
from tpuswarm.train.data.placing import on_every_host, within_host
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import Placed
from tpuswarm.train.recipe import State

Flat = list[jax.Array]
"""Of each fragment a float32 vector in equal parts on all devices; with more than one device, zeros at its end."""


class Coded(NamedTuple):
    """A contribution on the devices; of each fragment one array. Every host has all of it, apart from `left`."""

    codes: list[jax.Array]
    """The snapshot itself where nothing is quantized; then there are no scales and nothing is left."""
    scales: list[jax.Array]
    left: Flat
    """The next error feedback, once the contribution is applied."""
    squares: list[jax.Array]
    """Sums of the squares of the delta, block by block."""


class Exchanged:
    """Compiled for one program, mesh and layout: what training always waits for at once, the rest at first use.

    Every vector costs 4 bytes a parameter divided by the number of devices, whatever the sharding of the state is; with
    several hosts a contribution has all its bytes on the devices of each host, until it is fetched.
    While `code` runs it takes 5 more, divided likewise: temporaries and codes. On several devices `snapshot`, `mix` and
    `add` hold up to 6 bytes for each parameter of a fragment, undivided, for a moment: with one fragment that is all
    of them.
    """

    def __init__(self, placed: Placed, layout: Layout, form: Form):
        self._exchange, self._layout, self._mesh = placed.program.exchange(), layout, placed.mesh
        self._bits = BITS.get(form, 0)
        self._shared = self._exchange.get(placed.state)
        self._statistics = [each.statistic for each in placed.program.parameters(placed.state)]
        devices = placed.mesh.size
        unit = BLOCK * devices if devices > 1 else 1
        self._lengths = [-(-size // unit) * unit for size in layout.sizes]
        split = split_sharding(placed.mesh)
        whole = within_host(split)
        flat = [jax.ShapeDtypeStruct((length,), np.float32, sharding=split) for length in self._lengths]
        self.snapshot: Callable[[State], Flat] = (
            jax.jit(lambda state: self._flat(self._exchange.get(state)), out_shardings=split)
            .lower(placed.state)
            .compile()
        )
        """A copy of the exchanged part."""
        self.mix: Callable[[State, Flat, Flat, np.float32], State] = (
            jax.jit(partial(self._adopted, mix), donate_argnums=0, out_shardings=placed.shardings)
            .lower(placed.state, flat, flat, jax.ShapeDtypeStruct((), np.float32))
            .compile()
        )
        """keep * now + (1 - keep) * new, of (state, new, snapshot, keep); the state is donated.

        See core/arithmetic/adopt.py.
        """
        self.add: Callable[[State, Flat, Flat], State] = jax.jit(
            partial(self._adopted, add), donate_argnums=0, out_shardings=placed.shardings
        )
        """now + (new - anchor), of (state, new, anchor); the state is donated."""
        self.blend: Callable[[State, Flat, np.float32], State] = jax.jit(
            self._blended, donate_argnums=0, out_shardings=placed.shardings
        )
        """before + share * (now - before), of (state, before, share); the state is donated."""
        self.tree: Callable[[Flat], Any] = jax.jit(
            self._tree, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self._shared)
        )
        """Fragments as the shared part of a state."""
        self.squares: Callable[[Flat, Flat], list[jax.Array]] = jax.jit(
            lambda snapshot, anchor: [_squares(a - s) for s, a in zip(snapshot, anchor, strict=True)],
            out_shardings=whole,
        )
        """Of (snapshot, anchor); see Coded."""
        self.code: Callable[[Flat, Flat, Flat], Coded] = jax.jit(
            self._coded, out_shardings=Coded._make((whole, whole, split, whole))
        )
        """The quantized anchor - snapshot + left, of (snapshot, anchor, left)."""

    def take(self, state: State, new: Flat) -> State:
        """The state with other fragments in it."""
        return self._exchange.put(state, self.tree(new))

    def put_average(self, state: State, average: Flat) -> State:
        """The state with the moving average of the committed parameters in the place of its own."""
        assert self._exchange.average is not None
        return self._exchange.average.put(state, self.tree(average))

    def put(self, fragments: Sequence[np.ndarray]) -> Flat:
        """float32[size] of each fragment, to the devices."""
        self._layout.join(fragments)  # raises for any other sizes
        return [
            fragment_to_devices(fragment, length, self._mesh)
            for fragment, length in zip(fragments, self._lengths, strict=True)
        ]

    def plain(self, snapshot: Flat, anchor: Flat) -> Coded:
        """A contribution that is not quantized."""
        return Coded(on_every_host(snapshot), [], [], self.squares(snapshot, anchor))

    def zeros(self) -> Flat:
        """No error feedback."""
        make = jax.jit(
            lambda: [jnp.zeros(length, jnp.float32) for length in self._lengths],
            out_shardings=split_sharding(self._mesh),
        )
        return make()

    def fragments(self, flat: Flat) -> list[np.ndarray]:
        """On the host, float32[size] of each."""
        return [array[:size] for array, size in zip(to_host(flat), self._layout.sizes, strict=True)]

    def codes(self, coded: Coded) -> list[dict[str, np.ndarray]]:
        """On the host, what `encode` of core/arithmetic/quantize.py gives for each fragment."""
        number = len(coded.codes)
        arrays = to_host([*coded.codes, *coded.scales])
        blocks = [-(-size // BLOCK) for size in self._layout.sizes]
        return [
            {"codes": codes[:count], "scales": scales[:count]}
            for codes, scales, count in zip(arrays[:number], arrays[number:], blocks, strict=True)
        ]

    def _flat(self, shared: Any) -> list[Any]:
        leaves = dict(zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True))
        vectors = [jnp.concatenate([leaves[path].ravel() for path in paths]) for paths in self._layout.paths]
        return [
            jnp.pad(vector, (0, length - vector.size)) for vector, length in zip(vectors, self._lengths, strict=True)
        ]

    def _tree(self, flat: Sequence[Any]) -> Any:
        arrays = self._layout.join([vector[:size] for vector, size in zip(flat, self._layout.sizes, strict=True)])
        return jax.tree.unflatten(jax.tree.structure(self._shared), [arrays[path] for path in leaf_paths(self._shared)])

    def _adopted(
        self, how: Callable[..., Any], state: State, new: Sequence[Any], reference: Sequence[Any], *keep: Any
    ) -> State:
        trees = self._exchange.get(state), self._tree(new), self._tree(reference)
        leaves = zip(self._statistics, *map(jax.tree.leaves, trees), strict=True)
        adopted = [adopt_mean(*each) if statistic else how(*each, *keep) for statistic, *each in leaves]
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
            made.squares.append(_squares(delta))
        return made


def norm(squares: Sequence[jax.Array]) -> float:
    """Of the delta; inf or NaN where that is not finite. Summed on the host in float64: long float32 sums lose bits."""
    return float(np.sqrt(sum(np.sum(each, dtype=np.float64) for each in to_host(squares))))


def _squares(delta: Any) -> Any:
    blocks = -(-delta.size // BLOCK)
    return jnp.square(jnp.pad(delta, (0, blocks * BLOCK - delta.size)).reshape(blocks, BLOCK)).sum(axis=1)

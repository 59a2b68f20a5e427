"""A member's arrays: the trainer's compiled step around the exchanged state, its anchor and its error feedback."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.swarm import tensors
from tpuswarm.swarm.core.adopt import adopt as adopted
from tpuswarm.swarm.core.fragments import Layout
from tpuswarm.swarm.core.member import Adopt
from tpuswarm.swarm.core.quantize import encode, feedback
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Form, Identity
from tpuswarm.swarm.member import Payload
from tpuswarm.train.feed import read_rows
from tpuswarm.train.fit import Fitted
from tpuswarm.train.mesh import batch_sharding
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Clock, Metrics, Source, State

BITS: dict[Form, int] = {"int8": 8, "int4": 4}


def layout_of(fitted: Fitted, fragments: int) -> Layout:
    """The layout of what a program exchanges; ValueError for leaves that are not float32."""
    shared = fitted.program.exchange().get(fitted.state)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return Layout.of({path: (leaf.shape, leaf.dtype) for path, leaf in leaves}, fragments)


class ProgramHolder:
    """What a member trains. Not for two threads at once, but for `payload`, which touches no state."""

    def __init__(
        self,
        fitted: Fitted,
        source: Source,
        layout: Layout,
        form: Form,
        step_key: jax.Array,
        state: State,
        anchor: Sequence[np.ndarray],
        took: Callable[[int, Metrics], None],
    ):
        """state: its exchanged part is `anchor`, float32[size] of each fragment; took: told of every step its number
        in the run's order of batches and its metrics, which are still on the devices.
        """
        self.state = state
        self._fitted, self._source, self._layout, self._form, self._key = fitted, source, layout, form, step_key
        self._took = took
        self._exchange = fitted.program.exchange()
        self._shared = self._exchange.get(fitted.state)
        self._anchor = list(anchor)
        self._reference: list[np.ndarray] = []
        """The last snapshot, on the host."""
        self._feedback = [np.zeros(size, np.float32) for size in layout.sizes]
        self._next_feedback: list[np.ndarray] = []
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    def train(self, rows: Rows, progress: tuple[int, int]) -> None:
        """One step on one range of rows, a whole batch; returns when it is dispatched."""
        ((start, stop),) = rows.ranges
        spec = self._fitted.program.batch_spec(stop - start)
        batch = jax.device_put(read_rows(self._source, spec, start, stop - start), batch_sharding(self._fitted.mesh))
        number = start // (stop - start)
        clock = Clock(self._key, np.int32(number), np.float32(progress[0] / progress[1]))
        self.state, metrics = self._fitted.step(self.state, batch, clock)
        self._took(number, metrics)

    def snapshot(self) -> Any:
        """A copy of the exchanged state on the devices: the step donates the original."""
        return self._copy(self._exchange.get(self.state))

    def payload(self, snapshot: Any, identity: Identity) -> Payload:
        """The snapshot as it is, or its quantized delta from the anchor with what the last ones left out."""
        s = self._layout.split(dict(zip(leaf_paths(snapshot), jax.device_get(jax.tree.leaves(snapshot)), strict=True)))
        deltas = [anchor - fragment for anchor, fragment in zip(self._anchor, s, strict=True)]
        norms = [np.sqrt(np.sum(np.square(delta), dtype=np.float64)) for delta in deltas]
        norm = float(np.sqrt(np.sum(np.square(norms))))
        finite = bool(np.isfinite(norm))
        self._reference = s
        arrays: list[dict[str, np.ndarray]] = [{"s": fragment} for fragment in s]
        if self._form != "plain" and finite:
            bits = BITS[self._form]
            wanted = [delta + left for delta, left in zip(deltas, self._feedback, strict=True)]
            coded = [encode(x, bits) for x in wanted]
            arrays = [{"codes": codes, "scales": scales} for codes, scales in coded]
            self._next_feedback = [feedback(x, *each, bits) for x, each in zip(wanted, coded, strict=True)]
        digests = tuple(tensors.digest(each) for each in arrays)
        return Payload(tuple(arrays), digests, norm if finite else 0.0, finite)

    def adopt(self, adopt: Adopt, fragments: Sequence[np.ndarray]) -> None:
        """Come to a published version."""
        new = self._placed(fragments)
        if adopt.how in ("snapshot", "anchor"):
            reference = self._placed(self._reference if adopt.how == "snapshot" else self._anchor)
            new = adopted(self._exchange.get(self.state), new, reference)
        if adopt.how == "snapshot" and self._form != "plain":
            self._feedback = self._next_feedback
        self.state = self._exchange.put(self.state, new)
        self._anchor = list(fragments)

    def _placed(self, fragments: Sequence[np.ndarray]) -> Any:
        """Fragments as the exchanged part of a state, on the devices."""
        arrays = self._layout.join(fragments)
        leaves = zip(leaf_paths(self._shared), jax.tree.leaves(self._shared), strict=True)
        placed = [jax.device_put(arrays[path], leaf.sharding) for path, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(self._shared), placed)

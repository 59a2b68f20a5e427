"""A member's arrays: the trainer's compiled step around the shared state, its anchor and its error feedback."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation

from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.books import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Form
from tpuswarm.swarm.member.arrays import batch_to_devices, leaf_to_devices, wait
from tpuswarm.swarm.member.contract import Evaluated, Payload
from tpuswarm.swarm.member.exchanged import Coded, Exchanged, Flat, norm
from tpuswarm.swarm.member.prefetch import Prefetch
from tpuswarm.swarm.storage import tensors
from tpuswarm.train.data.feed import read_rows
from tpuswarm.train.loop.evaluate import EVAL_BATCHES, HeldOut, evaluate
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.recipe import Batch, Clock, Metrics, Source, State

RAMP = 100
"""Steps in which the updates of a state without its inner state grow to their full size."""


def layout_of(compiled: Compiled, fragments: int) -> Layout:
    """The layout of what a program shares; ValueError for leaves that are not float32."""
    shared = compiled.program.exchange().get(compiled.state)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return Layout.of({path: (leaf.shape, leaf.dtype) for path, leaf in leaves}, fragments)


def placed(compiled: Compiled, layout: Layout, fragments: Sequence[np.ndarray]) -> Any:
    """Fragments as the shared part of a state, on the devices."""
    shared = compiled.program.exchange().get(compiled.state)
    arrays = layout.join(fragments)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(shared), [leaf_to_devices(arrays[path], leaf.sharding) for path, leaf in leaves]
    )


Inspect = Callable[[State, Any, dict[str, Any], Callable[[float], object]], Evaluated]
"""Takes a version's state, its moving average, its evaluation's row, and `allow`, which grants seconds for a hook."""


class ProgramHolder:
    """What a member trains.

    `place`, `payload`, `code` and `fetch` touch no state and may run beside the others, which are for one thread at a
    time.
    None of these waits for the devices, but `train` for the step before its own, `settle` and `evaluate`.

    Beside its state a member holds on its devices, in bytes a parameter, all divided by the number of devices: the
    anchor, 4; a snapshot from its push to its verdict, 4; a version that arrives, 4 for a moment; quantized, the error
    feedback, 4, and the next one from push to verdict, 4. So 8 plain and 16 quantized, while AdamW's state takes 12 on
    every device that it is not sharded over.
    """

    def __init__(
        self,
        compiled: Compiled,
        source: Source,
        layout: Layout,
        form: Form,
        step_key: jax.Array,
        state: State,
        anchor: Sequence[np.ndarray],
        took: Callable[[int, Metrics], None],
        validation: HeldOut | None,
        inspect: Inspect | None,
    ):
        """state: its shared part is `anchor`, float32[size] of each fragment; took: told of every step its number
        in the run's order of batches and its metrics, which are still on the devices; validation and inspect: for
        `evaluate`; None where nobody calls it.
        """
        self.state = state
        self._compiled, self._form, self._key = compiled, form, step_key
        self._took, self._validation, self._inspect = took, validation, inspect
        self._feed = Prefetch(_reader(compiled, source))
        self._exchanged = Exchanged(compiled, layout, form)
        self._anchor = self._exchanged.put(anchor)
        self._reference: Flat = []
        """The snapshot of the undecided contribution."""
        self._feedback = self._exchanged.zeros() if form != "plain" else []
        self._next_feedback: Flat = []
        self._running: tuple[int, Metrics] | None = None
        """Rows and metrics of the newest step, which may still be computed."""
        self._ramp_left = 0

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """One step on a whole batch, dispatched; then waits for the step before it."""
        ((start, stop),) = rows.ranges
        batch = self._feed.next(rows, ahead)
        number = start // (stop - start)
        clock = Clock(self._key, np.int32(number), np.float32(progress[0] / progress[1]), np.float32(1))
        with StepTraceAnnotation("train", step_num=number):
            if self._ramp_left:
                metrics = self._ramped_step(batch, clock)
            else:
                self.state, metrics = self._compiled.step(self.state, batch, clock)
        self._took(number, metrics)
        before, self._running = self._running, (stop - start, metrics)
        return _finish(before)

    def settle(self) -> int:
        """Wait for the newest step."""
        before, self._running = self._running, None
        return _finish(before)

    def snapshot(self) -> Flat:
        """A copy of the shared state on the devices: the step donates the original."""
        self._reference = self._exchanged.snapshot(self.state)
        return self._reference

    def payload(self, snapshot: Flat) -> Payload:
        """The snapshot as it is, or its quantized delta from the anchor with what the last ones left out."""
        return self.fetch(self.code(snapshot))

    def code(self, snapshot: Flat) -> Coded:
        """The first half of `payload`: what runs on the devices, dispatched."""
        if self._form == "plain":
            return self._exchanged.plain(snapshot, self._anchor)
        coded = self._exchanged.code(snapshot, self._anchor, self._feedback)
        self._next_feedback = coded.left
        return coded

    def fetch(self, coded: Coded) -> Payload:
        """The second half of `payload`: no program runs for it."""
        length = norm(coded.squares)
        if self._form == "plain":
            arrays = [{"s": fragment} for fragment in self._exchanged.fragments(coded.codes)]
        else:
            arrays = self._exchanged.codes(coded)
        finite = bool(np.isfinite(length))
        digests = tuple(tensors.digest(each) for each in arrays)
        return Payload(tuple(arrays), digests, length if finite else 0.0, finite)

    def place(self, fragments: Sequence[np.ndarray]) -> Flat:
        """float32[size] of each fragment of a version, to the devices."""
        return self._exchanged.put(fragments)

    def adopt(self, adopt: Adopt, version: Flat, keep: float) -> None:
        """Come to a published version that `place` brought; keep: see Member.keep."""
        if adopt.how == "snapshot":
            self.state = self._exchanged.mix(self.state, version, self._reference, np.float32(keep))
            self._feedback = self._next_feedback
        elif adopt.how == "anchor":
            self.state = self._exchanged.add(self.state, version, self._anchor)
        else:
            self.state = self._exchanged.take(self.state, version)
        self._anchor, self._reference, self._next_feedback = version, [], []

    def evaluate(self, leave: Callable[..., bool], average: Flat | None, version: int, tokens: int) -> Evaluated | None:
        """The version adopted last, as it was published, on held-out rows, and what hooks find of it."""
        assert self._validation is not None and self._inspect is not None
        state = self._exchanged.take(self.state, self._anchor)
        if average is not None:
            state = self._exchanged.put_average(state, average)
        found = evaluate(self._compiled, state, *self._validation, EVAL_BATCHES, leave)
        if found is None:
            return None
        values, rows = found
        row: dict[str, Any] = {"tokens": tokens, "version": version, "eval_rows": rows}
        row |= {f"eval_{name}": value if math.isfinite(value) else None for name, value in values.items()}
        shared = None if average is None else self._exchanged.tree(average)
        return self._inspect(state, shared, row, leave)

    def ramp(self) -> None:
        """The state has parameters that were trained and no inner state: begin with small updates."""
        self._ramp_left = RAMP - 1

    def _ramped_step(self, batch: Batch, clock: Clock) -> Metrics:
        before = self._exchanged.snapshot(self.state)
        state, metrics = self._compiled.step(self.state, batch, clock)
        self.state = self._exchanged.blend(state, before, np.float32(1 - self._ramp_left / RAMP))
        self._ramp_left -= 1
        return metrics


def _reader(compiled: Compiled, source: Source) -> Callable[[Rows], Batch]:
    """What brings the rows of a batch to the devices; it must not keep a holder, and with it a whole state, alive."""

    def batch(rows: Rows) -> Batch:
        ((start, stop),) = rows.ranges

        def read(first: int, count: int) -> dict[str, np.ndarray]:
            return read_rows(source, compiled.program.batch_spec(count), start + first, count)

        return batch_to_devices(read, stop - start, compiled.mesh)

    return batch


def _finish(step: tuple[int, Metrics] | None) -> int:
    """The rows of a step, once it is done."""
    if step is None:
        return 0
    rows, metrics = step
    wait(metrics)
    return rows

"""A member's device state: the trainer's compiled step around shared parameters, anchor and error feedback."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation

from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Form
from tpuswarm.swarm.member.device_state import Evaluation, Payload
from tpuswarm.swarm.member.shared_params import Coded, Flat, SharedParams, norm
from tpuswarm.swarm.storage import tensors
from tpuswarm.train.data.feed import MAX_READ_AHEAD, read_checked_rows
from tpuswarm.train.data.placing import place_array, place_batch
from tpuswarm.train.loop.evaluate import EVAL_BATCHES, HeldOut, Part, evaluate, read_part
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.exchanged import exchanged
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.recipe import Batch, Clock, Metrics, Source, State

RAMP_STEPS = 100
"""A new inner state starts with small updates, which reach their full size after these steps."""


def layout_of(compiled: Compiled, fragments: int, begun: Layout | None = None) -> Layout:
    """Return the layout of a program's shared parameters. Raise ValueError for leaves that are not float32.

    begun: the layout with which the run was begun, which stays if the leaves are the same.
    """
    shared = exchanged(compiled.program, compiled.state).get(compiled.state)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    found = Layout.pack({path: (leaf.shape, leaf.dtype) for path, leaf in leaves}, fragments)
    return begun if begun and begun.leaves == found.leaves else found


def place_fragments(compiled: Compiled, layout: Layout, fragments: Sequence[np.ndarray]) -> Any:
    """Bring fragments to the devices, as the shared part of a state."""
    shared = exchanged(compiled.program, compiled.state).get(compiled.state)
    layout.require_fit(fragments)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(shared),
        [place_array(layout.leaf(path, fragments), leaf.sharding) for path, leaf in leaves],
    )


Inspect = Callable[[State, Any, dict[str, Any], Callable[[float], object]], Evaluation]
"""Takes a version's state, its moving average, its evaluation's row, and `allow`, which grants seconds for a hook."""


class Prefetch:
    """Reads the next batches in a thread.

    A lease has gaps and changes at any time, and rows may return to its head. It drops batches that
    the lease no longer needs next.
    """

    def __init__(self, read: Callable[[Rows], Batch]):
        """read: brings the rows of one batch to the devices."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._pending: dict[Rows, Future[Batch]] = {}

    def next(self, rows: Rows, ahead: Rows) -> Batch:
        """Return the batch of `rows`, or raise the error of reading it. ahead: the rows leased after it."""
        wanted = [rows]
        while len(wanted) <= MAX_READ_AHEAD and len(following := ahead.first(len(rows))) == len(rows):
            wanted.append(following)
            ahead = ahead - following
        for outdated in self._pending.keys() - set(wanted):
            self._pending.pop(outdated).cancel()
        for batch in wanted:
            if batch not in self._pending:
                self._pending[batch] = self._thread.submit(self._read, batch)
        return self._pending.pop(rows).result()


class ProgramState:
    """The device state of a real program.

    `place`, `payload`, `code` and `fetch` use no state and may run beside the other methods, which are for one thread
    at a time. Only `settle` and `evaluate` wait for the devices, and `train` for the step before its own.

    A member holds on its devices, beside its state, in bytes a parameter divided by the number of devices: the anchor,
    4; a snapshot from push to verdict, 4; an arriving version, 4 for a moment; if quantized, the error feedback, 4, and
    the next one from push to verdict, 4. So 8 plain and 16 quantized, while AdamW's state takes 12 on every device over
    which it is not sharded.
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
        on_step: Callable[[int, Metrics], None],
        validation: HeldOut | None,
        inspect: Inspect | None,
    ):
        """state: its shared part is `anchor`, float32[size] for each fragment; on_step: called for every step with its
        number in the run's order of batches and its metrics on the devices; validation, inspect: for `evaluate`, or
        None.
        """
        self.state = state
        self._compiled, self._form, self._key = compiled, form, step_key
        self._on_step, self._validation, self._inspect = on_step, validation, inspect
        self._feed = Prefetch(_reader(compiled, source))
        self._params = SharedParams(compiled, layout, form)
        self._anchor = self._params.to_devices(anchor)
        self._reference: Flat = []
        """The snapshot of the undecided contribution."""
        self._feedback = self._params.zeros() if form != "plain" else []
        self._next_feedback: Flat = []
        self._running: tuple[int, Metrics] | None = None
        """Rows and metrics of the newest step, which may not be computed yet."""
        self._ramp_left = 0

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """Dispatch a step on a whole batch, then wait for the step before it."""
        ((start, stop),) = rows.ranges
        batch = self._feed.next(rows, ahead)
        number = start // (stop - start)
        clock = Clock(self._key, np.int32(number), np.float32(progress[0] / progress[1]), np.float32(1))
        with StepTraceAnnotation("train", step_num=number):
            if self._ramp_left:
                metrics = self._ramped_step(batch, clock)
            else:
                self.state, metrics = self._compiled.step(self.state, batch, clock)
        self._on_step(number, metrics)
        before, self._running = self._running, (stop - start, metrics)
        return _finish(before)

    def settle(self) -> int:
        """Wait for the newest step; return its rows."""
        before, self._running = self._running, None
        return _finish(before)

    def snapshot(self) -> Flat:
        """Copy the shared parameters on the devices: the next step donates the originals."""
        self._reference = self._params.snapshot(self.state)
        return self._reference

    def payload(self, snapshot: Flat) -> Payload:
        """Encode the snapshot, or its quantized delta from the anchor with the error feedback."""
        return self.fetch(self.code(snapshot))

    def code(self, snapshot: Flat) -> Coded:
        """Dispatch the part of `payload` that runs on the devices."""
        if self._form == "plain":
            return self._params.plain(snapshot, self._anchor)
        coded = self._params.code(snapshot, self._anchor, self._feedback)
        self._next_feedback = coded.left
        return coded

    def fetch(self, coded: Coded) -> Payload:
        """Complete `payload` on the host; runs no program."""
        length = norm(coded.squares)
        if self._form == "plain":
            arrays = [{"s": fragment} for fragment in self._params.fragments(coded.codes)]
        else:
            arrays = self._params.codes(coded)
        finite = bool(np.isfinite(length))
        digests = tuple(map(tensors.digest, arrays))
        size = sum(array.nbytes for fragment in arrays for array in fragment.values())
        return Payload(tuple(arrays), digests, length if finite else 0.0, finite, size)

    def place(self, fragments: Sequence[np.ndarray]) -> Flat:
        """Bring the fragments of a version, float32[size] each, to the devices."""
        return self._params.to_devices(fragments)

    def adopt(self, adopt: Adopt, version: Flat, own_share: float) -> None:
        """Adopt a version from `place`; own_share: see MemberState.own_share."""
        if adopt.how == "snapshot":
            self.state = self._params.mix(self.state, version, self._reference, np.float32(own_share))
            self._feedback = self._next_feedback
        elif adopt.how == "anchor":
            self.state = self._params.add(self.state, version, self._anchor)
        else:
            self.state = self._params.replace(self.state, version)
        self._anchor, self._reference, self._next_feedback = version, [], []

    def evaluate(self, stop: Callable[..., bool], average: Flat | None, version: int, tokens: int) -> Evaluation | None:
        """Evaluate the last adopted version, as published, on held-out rows, and run the hooks."""
        return self.evaluate_state(self.published_state(average), stop, average, version, tokens)

    def published_state(self, average: Flat | None) -> State:
        """Return the state of the last adopted version, without anything of this member's own."""
        state = self._params.replace(self.state, self._anchor)
        return state if average is None else self._params.put_average(state, average)

    def evaluate_state(
        self, state: State, stop: Callable[..., bool], average: Flat | None, version: int, tokens: int,
        dispatching: Callable[[Part], AbstractContextManager[object]] = nullcontext,
    ) -> Evaluation | None:  # fmt: skip
        """Evaluate a state from `published_state`; dispatching: see train/loop/evaluate.py."""
        assert self._validation is not None and self._inspect is not None
        found = evaluate(self._compiled, state, *self._validation, EVAL_BATCHES, stop, dispatching=dispatching)
        if found is None:
            return None
        values, rows = found
        row: dict[str, Any] = {"tokens": tokens, "version": version, "eval_rows": rows}
        row |= {f"eval_{name}": value if math.isfinite(value) else None for name, value in values.items()}
        shared = None if average is None else self._params.tree(average)
        return self._inspect(state, shared, row, stop)

    def evaluate_part(self, state: State, part: Part) -> None:
        """Dispatch the evaluation of a part, whose result another host reads."""
        assert self._validation is not None
        self._compiled.evaluate(state, read_part(self._compiled, self._validation.source, part))

    def ramp(self) -> None:
        """Start with small updates: the parameters are trained, but their inner state is new."""
        self._ramp_left = RAMP_STEPS - 1

    def _ramped_step(self, batch: Batch, clock: Clock) -> Metrics:
        before = self._params.snapshot(self.state)
        state, metrics = self._compiled.step(self.state, batch, clock)
        self.state = self._params.blend(state, before, np.float32(1 - self._ramp_left / RAMP_STEPS))
        self._ramp_left -= 1
        return metrics


def _reader(compiled: Compiled, source: Source) -> Callable[[Rows], Batch]:
    """Return a function that brings a batch to the devices; it must not keep a ProgramState alive."""

    def batch(rows: Rows) -> Batch:
        ((start, stop),) = rows.ranges

        def read(first: int, count: int) -> dict[str, np.ndarray]:
            return read_checked_rows(source, compiled.program.batch_spec(count), start + first, count)

        return place_batch(read, stop - start, batch_sharding(compiled.mesh))

    return batch


def _finish(step: tuple[int, Metrics] | None) -> int:
    """Wait for a step; return its rows."""
    if step is None:
        return 0
    rows, metrics = step
    jax.block_until_ready(metrics)
    return rows

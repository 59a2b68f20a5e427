"""The outer optimizer, as in DiLoCo: apply the contributions of a round to the shared parameters.

Each member trains several steps by itself (the inner optimizer); a commit averages the resulting parameters, or takes a
Nesterov step along the mean of their changes. A quantized downlink sends that change in few bits and keeps the rest for
the next commit; members that add what they receive have the same bits as the ledger.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Buffers, Contribution, average_chunk, chunks, mean_chunk, update_chunk
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE, Quantized, encode
from tpuswarm.swarm.core.values import AveragedSlice, Form, Rule

RATES = ((1.5, 0.4), (4.5, 0.6), (7.5, 0.7))
"""Nesterov's rate below each number of effective contributors."""
MAX_RATE = 0.8

DEFAULT_MOMENTUM, MIN_MOMENTUM = 0.9, 0.8
MAX_SMALL_MODEL_SIZE = 2_000_000
"""Models below this many parameters use MIN_MOMENTUM. The largest model where 0.8 was better has 0.35 M (the ladder in
docs/benchmarks.md); the smallest with a published 0.9 has 35 M (Charles et al. 2025)."""

FULL_QUORUM_SHARE = 1 - 1e-9
"""Shares with this sum are a quorum: three times a third is one."""


def default_momentum(parameters: int) -> float:
    """Return the Nesterov momentum that learned best at equal tokens."""
    return MIN_MOMENTUM if parameters < MAX_SMALL_MODEL_SIZE else DEFAULT_MOMENTUM


@dataclass(frozen=True)
class MovingAverage:
    """A moving average of the committed states, stored beside them; independent of any member."""

    half_life: float
    """In tokens counted."""
    share: float = math.inf
    """Upper limit of the half-life, as a share of the tokens counted so far."""

    def kept(self, tokens: int, after: int) -> float:
        """Return the share that a commit of `tokens` keeps; after: tokens counted including them."""
        return 0.5 ** (tokens / min(self.half_life, self.share * after))


class NotFinite(ValueError):
    """A commit would have values that are not finite, because of these contributions (indices)."""

    def __init__(self, contributions: Sequence[int]):
        super().__init__("its state is not finite")
        self.contributions = contributions


@dataclass(frozen=True)
class OuterRule:
    """How contributions change the shared state: their weighted mean, or a Nesterov step along their mean delta."""

    rule: Rule
    momentum: float = DEFAULT_MOMENTUM
    """For Nesterov; 0 gives plain steps of size `rate`."""
    rate: float | None = None
    """For Nesterov; None chooses by the number of effective contributors."""
    downlink: Form = "plain"
    """Form in which members receive a commit's change."""
    averaged: tuple[AveragedSlice, ...] = ()
    """Elements merged by their mean under every rule; needs a plain downlink."""
    average: MovingAverage | None = None

    def __post_init__(self) -> None:
        if self.averaged and self.downlink != "plain":
            raise ValueError(f"averaged arrays ({len(self.averaged)}) need a plain downlink, not {self.downlink}")
        if self.rule == "average" and self.rate is not None:
            raise ValueError(
                f"the outer rule average takes no rate, but {self.rate} was given; use nesterov with momentum 0"
            )

    def averaged_slices(self, fragment: int) -> list[slice]:
        """Return the elements of a fragment that are merged by their mean."""
        return [slice(span.first, span.last) for span in self.averaged if span.fragment == fragment]

    def rate_for(self, effective_contributors: float, share: float = 1.0) -> float:
        """Return the given rate, or the default.

        The default is 1 for the mean. For Nesterov it is 0.4 for 1 contributor, 0.6 for 2 to 4, 0.7 for 5 to 7, 0.8
        from 8; a fractional effective number is rounded. share: the contributors' share of a quorum. The rate is that
        of the whole quorum: members that come one by one move the state as far as members that come together.
        """
        if self.rate is not None:
            return self.rate
        if self.rule == "average":
            return 1.0
        return next((rate for below, rate in RATES if effective_contributors / share < below), MAX_RATE)


def state_rows(outer: OuterRule, gathered: float) -> int:
    """Return the number of rows of the outer state after a commit that left this sum of shares.

    Rows in order: Nesterov's momentum; its buffer, unless `gathered` is 0; the moving average; the part of the changes
    that a quantized downlink has not sent yet.
    """
    momentum = (outer.rule == "nesterov") * (1 + (gathered != 0))
    return momentum + (outer.average is not None) + (outer.downlink != "plain")


def average_row(downlink: Form) -> int:
    """Return the index of the moving average in an outer state that has one."""
    return -1 - (downlink != "plain")


def initial_state(outer: OuterRule, theta: np.ndarray) -> np.ndarray | None:
    """Return a fragment's initial outer state, float32[rows, n], or None if it has no rows.

    The moving average starts as theta, float32[n], the rest as 0.
    """
    rows = state_rows(outer, 0.0)
    if not rows:
        return None
    first = np.zeros((rows, theta.size), np.float32)
    if outer.average is not None:
        first[average_row(outer.downlink)] = theta
    return first


def advance_quorum(outer: OuterRule, gathered: float, contributors: int, quorum: int) -> tuple[float, float]:
    """Return a commit's share of a quorum, at most 1, and the sum of shares gathered after it.

    The sum is 0 after a commit that completes a quorum and makes the momentum step. The mean has no momentum to delay:
    every commit is whole.
    """
    if outer.rule == "average":
        return 1.0, 0.0
    share = min(1.0, contributors / quorum)
    return share, gathered_after(gathered, share)


def gathered_after(gathered: float, share: float) -> float:
    """Return the sum of shares after a commit: 0 once a quorum is complete."""
    after = gathered + share
    return 0.0 if after >= FULL_QUORUM_SHARE else after


def nesterov_step(
    theta: np.ndarray,
    momentum: np.ndarray,
    buffer: np.ndarray | None,
    u: np.ndarray,
    outer: OuterRule,
    rate: float,
    share: float,
    out_theta: np.ndarray,
    out_momentum: np.ndarray,
    out_buffer: np.ndarray | None,
) -> None:
    """Make one step of delayed Nesterov (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling").

    Each commit moves theta by its share of the update u at once. Once a quorum is gathered, the momentum moves it by
    the shares collected in the buffer. A missing buffer is 0; a commit without `out_buffer` makes the momentum step. A
    commit of a whole quorum equals a step of `optax.sgd(rate, momentum, nesterov=True)`. All arrays are float32[n];
    outputs may be the inputs.
    """
    for part in chunks(theta.size):
        moved = np.float32(share) * u[part]
        kept = moved if buffer is None else buffer[part] + moved
        if out_buffer is None:
            new = np.float32(outer.momentum) * momentum[part]
            new += kept
            moved = moved + np.float32(outer.momentum) * new
            out_momentum[part] = new
        else:
            out_momentum[part], out_buffer[part] = momentum[part], kept
        np.subtract(theta[part], np.float32(rate) * moved, out=out_theta[part])


def quantize_change(
    theta: np.ndarray, new: np.ndarray, left: np.ndarray, out_theta: np.ndarray, out_left: np.ndarray, sent: Quantized
) -> None:
    """Quantize the change from theta to new, apply it, and keep the remainder; float32[n] each.

    sent = Q(new - theta + left), out_theta = theta + sent, out_left = new - theta + left - sent; n fits a chunk.
    Outputs may be the inputs.
    """
    wanted = new - theta
    wanted += left
    sent.codes[:], sent.scales[:] = encode(wanted, sent.bits)
    moved = sent.decode(0, theta.size, np.empty(sent.scales.size * BLOCK_SIZE, np.float32))
    np.subtract(wanted, moved, out=out_left)  # exact: see quantize.feedback
    np.add(theta, moved, out=out_theta)


def apply_updates(theta: np.ndarray, sent: Sequence[Quantized]) -> np.ndarray:
    """Apply the updates of several commits to theta, float32[n]; gives the bits of the ledger."""
    new = theta.copy()
    buffers = Buffers(theta.size)
    for part in chunks(theta.size):
        for update in sent:
            new[part] += update.decode(part.start, part.stop, buffers.term)
    return new


def commit_fragment(
    theta: np.ndarray,
    outer_state: np.ndarray | None,
    contributions: Sequence[Contribution],
    outer: OuterRule,
    rate: float,
    share: float,
    out_theta: np.ndarray,
    out_outer: np.ndarray | None,
    out_sent: Quantized | None = None,
    averaged: Sequence[slice] = (),
    kept: float = 0.0,
) -> None:
    """Compute the next state of one fragment, float32[n], from at least one contribution.

    outer_state, out_outer: as `state_rows` gives before and after; out_sent: the update in the downlink's form, None if
    plain. averaged: elements that become the weighted mean of the snapshots (see `OuterRule.averaged_slices`); their
    momentum is meaningless. kept: the share of the moving average to keep. Outputs may be the inputs.
    Raise NotFinite for a state with NaN or infinity.
    """
    buffers = Buffers(theta.size)
    for part in chunks(theta.size):
        here = theta[part]
        new = out_theta[part] if out_sent is None else buffers.new[: here.size]
        # First, because theta or a base may be the output array.
        means = [(span, mean_chunk(contributions, span, buffers).copy()) for span in _within(averaged, part)]
        if outer.rule == "average":
            new[:] = average_chunk(theta, contributions, part, buffers)
        else:
            assert outer_state is not None and out_outer is not None
            u = update_chunk(contributions, part, buffers)
            before, after = _momentum(outer_state, outer, part), _momentum(out_outer, outer, part)
            nesterov_step(here, *before, u, outer, rate, share, new, *after)
        for span, mean in means:
            out_theta[span] = mean
        _require_finite(new, contributions, part, buffers)
        if out_sent is not None:
            assert outer_state is not None and out_outer is not None
            blocks = slice(part.start // BLOCK_SIZE, -(-part.stop // BLOCK_SIZE))
            sent = Quantized(out_sent.codes[blocks], out_sent.scales[blocks], out_sent.bits)
            quantize_change(here, new, outer_state[-1, part], out_theta[part], out_outer[-1, part], sent)
            _require_finite(out_theta[part], contributions, part, buffers)
        if outer.average is not None:
            assert outer_state is not None and out_outer is not None
            row = average_row(outer.downlink)
            np.subtract(outer_state[row, part], out_theta[part], out=buffers.term[: here.size])
            buffers.term[: here.size] *= np.float32(kept)
            np.add(out_theta[part], buffers.term[: here.size], out=out_outer[row, part])


def _require_finite(values: np.ndarray, contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> None:
    """Raise NotFinite with the contributions that have NaN or infinity; if only their sum overflows, the largest."""
    if np.isfinite(values).all():
        return
    largest = [float(np.abs(contribution.sent(part, buffers.term)).max()) for contribution in contributions]
    broken = [number for number, value in enumerate(largest) if not math.isfinite(value)]
    raise NotFinite(broken or [largest.index(max(largest))])


def _within(averaged: Sequence[slice], part: slice) -> Iterator[slice]:
    for span in averaged:
        first, last = max(span.start, part.start), min(span.stop, part.stop)
        if first < last:
            yield slice(first, last)


def _momentum(state: np.ndarray, outer: OuterRule, part: slice) -> tuple[np.ndarray, np.ndarray | None]:
    return state[0, part], state[1, part] if len(state) == state_rows(outer, gathered=1.0) else None

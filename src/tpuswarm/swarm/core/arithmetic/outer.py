"""The outer optimizer: what a commit makes of its contributions, how far one below the quorum may go, what is sent.

With a quantized downlink a commit moves theta by what can be sent in few bits, and keeps the rest for the next one:
members add what they were sent, and have the bits of the ledger.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Buffers, Contribution, average_of, chunks, mean_of, update_of
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK, Quantized, encode
from tpuswarm.swarm.core.values import Averaged, Form, Rule

RATES = ((1.5, 0.4), (4.5, 0.6), (7.5, 0.7))
"""Nesterov's rate below each number of effective contributors."""

RATE_OF_MANY = 0.8

MOMENTUM, MOMENTUM_OF_SMALL = 0.9, 0.8
SMALL = 2_000_000
"""Parameters below which the momentum is that of small models: above the largest where 0.8 was better (0.35 M,
docs/benchmarks.md, the ladder), and far below the smallest with a published 0.9 (35 M, Charles et al. 2025)."""

WHOLE = 1 - 1e-9
"""Shares that add up to it are a quorum: three times a third is one."""


def usual_momentum(parameters: int) -> float:
    """Of Nesterov, where nothing else is asked: what learnt best at equal tokens."""
    return MOMENTUM_OF_SMALL if parameters < SMALL else MOMENTUM


@dataclass(frozen=True)
class Average:
    """A moving average of the committed states, kept beside them: of no member's own."""

    half_life: float
    """Tokens counted."""
    share: float = math.inf
    """Of the tokens counted so far, that the half-life is at most."""

    def kept(self, tokens: int, after: int) -> float:
        """What a commit of so many tokens leaves of the average before it; after: the tokens counted with it."""
        return 0.5 ** (tokens / min(self.half_life, self.share * after))


@dataclass(frozen=True)
class Outer:
    """How contributions change the shared state: their weighted mean, or a Nesterov step along their mean delta."""

    rule: Rule
    momentum: float = MOMENTUM
    """Of Nesterov; 0 is plain steps of size `rate`."""
    rate: float | None = None
    """Of Nesterov; None: by the number of effective contributors."""
    downlink: Form = "plain"
    """In which members are sent what a commit changes."""
    averaged: tuple[Averaged, ...] = ()
    """What is merged by its mean whatever the rule; only with a plain downlink."""
    average: Average | None = None

    def __post_init__(self) -> None:
        if self.averaged and self.downlink != "plain":
            raise ValueError(
                f"{len(self.averaged)} arrays are averaged, which a downlink in {self.downlink} is not for"
            )
        if self.rule == "average" and self.rate is not None:
            raise ValueError(
                f"the outer rule average takes no rate, but {self.rate} was given; use nesterov with momentum 0"
            )

    def averaged_in(self, fragment: int) -> list[slice]:
        """The elements of a fragment that are merged by their mean."""
        return [slice(each.first, each.last) for each in self.averaged if each.fragment == fragment]

    def rate_for(self, effective_contributors: float, share: float = 1.0) -> float:
        """The given rate, else 1 for the mean and for Nesterov 0.4 for 1 contributor, 0.6 for 2 to 4, 0.7 for 5 to 7,
        0.8 from 8; an effective number between two whole ones counts as the nearest, half as the upper one.

        share: of a quorum, as `advance` gives it. The rate is that of the whole quorum: members that come one by one
        move the state as far as those that come together.
        """
        if self.rate is not None:
            return self.rate
        if self.rule == "average":
            return 1.0
        return next((rate for below, rate in RATES if effective_contributors / share < below), RATE_OF_MANY)


def state_rows(outer: Outer, gathered: float) -> int:
    """Of the outer state after a commit that left so many shares gathered.

    For Nesterov the momentum, then its buffer unless that is 0, as after every momentum step; then the moving average;
    last, what a quantized downlink has not sent yet.
    """
    momentum = (outer.rule == "nesterov") * (1 + (gathered != 0))
    return momentum + (outer.average is not None) + (outer.downlink != "plain")


def average_row(downlink: Form) -> int:
    """Where the moving average lies in an outer state that has one."""
    return -1 - (downlink != "plain")


def first_state(outer: Outer, theta: np.ndarray) -> np.ndarray | None:
    """The outer state of a fragment, theta float32[n], that begins: float32[rows, n]; None for nothing to keep.

    The moving average begins with theta, all else with 0.
    """
    rows = state_rows(outer, 0.0)
    if not rows:
        return None
    first = np.zeros((rows, theta.size), np.float32)
    if outer.average is not None:
        first[average_row(outer.downlink)] = theta
    return first


def advance(outer: Outer, gathered: float, contributors: int, quorum: int) -> tuple[float, float]:
    """Share of a quorum that a commit's contributors are, at most 1, and the shares gathered after it.

    The shares gathered are 0 after a commit that makes the momentum step, because with it they reach a quorum. The
    mean has no momentum to delay: every commit is whole.
    """
    if outer.rule == "average":
        return 1.0, 0.0
    share = min(1.0, contributors / quorum)
    after = gathered + share
    return share, 0.0 if after >= WHOLE else after


def step(
    theta: np.ndarray,
    momentum: np.ndarray,
    buffer: np.ndarray | None,
    u: np.ndarray,
    outer: Outer,
    rate: float,
    share: float,
    out_theta: np.ndarray,
    out_momentum: np.ndarray,
    out_buffer: np.ndarray | None,
) -> None:
    """Delayed Nesterov (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"), float32[n] each.

    A commit moves theta by its share of the update u at once; the momentum moves it only when a quorum is gathered, by
    the sum of shares that the buffer has kept till then. A buffer that is None is 0: it is so after a momentum step,
    which is what a commit without `out_buffer` makes. A commit of a whole quorum is the step of
    `optax.sgd(rate, momentum, nesterov=True)`. Outputs may be the inputs.
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


def publish(
    theta: np.ndarray, new: np.ndarray, left: np.ndarray, out_theta: np.ndarray, out_left: np.ndarray, sent: Quantized
) -> None:
    """What members are sent so that they come from theta towards new, and what is left over; float32[n] each.

    sent = Q(new - theta + left), out_theta = theta + sent, out_left = new - theta + left - sent; n fits a chunk.
    Outputs may be the inputs.
    """
    wanted = new - theta
    wanted += left
    sent.codes[:], sent.scales[:] = encode(wanted, sent.bits)
    moved = sent.decode(0, theta.size, np.empty(sent.scales.size * BLOCK, np.float32))
    np.subtract(wanted, moved, out=out_left)  # exact: see quantize.feedback
    np.add(theta, moved, out=out_theta)


def follow(theta: np.ndarray, sent: Sequence[Quantized]) -> np.ndarray:
    """The state, float32[n], some commits later, from what they sent: the bits that they made."""
    new = theta.copy()
    buffers = Buffers(theta.size)
    for part in chunks(theta.size):
        for each in sent:
            new[part] += each.decode(part.start, part.stop, buffers.term)
    return new


def commit(
    theta: np.ndarray,
    outer_state: np.ndarray | None,
    contributions: Sequence[Contribution],
    outer: Outer,
    rate: float,
    share: float,
    out_theta: np.ndarray,
    out_outer: np.ndarray | None,
    out_sent: Quantized | None = None,
    averaged: Sequence[slice] = (),
    kept: float = 0.0,
) -> None:
    """The next state of one fragment, float32[n], from at least one contribution; outputs may be the inputs.

    outer_state, out_outer: of the rows of `state_rows` before and after it; out_sent: of the downlink's form, None
    where that is plain. The mean needs no rate and no share. averaged: elements, as `Outer.averaged_in` gives
    them, that become the weighted mean of the snapshots; their part of the momentum means nothing. kept: what is left
    of the moving average, where there is one; the rest of it is the next state.
    """
    buffers = Buffers(theta.size)
    for part in chunks(theta.size):
        here = theta[part]
        new = out_theta[part] if out_sent is None else buffers.new[: here.size]
        # First: theta, and a contribution's base, may be where the next state is written.
        means = [(each, mean_of(contributions, each, buffers).copy()) for each in _within(averaged, part)]
        if outer.rule == "average":
            new[:] = average_of(theta, contributions, part, buffers)
        else:
            assert outer_state is not None and out_outer is not None
            u = update_of(contributions, part, buffers)
            before, after = _momentum(outer_state, outer, part), _momentum(out_outer, outer, part)
            step(here, *before, u, outer, rate, share, new, *after)
        for each, mean in means:
            out_theta[each] = mean
        if out_sent is not None:
            assert outer_state is not None and out_outer is not None
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            sent = Quantized(out_sent.codes[blocks], out_sent.scales[blocks], out_sent.bits)
            publish(here, new, outer_state[-1, part], out_theta[part], out_outer[-1, part], sent)
        if outer.average is not None:
            assert outer_state is not None and out_outer is not None
            row = average_row(outer.downlink)
            np.subtract(outer_state[row, part], out_theta[part], out=buffers.term[: here.size])
            buffers.term[: here.size] *= np.float32(kept)
            np.add(out_theta[part], buffers.term[: here.size], out=out_outer[row, part])


def _within(averaged: Sequence[slice], part: slice) -> Iterator[slice]:
    """What of these elements is in a part."""
    for each in averaged:
        first, last = max(each.start, part.start), min(each.stop, part.stop)
        if first < last:
            yield slice(first, last)


def _momentum(state: np.ndarray, outer: Outer, part: slice) -> tuple[np.ndarray, np.ndarray | None]:
    """A part of the momentum and of its buffer, None where that is left out."""
    return state[0, part], state[1, part] if len(state) == state_rows(outer, gathered=1.0) else None

"""The outer optimizer: what a commit makes of its contributions, how far one below the quorum may go, what is sent.

With a quantized downlink a commit moves theta by what can be sent in few bits, and keeps the rest for the next one:
members add what they were sent, and have the bits of the ledger.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.merge import Buffers, Contribution, average_of, chunks, update_of
from tpuswarm.swarm.core.quantize import BLOCK, Quantized, encode
from tpuswarm.swarm.core.values import Form, Rule

RATES = ((1.5, 0.4), (4.5, 0.6), (7.5, 0.7))
"""Nesterov's rate below each number of effective contributors."""

RATE_OF_MANY = 0.8

WHOLE = 1 - 1e-9
"""Shares that add up to it are a quorum: three times a third is one."""


@dataclass(frozen=True)
class Outer:
    """How contributions change the shared state: their weighted mean, or a Nesterov step along their mean delta."""

    rule: Rule
    momentum: float = 0.9
    """Of Nesterov; 0 is plain steps of size `rate`."""
    rate: float | None = None
    """Of Nesterov; None: by the number of effective contributors."""
    downlink: Form = "plain"
    """In which members are sent what a commit changes."""

    def __post_init__(self) -> None:
        if self.rule == "average" and self.rate is not None:
            raise ValueError(
                f"the outer rule average takes no rate, but {self.rate} was given; use nesterov with momentum 0"
            )

    def rate_for(self, effective_contributors: float) -> float:
        """The given rate, else 1 for the mean and for Nesterov 0.4 for 1 contributor, 0.6 for 2 to 4, 0.7 for 5 to 7,
        0.8 from 8; an effective number between two whole ones counts as the nearest, half as the upper one.
        """
        if self.rate is not None:
            return self.rate
        if self.rule == "average":
            return 1.0
        return next((rate for below, rate in RATES if effective_contributors < below), RATE_OF_MANY)


def first_state(outer: Outer, size: int) -> np.ndarray | None:
    """The outer state of a fragment at genesis, float32[rows, size], all 0; None where there is nothing to keep.

    Its rows are the momentum and its buffer for Nesterov, and last what a quantized downlink has not sent yet.
    """
    rows = 2 * (outer.rule == "nesterov") + (outer.downlink != "plain")
    return np.zeros((rows, size), np.float32) if rows else None


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
    outer_state: np.ndarray,
    u: np.ndarray,
    outer: Outer,
    rate: float,
    share: float,
    momentum_step: bool,
    out_theta: np.ndarray,
    out_outer: np.ndarray,
) -> None:
    """Delayed Nesterov (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"), float32.

    A commit moves theta by its share of the update u at once; the momentum, float32[n] in outer_state[0], moves it only
    when a quorum is gathered, by the sum of shares that the buffer, outer_state[1], has kept till then. A commit of a
    whole quorum is the step of `optax.sgd(rate, momentum, nesterov=True)`. Outputs may be the inputs.
    """
    for part in chunks(theta.size):
        momentum, buffer = outer_state[:2, part]
        moved = np.float32(share) * u[part]
        buffer = buffer + moved
        if momentum_step:
            momentum = np.float32(outer.momentum) * momentum
            momentum += buffer
            moved += np.float32(outer.momentum) * momentum
            buffer[:] = 0
        moved *= np.float32(rate)
        np.subtract(theta[part], moved, out=out_theta[part])
        out_outer[0, part] = momentum
        out_outer[1, part] = buffer


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
    momentum_step: bool,
    out_theta: np.ndarray,
    out_outer: np.ndarray | None,
    out_sent: Quantized | None = None,
) -> None:
    """The next state of one fragment, float32[n], from at least one contribution; outputs may be the inputs.

    outer_state, out_outer: as in `first_state`; out_sent: of the downlink's form, None where that is plain. The mean
    needs no rate and no share.
    """
    buffers = Buffers(theta.size)
    for part in chunks(theta.size):
        here = theta[part]
        new = out_theta[part] if out_sent is None else buffers.new[: here.size]
        if outer.rule == "average":
            new[:] = average_of(theta, contributions, part, buffers)
        else:
            assert outer_state is not None and out_outer is not None
            u = update_of(contributions, part, buffers)
            step(here, outer_state[:, part], u, outer, rate, share, momentum_step, new, out_outer[:, part])
        if out_sent is not None:
            assert outer_state is not None and out_outer is not None
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            sent = Quantized(out_sent.codes[blocks], out_sent.scales[blocks], out_sent.bits)
            publish(here, new, outer_state[-1, part], out_theta[part], out_outer[-1, part], sent)

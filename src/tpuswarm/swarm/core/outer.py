"""The outer optimizer: what a commit makes of its contributions, and how far a commit below the quorum may go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.merge import Contribution, average, chunks, update_of
from tpuswarm.swarm.core.values import Rule

RATES = ((1.5, 0.4), (4.5, 0.6), (7.5, 0.7))
"""Nesterov's rate below each number of effective contributors."""

RATE_OF_MANY = 0.8

WHOLE = 1 - 1e-9
"""Shares that add up to it are a quorum: three times a third is one."""


@dataclass(frozen=True)
class Outer:
    """How contributions change the exchanged state: their weighted mean, or a Nesterov step along their mean delta."""

    rule: Rule
    momentum: float = 0.9
    """Of Nesterov; 0 is plain steps of size `rate`."""
    rate: float | None = None
    """Of Nesterov; None: by the number of effective contributors."""

    def __post_init__(self) -> None:
        if self.rule == "average" and self.rate is not None:
            raise ValueError(f"the rule average takes no rate, and {self.rate} is given; momentum 0 and a rate do")

    def rate_for(self, effective_contributors: float) -> float:
        """The given rate, else 1 for the mean and for Nesterov 0.4 for 1 contributor, 0.6 for 2 to 4, 0.7 for 5 to 7,
        0.8 from 8; an effective number between two whole ones counts as the nearest, half as the upper one.
        """
        if self.rate is not None:
            return self.rate
        if self.rule == "average":
            return 1.0
        return next(
            (rate for below, rate in ((1.5, 0.4), (4.5, 0.6), (7.5, 0.7)) if effective_contributors < below), 0.8
        )


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
        momentum, buffer = outer_state[:, part]
        moved = np.float32(share) * u[part]
        buffer = buffer + moved
        if momentum_step:
            momentum = np.float32(outer.momentum) * momentum + buffer
            moved = moved + np.float32(outer.momentum) * momentum
            buffer = np.zeros_like(buffer)
        out_theta[part] = theta[part] - np.float32(rate) * moved
        out_outer[0, part] = momentum
        out_outer[1, part] = buffer


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
) -> None:
    """The next state of one fragment, float32[n], from at least one contribution; outputs may be the inputs.

    outer_state, out_outer: float32[2, n] for Nesterov, None for the mean, which also needs no rate and no share.
    """
    if outer.rule == "average":
        average(theta, contributions, out_theta)
        return
    assert outer_state is not None and out_outer is not None
    for part in chunks(theta.size):
        u = update_of(contributions, part)
        here, here_outer = out_theta[part], out_outer[:, part]
        step(theta[part], outer_state[:, part], u, outer, rate, share, momentum_step, here, here_outer)

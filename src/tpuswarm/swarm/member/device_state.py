"""A member's arrays as its processes see them: real ones, or a simulation's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import Rows


@dataclass(frozen=True)
class Payload:
    """A contribution on the host, ready to be sent."""

    fragments: tuple[dict[str, Any], ...]
    """Arrays of each fragment: `s`, or `codes` and `scales`."""
    digests: tuple[str, ...]
    norm: float
    finite: bool
    size_bytes: int = 0


class Evaluation(NamedTuple):
    """The result of a published version on held-out rows."""

    row: dict[str, Any]
    """A row of metrics.jsonl without the member's name."""
    pictures: dict[str, np.ndarray]
    """Pictures of the model and of hooks, uint8 (height, width, 3), by the suffix of their file name."""
    texts: list[str]
    """Texts that hooks returned, and their errors."""


class DeviceState(Protocol):
    """A member's parameters, anchor, inner optimizer state and error feedback."""

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """Train one step on these rows, at this share (of tokens) of the run; `ahead` is leased after them.

        May return before the step is computed. Return the rows of steps newly known to be done.
        """
        ...

    def settle(self) -> int:
        """Wait for all dispatched steps; return their rows."""
        ...

    def snapshot(self) -> Any:
        """Copy the parameters on the devices; training may continue at once."""
        ...

    def payload(self, snapshot: Any) -> Payload:
        """Encode a snapshot on the host; the same snapshot gives the same bytes."""
        ...

    def place(self, fragments: Sequence[Any]) -> Any:
        """Bring a published version to the devices; training continues meanwhile."""
        ...

    def adopt(self, adopt: Adopt, version: Any, own_share: float) -> None:
        """Adopt a version from `place` as `adopt.how` says; own_share: see MemberState.own_share."""
        ...

    def evaluate(self, stop: Callable[..., bool], average: Any | None, version: int, tokens: int) -> Evaluation | None:
        """Evaluate the last adopted version on held-out rows; None if `stop` returns True.

        version, tokens: its number and counted tokens; average: its moving average from `place`, if any.
        """
        ...

    def ramp(self) -> None:
        """Start with small updates: the parameters are trained, but their inner state is new."""
        ...

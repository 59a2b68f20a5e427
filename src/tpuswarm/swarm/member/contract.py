"""What a member's processes ask of whoever has its arrays: a real one, or a simulation's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpuswarm.swarm.core.books import Adopt
from tpuswarm.swarm.core.rows import Rows


@dataclass(frozen=True)
class Payload:
    """A contribution on the host, ready to be sent."""

    fragments: tuple[dict[str, Any], ...]
    """Of each fragment its arrays: `s`, or `codes` and `scales`."""
    digests: tuple[str, ...]
    norm: float
    finite: bool


class Evaluated(NamedTuple):
    """A published version on held-out rows."""

    row: dict[str, Any]
    """A row of metrics.jsonl without the member's name."""
    pictures: dict[str, np.ndarray]
    """Pictures of the model and of hooks, uint8 (height, width, 3), by the end of their file's name."""
    texts: list[str]
    """Texts that hooks returned, and errors of hooks."""


class Holder(Protocol):
    """Who has the arrays: parameters, anchor, inner state, error feedback."""

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """One step on these rows, at this share (of tokens) of the run; `ahead` is leased after them.

        May return while the step is still computed: the answer is the rows of steps newly known to be done.
        """
        ...

    def settle(self) -> int:
        """Wait for the steps that are still computed; their rows."""
        ...

    def snapshot(self) -> Any:
        """The parameters as they are, on the devices; training may go on at once."""
        ...

    def payload(self, snapshot: Any) -> Payload:
        """A snapshot brought to the host and encoded; the same snapshot gives the same bytes."""
        ...

    def place(self, fragments: Sequence[Any]) -> Any:
        """A published version brought to the devices; training goes on meanwhile."""
        ...

    def adopt(self, adopt: Adopt, version: Any, keep: float) -> None:
        """Come to a version that `place` gave, in the way that `adopt.how` says; keep: see Member.keep."""
        ...

    def evaluate(self, leave: Callable[[], bool], average: Any | None, version: int, tokens: int) -> Evaluated | None:
        """The version adopted last on held-out rows; None if told to leave. Asked for with `evaluate_every` only.

        version, tokens: its number, and the tokens counted by then; average: its moving average, which `place` brought,
        where the run keeps one.
        """
        ...

    def ramp(self) -> None:
        """Begin with small updates: parameters that were trained come without the inner state that they had."""
        ...

"""What every diagnostic returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that costs time or is not what the user believes, with the way out; said once."""

    kind: str
    """recompilation, host-sync, host-callback, starvation, matrix-unit, tied-weights, cpu-fallback or environment."""
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence rests on, as plain values."""

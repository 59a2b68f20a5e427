"""What every diagnostic returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that costs time or is not what the user believes, with the way out; said once."""

    kind: str
    """A row of the table in docs/slow-tpu.md; `unknown` for a diagnostic that failed itself."""
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence rests on, as plain values."""

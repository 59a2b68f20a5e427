"""Read facts about NVIDIA GPUs."""

import re


def parse_capability(text: str) -> tuple[int, int] | None:
    """Return the compute capability of NVIDIA's form 7.5; None for AMD's architectures."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None

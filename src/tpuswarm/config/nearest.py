"""The nearest right name, for errors that help."""

import difflib
from collections.abc import Iterable

ALSO = {"--learning-rate": "--lr", "--batch-size": "--batch", "--dropout-rate": "--dropout", "--n-layer": "--layers"}
"""What other programs call an option of ours."""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name most like a wrong one; None where none is near."""
    known, wrong = sorted(known), wrong.lower()
    if ALSO.get(wrong) in known:
        return ALSO[wrong]
    return next(iter(difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)), None)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """End of an error sentence: the nearest known name, else all of them."""
    known = sorted(known)
    if near := nearest(wrong, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if known else "there are none"

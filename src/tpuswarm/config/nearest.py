"""The nearest right name, for errors that help."""

import difflib
from collections.abc import Iterable

ALSO = {"--learning-rate": "--lr", "--batch-size": "--batch", "--dropout-rate": "--dropout", "--n-layer": "--layers"}
"""What other programs call an option of ours."""


def nearest(wrong: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known name most like a wrong one; None where none is near. The dashes of options make nothing alike.

    least: how much of both has to be alike.
    """
    known, wrong = sorted(known), wrong.lower()
    if ALSO.get(wrong) in known:
        return ALSO[wrong]
    bare = {each.lstrip("-"): each for each in known}
    near = difflib.get_close_matches(wrong.lstrip("-"), bare, n=1, cutoff=least)
    return bare[near[0]] if near else None


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """End of an error sentence: the nearest known name, else all of them."""
    known = sorted(known)
    if near := nearest(wrong, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if known else "there are none"

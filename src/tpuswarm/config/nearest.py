"""The nearest right name, for errors that help."""

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """End of an error sentence: the nearest known name, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(wrong.lower(), known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(known)}" if known else "there are none"

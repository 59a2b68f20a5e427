"""Words in files that have a form."""

import re
from typing import Annotated

from pydantic import AfterValidator


def matching(pattern: str, what: str) -> AfterValidator:
    """A text that matches; what it should be is the sentence of one that does not."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{what}, not {text!r}")
        return text

    return AfterValidator(check)


Name = Annotated[
    str, matching(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", "small letters, digits and -, at most 30, a letter first")
]

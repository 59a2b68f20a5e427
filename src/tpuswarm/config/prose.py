"""Sentences as lines of a terminal."""

import re

WORD = re.compile(r"\s*((?:`[^`]*`|[^\s`]+|`)+)")
"""What stays together: a word, and a command in backticks, which a person pastes."""


def wrapped(text: str, width: int, hang: int = 0) -> str:
    """Each line of a text, broken between words where it is wider than `width`.

    What follows begins at column `hang`, or as far in as its beginning. What is wider by itself (a path, a URL, a
    command in backticks) is not broken: it has a line of its own.
    """
    return "\n".join(_wrapped(line, width, hang) for line in text.split("\n"))


def _wrapped(line: str, width: int, hang: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (hang or len(line) - len(line.lstrip()))
    lines, begin, end = [], 0, 0
    left = width
    for word in WORD.finditer(line):
        if word.end() - begin > left and end > begin:
            lines.append(line[begin:end])
            begin, left = word.start(1), width - len(indent)
        end = word.end()
    return f"\n{indent}".join([*lines, line[begin:end]])

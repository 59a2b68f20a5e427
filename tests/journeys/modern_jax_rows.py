"""The tables of docs/modern-jax.md as programs: an old line, its result today, the new line."""

import os
import re
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from tests.journeys.documents import ROOT, blocks

PAGE = ROOT / "docs" / "modern-jax.md"
CODE = re.compile(r"^`(.*?)(?:  # (.*?))?`")
"""A cell's code, and after two blanks and a hash the value that it gives."""
WARNINGS = {"DeprecationWarning", "UserWarning"}


@dataclass(frozen=True)
class Row:
    """A line of one of the page's tables of three columns."""

    then: str
    ends: str
    now: str

    @property
    def needs_torch(self) -> bool:
        """Whether only an environment that has torch can run it."""
        return re.search(r"`(torch|jnp\.asarray\(tensor)", self.then) is not None


def rows() -> list[Row]:
    """All rows of the tables whose header is then, result today, write."""
    found: list[Row] = []
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        inside = line == "| then | result today | write |" or (inside and line.startswith("|"))
        if inside and not line.startswith(("| then", "|--")):
            then, ends, now = (cell.strip() for cell in line[1:-1].split(" | "))
            found.append(Row(then, ends, now))
    return found


def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with mock.patch.dict(os.environ):  # it sets some, which the processes of later tests would inherit
        exec(blocks(PAGE)[0].text, found)
    return found


def check(row: Row, names: dict[str, Any]) -> None:
    """Run both lines: the old one has to end as the row says, the new one has to work."""
    _run(row.now, dict(names))
    kind = match[1] if (match := CODE.match(row.ends)) else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Earlier tests of this process may have left files open.
        warnings.simplefilter("ignore", ResourceWarning)
        if kind is None or kind in WARNINGS:
            _run(row.then, names)
        else:
            with pytest.raises(Exception) as error:
                _run(row.then, names)
            assert type(error.value).__name__ == kind
    if kind is None:
        assert row.ends.startswith("works")
        assert [str(warning.message) for warning in caught] == []
    elif kind in WARNINGS:
        assert kind in {warning.category.__name__ for warning in caught}


def _run(cell: str, names: dict[str, Any]) -> None:
    match = CODE.match(cell)
    assert match, f"no code in {cell!r}"
    code, shown = match.groups()
    if shown is None:
        exec(code, names)
    else:
        assert repr(eval(code, names)) == shown

"""Sentences as lines of a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.config.prose import wrapped

TEXTS = st.text("ab`  .\n", max_size=60)


@given(text=TEXTS, width=st.integers(1, 30), hang=st.integers(0, 8))
def test_only_blanks_become_breaks(text, width, hang):
    found = wrapped(text, width, hang)
    assert found.split() == text.split()
    if "`" not in text:  # a line that is too wide is one word
        assert all(len(line) <= width or len(line.split()) == 1 for line in found.split("\n") if line.strip())


@given(text=TEXTS)
def test_what_fits_stays_as_it_is(text):
    assert wrapped(text, 60) == text


@pytest.mark.parametrize(
    ("text", "hang", "lines"),
    [
        ("look at it: `tpuswarm status runs/a`", 0, ["look at it:", "`tpuswarm status runs/a`"]),
        ("saved in /a/very/long/path/that/is/pasted now", 0, ["saved in", "/a/very/long/path/that/is/pasted", "now"]),
        ("  - one and two and three", 0, ["  - one and two", "  and three"]),
        ("1. one and two and then three", 3, ["1. one and two and", "   then three"]),
        ("do not `paste this and that", 0, ["do not `paste this", "and that"]),
    ],
)
def test_what_a_person_pastes_stays_together(text, hang, lines):
    assert wrapped(text, 18, hang).split("\n") == lines

"""Numbers, times, errors and sentences as people read them on a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.config.prose import wrapped
from tpuswarm.config.shown import age, clock, pace, share, significant, unit
from tpuswarm.errors import first_line

TEXTS = st.text("ab`  .\n", max_size=60)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.10345, "2.103"), (1.9, "1.900"), (0.0123456, "0.01235"), (123.456, "123.5"), (1234.56, "1235"),
        (0.00012, "0.0001200"), (0.00001234, "1.234e-05"), (123456.0, "1.235e+05"), (0.99999, "1.000"),
        (-1.5, "-1.500"), (0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "–"),
    ],
)  # fmt: skip
def test_number_has_four_digits(value, text):
    assert significant(value) == text


@given(st.floats(1e-30, 1e30))
def test_four_digits_are_close_to_the_number(value):
    assert float(significant(value)) == pytest.approx(value, rel=5.1e-4) and len(significant(value)) <= 9


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (clock, {None: "-:--:--", 0: "0:00:00", 65.4: "0:01:05", 90_061: "1 day, 1:01:01"}),
        (age, {0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 86_400: "1 day", 200_000: "2 days"}),
        (pace, {None: "– steps/s", 0: "– steps/s", 0.25: "4.0 s/step", 1: "1.0 steps/s", 1234: "1,234.0 steps/s"}),
        (share, {0: "0%", 1.4e-4: "1/7,143", 0.009: "1/111", 0.01: "1%", 0.4: "40%", 0.9999: "nearly all", 1: "100%"}),
        (unit, {1: "rows", 64: "tokens"}),
    ],
)  # fmt: skip
def test_quantity_is_shown(show, shown):
    assert {value: show(value) for value in shown} == shown


@pytest.mark.parametrize(
    ("error", "line"),
    [(OSError("no room\non the disk"), "no room"), (ValueError("\n  left out"), "left out"), (KeyError(), "KeyError")],
)
def test_first_line_of_an_error_is_never_empty(error, line):
    assert first_line(error) == line


@given(text=TEXTS, width=st.integers(1, 30), hang=st.integers(0, 8))
def test_wrapping_breaks_only_at_spaces(text, width, hang):
    found = wrapped(text, width, hang)
    assert found.split() == text.split()
    if "`" not in text:  # a line that is too wide is one word
        assert all(len(line) <= width or len(line.split()) == 1 for line in found.split("\n") if line.strip())


@given(text=TEXTS)
def test_text_that_fits_is_not_wrapped(text):
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
def test_commands_and_paths_are_not_broken(text, hang, lines):
    assert wrapped(text, 18, hang).split("\n") == lines

"""Counts, durations, errors and sentences as people type them and read them on a terminal."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tpuswarm.config.formatting import (
    format_age,
    format_bytes,
    format_duration,
    format_figure,
    format_share,
    format_step_rate,
    token_unit,
    wrap_text,
)
from tpuswarm.config.nearest import did_you_mean, nearest_name
from tpuswarm.config.units import Interval, check_number, parse_count, parse_every, parse_seconds
from tpuswarm.errors import InputError, first_line


@given(
    st.one_of(
        st.integers(0, 10**12), st.builds(lambda power, less: 10**power - less, st.integers(3, 9), st.integers(1, 99))
    )
)
def test_bytes_are_shown_in_the_largest_unit_that_suits(count):
    figure, unit = format_bytes(count).split()
    number, size = float(figure.replace(",", "")), {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert abs(number * size - count) <= 0.051 * size and (number < 1000 or unit == "GB")


@given(st.integers(1, 10**15))
def test_every_positive_integer_is_a_count(value):
    assert parse_count(str(value), "n") == value


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (parse_count, {"10M": 10_000_000, "1.5K": 1500, "2b": 2_000_000_000, 7: 7, "1e3": 1000}),
        (parse_seconds, {"10": 10.0, "10s": 10.0, "5m": 300.0, "2h": 7200.0, "0": 0.0}),
    ],
)
def test_unit_is_parsed(parse, values):
    assert {text: parse(text, "steps") for text in values} == values


@pytest.mark.parametrize("text", ["0", "-5", "many", "", "1.5", "10Q", "1e-3", "1e99", "9" * 5000, "nan"])
def test_invalid_count_is_refused(text):
    with pytest.raises(InputError, match="steps"):
        parse_count(text, "steps")


def test_interval_is_steps_or_time_and_due_after_it():
    assert parse_every("500", "save_every") == Interval(steps=500)
    assert parse_every("5m", "save_every") == Interval(seconds=300.0)
    for wrong in ("soon", "0m", "-3", "5 parsecs", "5x", "1e400d", ""):
        with pytest.raises(InputError, match="save_every is steps such as 500, or a time such as 30s or 5m, not"):
            parse_every(wrong, "save_every")
    assert [Interval(steps=3).due(step, 1e9) for step in range(1, 7)] == [False, False, True] * 2
    assert Interval(seconds=10).due(1, 10.0) and not Interval(seconds=10).due(1, 9.9)
    assert not Interval().due(1, 1e9)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"above": 0}, "lr must be above 0, not 0"),
        (1.0, {"above": 0, "below": 1}, "lr must be above 0 and below 1, not 1.0"),
        (-1, {"least": 0, "below": 2**32}, "lr must be at least 0 and below 4,294,967,296, not -1"),
        (float("nan"), {"least": 0}, "lr must be at least 0, not nan"),
        (float("inf"), {}, "lr must be a finite number, not inf"),
    ],
)
def test_number_out_of_bounds_is_refused(value, bounds, message):
    with pytest.raises(InputError) as error:
        check_number(value, "lr", **bounds)
    assert str(error.value) == message
    for accepted in (1, 2.5, 3):
        check_number(accepted, "lr", least=1, most=3)


def test_suggestion_is_the_nearest_name_or_all():
    assert did_you_mean("replikate", ["replicate", "fsdp"]) == "did you mean replicate?"
    assert did_you_mean("xyz", ["b", "a"]) == "known: a, b"
    assert nearest_name("--bogus", ["--host", "--hosts", "--lr"]) is None, "dashes alone are no likeness"
    assert nearest_name("--hsot", ["--host", "--lr"]) == nearest_name("hsot", ["--host"]) == "--host"


TEXTS = st.text("ab`  .\n", max_size=60)


@given(st.floats(1e-30, 1e30))
def test_four_digits_are_close_to_the_number(value):
    assert float(format_figure(value)) == pytest.approx(value, rel=5.1e-4) and len(format_figure(value)) <= 9


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (format_duration, {None: "-:--:--", 0: "0:00:00", 65.4: "0:01:05", 90_061: "1 day, 1:01:01"}),
        (format_age, {0: "0 s", 59: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 86_400: "1 day", 2e5: "2 days"}),
        (format_step_rate, {None: "– steps/s", 0: "– steps/s", 0.25: "4.0 s/step", 1234: "1,234.0 steps/s"}),
        (format_share, {0: "0%", 1.4e-4: "1/7,143", 0.01: "1%", 0.4: "40%", 0.9999: "nearly all", 1: "100%"}),
        (format_figure, {
            1.9: "1.900", 123.456: "123.5", 1234.56: "1235", 0.00001234: "1.234e-05", 123456.0: "1.235e+05",
            0.00012: "0.0001200", 0.99999: "1.000", -1.5: "-1.500", 0.0: "0", None: "–",
            float("nan"): "nan", float("inf"): "inf",
        }),
        (token_unit, {1: "rows", 64: "tokens"}),
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
    assert wrap_text(text, 60) == text, "it fits"
    found = wrap_text(text, width, hang)
    assert found.split() == text.split()
    if "`" not in text:  # a line that is too wide is one word
        assert all(len(line) <= width or len(line.split()) == 1 for line in found.split("\n") if line.strip())


WORDS = st.lists(st.sampled_from(["漢", "ア", "한", "😀", "a", "e\u0301"]), min_size=1).map("".join)


@given(words=st.lists(WORDS, min_size=1), width=st.integers(2, 30))
def test_wide_characters_take_two_columns(words, width):
    lines = wrap_text(" ".join(words), width).split("\n")
    assert " ".join(lines).split() == words
    assert all(cell_len(line) <= width or len(line.split()) == 1 for line in lines)
    assert all(cell_len(f"{one} {two.split()[0]}") > width for one, two in pairwise(lines)), "no line ends early"


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
    assert wrap_text(text, 18, hang).split("\n") == lines

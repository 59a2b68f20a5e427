"""Counts, durations and bounds as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.config.nearest import did_you_mean, nearest
from tpuswarm.config.units import Interval, check_number, parse_count, parse_every, parse_seconds
from tpuswarm.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"), [("500", 500), ("10M", 10_000_000), ("1.5K", 1500), ("2b", 2_000_000_000), (7, 7), ("1e3", 1000)]
)
def test_count_is_parsed(text, value):
    assert parse_count(text, "steps") == value


@given(st.integers(1, 10**15))
def test_every_positive_integer_is_a_count(value):
    assert parse_count(str(value), "n") == value


@pytest.mark.parametrize("text", ["0", "-5", "many", "", "1.5", "10Q", "1e-3", "1e99", "9" * 5000, "nan"])
def test_invalid_count_is_refused(text):
    with pytest.raises(InputError, match="steps"):
        parse_count(text, "steps")


@pytest.mark.parametrize(("text", "value"), [("10", 10.0), ("10s", 10.0), ("5m", 300.0), ("2h", 7200.0), ("0", 0.0)])
def test_duration_is_parsed(text, value):
    assert parse_seconds(text, "notice") == value


def test_interval_is_steps_or_time():
    assert parse_every("500", "save_every") == Interval(steps=500)
    assert parse_every("5m", "save_every") == Interval(seconds=300.0)
    for wrong in ("soon", "0m", "-3", "5 parsecs", "5x", "1e400d", ""):
        with pytest.raises(InputError, match="save_every is steps such as 500, or a time such as 30s or 5m, not"):
            parse_every(wrong, "save_every")


def test_interval_is_due_after_its_steps_or_time():
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


def test_number_within_bounds_is_accepted():
    for value in (1, 2, 2.5, 3):
        check_number(value, "n", least=1, most=3)
    check_number(1e-30, "n", above=0, below=1)


def test_suggestion_is_the_nearest_name_or_all():
    assert did_you_mean("replikate", ["replicate", "fsdp"]) == "did you mean replicate?"
    assert did_you_mean("xyz", ["b", "a"]) == "known: a, b"
    assert nearest("--bogus", ["--host", "--hosts", "--lr"]) is None, "dashes alone are no likeness"
    assert nearest("--hsot", ["--host", "--lr"]) == nearest("hsot", ["--host"]) == "--host"

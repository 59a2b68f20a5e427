import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.config.shown import age, clock, pace, share, significant, unit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.10345, "2.103"), (1.9, "1.900"), (0.0123456, "0.01235"), (123.456, "123.5"), (1234.56, "1235"),
        (0.00012, "0.0001200"), (0.00001234, "1.234e-05"), (123456.0, "1.235e+05"), (0.99999, "1.000"),
        (-1.5, "-1.500"), (0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "–"),
    ],
)  # fmt: skip
def test_four_digits(value, text):
    assert significant(value) == text


@given(st.floats(1e-30, 1e30))
def test_four_digits_tell_the_value_and_are_never_zero(value):
    assert float(significant(value)) == pytest.approx(value, rel=5.1e-4) and len(significant(value)) <= 9


def test_times_as_people_read_them():
    assert [clock(each) for each in (None, 0, 65.4, 90_061)] == ["-:--:--", "0:00:00", "0:01:05", "1 day, 1:01:01"]
    ages = (0, 59.9, 60, 3599, 3600, 86_400, 200_000)
    assert [age(each) for each in ages] == ["0 s", "59 s", "1 min", "59 min", "1 h", "1 day", "2 days"]
    assert [pace(each) for each in (None, 0.0, 0.25, 1.0, 1234.5)] == [
        "– steps/s", "– steps/s", "4.0 s/step", "1.0 steps/s", "1,234.5 steps/s",
    ]  # fmt: skip


def test_rows_are_no_tokens():
    assert (unit(1), unit(64)) == ("rows", "tokens")


def test_a_share_is_never_nothing_of_something_nor_all_of_what_is_not():
    parts = (0.0, 1.4e-4, 0.009, 0.01, 0.45, 0.99, 0.9999, 1.0)
    assert [share(each) for each in parts] == [
        "0%", "1/7,143", "1/111", "1%", "45%", "99%", "nearly all", "100%",
    ]  # fmt: skip

"""Paces, curves, bars, and tables that fit and do not jump."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tpuswarm.train.look.widgets import (
    MAX_CURVE_POINTS,
    SPARK_CHARACTERS,
    Column,
    Curve,
    Pace,
    lay_out,
    make_table,
    sparkline,
)


def drawn(renderable, width=80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


@given(st.lists(st.floats(-1e6, 1e6), max_size=2000))
def test_curve_of_any_length_keeps_its_mean(values):
    curve = Curve()
    for value in values:
        curve.add(value)
    means, size = curve.means, curve._size
    assert len(means) <= MAX_CURVE_POINTS and len(means) == -(-len(values) // size)
    for number, mean in enumerate(means):
        part = values[number * size : (number + 1) * size]
        assert mean == pytest.approx(sum(part) / len(part), abs=1e-3)


def test_pace_covers_the_last_minutes_also_after_a_resume():
    pace, many, resumed = Pace(), Pace(), Pace()
    assert pace.per_second is None
    for second in range(1000):  # ten a second, later one
        pace.add(second, 10 * min(second, 500) + max(0, second - 500))
        assert second == 0 or pace.per_second <= 10.001
    assert pace.per_second == pytest.approx(1.0)
    for step in range(100_000):
        many.add(step / 1000, step)
    assert many.per_second == pytest.approx(1000, rel=0.01)
    resumed.add(10.0, 5_000)
    resumed.add(11.0, 5_002)
    assert resumed.per_second == 2.0


def test_sparkline_goes_from_the_lowest_to_the_highest_and_does_not_jump():
    assert sparkline([], 10) == "" and sparkline([1.0], 10) == SPARK_CHARACTERS[0]
    assert sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8) == SPARK_CHARACTERS[::-1]
    assert {len(sparkline(tuple(range(count)), 80)) for count in (80, 81, 119, 161, 1000)} == {80}


COLUMNS = [Column("run"), Column("recipe", rank=2), Column("step", right=True, width=6), Column("speed", rank=1)]
ROWS = [("runs/a", "gpt2-tiny", "1", "17 tokens/s"), ("runs/a-long-name", "toy", "123", "")]


def test_table_drops_columns_by_rank_and_folds_names_where_there_is_no_room():
    lines = {width: drawn(make_table(COLUMNS, ROWS, width), width) for width in (80, 40, 30, 20)}
    heads = {width: lines[width][0].split() for width in lines}
    assert heads[80] == ["run", "recipe", "step", "speed"] and lines[80][1].split()[:2] == ["runs/a", "gpt2-tiny"]
    assert heads[40] == ["run", "step", "speed"] and heads[30] == heads[20] == ["run", "step"]
    assert "".join(line[:12].strip() for line in lines[20][2:]) == "runs/a-long-name" and "…" not in "".join(lines[20])


def test_text_is_wrapped_before_a_column_is_dropped():
    columns = [Column("run"), Column("why", wraps=10), Column("step", right=True, rank=1)]
    rows = [("runs/a", "because it was interrupted by its owner", "12")]
    lines = drawn(make_table(columns, rows, 36), 36)
    assert lines[0].split() == ["run", "why", "step"] and len(lines) == 4 and lines[1].rstrip().endswith("12")
    assert drawn(make_table(columns, rows, 20), 20)[0].split() == ["run", "why"]


def test_table_that_fits_in_no_other_way_folds_all_text():
    columns = [Column("job"), Column("machine"), Column("state"), Column("why", wraps=20)]
    rows = [("members-v6e-8", "v6e-use1d-0", "running", "run 1 on v6e-use1d-0")]
    lines = drawn(make_table(columns, rows, 44), 44)
    assert lines[0].split() == ["job", "machine", "state", "why"] and all(len(line) <= 44 for line in lines)
    assert "".join(line[:11].strip() for line in lines[1:]) == "members-v6e-8"


def test_markup_in_a_table_is_text():
    assert "[red]x[/red]" in drawn(make_table([Column("run")], [("[red]x[/red]",)], 80))[1]


@given(st.lists(st.text("ab ", min_size=1, max_size=20).filter(str.strip), min_size=1), st.integers(20, 80))
def test_facts_stay_whole_on_as_few_lines_as_fit(facts, width):
    lines = [line.plain for line in lay_out(facts, width)]
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(facts).replace(" ", "")
    assert all(any(line.startswith(fact.lstrip()) for fact in facts) for line in lines), "no line begins inside a fact"

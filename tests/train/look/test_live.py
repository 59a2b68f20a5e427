"""What live views are made of: paces, curves, tables that fit and do not jump."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tpuswarm.train.look.live import BARS, POINTS, Column, Curve, Pace, bar, sparkline, table


def drawn(renderable, width=80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


@given(st.lists(st.floats(-1e6, 1e6), max_size=2000))
def test_a_curve_of_any_length_keeps_its_mean(values):
    curve = Curve()
    for each in values:
        curve.add(each)
    means, size = curve.means, curve._size
    assert len(means) <= POINTS and len(means) == -(-len(values) // size)
    for number, mean in enumerate(means):
        part = values[number * size : (number + 1) * size]
        assert mean == pytest.approx(sum(part) / len(part), abs=1e-3)


def test_a_pace_forgets_what_was_long_ago():
    pace = Pace()
    assert pace.per_second is None
    for second in range(1000):  # ten a second, later one
        pace.add(second, 10 * min(second, 500) + max(0, second - 500))
        assert second == 0 or pace.per_second <= 10.001
    assert pace.per_second == pytest.approx(1.0)
    many = Pace()
    for step in range(100_000):
        many.add(step / 1000, step)
    assert many.per_second == pytest.approx(1000, rel=0.01) and len(many._seen) < 250


def test_a_pace_goes_on_where_a_run_was_resumed():
    pace = Pace()
    pace.add(10.0, 5_000)
    assert pace.per_second is None
    pace.add(11.0, 5_002)
    assert pace.per_second == 2.0


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([], 10) == "" and sparkline([1.0], 10) == BARS[0]
    assert sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8) == BARS[::-1]
    assert {len(sparkline(tuple(range(count)), 80)) for count in (80, 81, 119, 161, 1000)} == {80}  # it does not jump


def test_a_bar_does_not_move_while_its_figure_grows():
    lines = [drawn(bar(done, 12_345, "steps", 60))[0] for done in (0, 7, 1_234, 12_345)]
    assert [line[:4] for line in lines] == ["  0%", "  0%", "  9%", "100%"]
    assert len({line.index(" of 12,345 steps") for line in lines}) == 1 and {len(line) for line in lines} == {60}


COLUMNS = [Column("run"), Column("recipe", rank=2), Column("step", right=True, width=6), Column("speed", rank=1)]
ROWS = [("runs/a", "gpt2-tiny", "1", "17 tokens/s"), ("runs/a-long-name", "toy", "123", "")]


def test_columns_are_left_out_by_rank_where_there_is_no_room():
    wide = drawn(table(COLUMNS, ROWS, 80))
    assert wide[0].split() == ["run", "recipe", "step", "speed"] and wide[1].split()[:2] == ["runs/a", "gpt2-tiny"]
    assert drawn(table(COLUMNS, ROWS, 40), 40)[0].split() == ["run", "step", "speed"]
    assert drawn(table(COLUMNS, ROWS, 30), 30)[0].split() == ["run", "step"]


def test_text_is_wrapped_before_a_column_is_left_out():
    columns = [Column("run"), Column("why", wraps=10), Column("step", right=True, rank=1)]
    rows = [("runs/a", "because it was interrupted by its owner", "12")]
    lines = drawn(table(columns, rows, 36), 36)
    assert lines[0].split() == ["run", "why", "step"] and len(lines) == 4 and lines[1].rstrip().endswith("12")
    assert drawn(table(columns, rows, 20), 20)[0].split() == ["run", "why"]


def test_a_name_is_folded_and_never_cut():
    lines = drawn(table(COLUMNS, ROWS, 20), 20)
    assert "".join(line[:12].strip() for line in lines[2:]) == "runs/a-long-name" and "…" not in "".join(lines)


def test_a_column_keeps_its_place_while_figures_grow():
    heads = {drawn(table(COLUMNS, [("runs/a", "toy", each, "")], 80))[0] for each in ("1", "12,345")}
    assert len(heads) == 1


def test_markup_in_a_name_is_text():
    assert "[red]x[/red]" in drawn(table([Column("run")], [("[red]x[/red]",)], 80))[1]

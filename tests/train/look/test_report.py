"""The parts of a report: smoothed curves, tables, history, samples; and curves in TensorBoard."""

import math
import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpuswarm.train.look.report import SMOOTHING_PARTS, facts_table, history_facts, html_table, samples_section, smooth
from tpuswarm.train.look.tensorboard_log import TensorBoardLog


def test_smoothed_curve_keeps_level_slope_and_length():
    rows = 40 * SMOOTHING_PARTS
    line, noise = 3 - 2 * np.arange(rows) / rows, np.random.default_rng(1).normal(0, 0.5, rows)
    made = smooth(list(line + noise))
    assert made.shape == (rows,)
    assert np.abs(made - line)[40:-40].max() < 0.45 < np.abs(noise).max()
    np.testing.assert_allclose(smooth([2.0] * rows), 2.0)
    np.testing.assert_array_equal(smooth([1.0, 2.0, None, 4.0]), [1.0, 2.0, math.nan, 4.0])  # too few to smooth
    np.testing.assert_allclose(smooth([1.0] * 500 + [None] * 3 + [1.0] * 500), 1.0)
    assert smooth([]).shape == (0,)


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["1", "1,234", "–"], True), (["12.3%", "4.5%"], True), (["0.5 s", "12 s"], True), (["-1.2", "3e"], False),
        (["m0 50%"], False), (["", "7"], True), (["v4-8"], False), (["2.0 GiB", "17 MiB"], True),
    ],
)  # fmt: skip
def test_columns_of_numbers_are_aligned_to_the_right(cells, right):
    page = html_table("Counts", ("name", "count"), [("a", cell) for cell in cells])
    assert ('<th scope="col" class="n">count</th>' in page) == right and 'class="n">name' not in page
    assert len(re.findall('<td class="n">', page)) == right * len(cells)
    assert ('class="n"' in facts_table("Facts", [("x", cell) for cell in cells])) == right


def test_empty_columns_are_left_out_and_samples_are_escaped():
    page = html_table("Names", ("name", "empty"), [("a", "")])
    assert "empty" not in page and '<tr><td class="w">a</td></tr>' in page
    [(name, part)] = samples_section([{"event": "note"}, {"event": "sample", "step": 1200, "text": "<b>\n\x1b[1m\0"}])
    assert name == "What it writes" and "step 1,200" in part and ">&lt;b&gt;\n\\x1b[1m\\x00</pre>" in part
    assert samples_section([{"event": "note"}]) == []


def test_history_has_the_first_and_the_last_command_and_all_times():
    events = [
        {"time": 0.0, "event": "started", "command": "tpuswarm train gpt2-tiny"},
        {"time": 60.0, "event": "stopped"},
        {"time": 86_300.0, "event": "started", "command": "tpuswarm train gpt2-tiny --keep 5"},
        {"time": 86_400.0, "event": "started", "command": "tpuswarm resume mine"},
        {"time": 90_000.0, "event": "finished"},
    ]
    facts = dict(history_facts(events))
    assert facts["command"] == "tpuswarm train gpt2-tiny" and facts["resumed with"] == "tpuswarm resume mine"
    assert "resumed with" not in dict(history_facts(events[:2]))
    assert re.fullmatch(r"19(69-12-31|70-01-01) .* to 1970-01-0[12] .*", facts["when"])
    assert history_facts([]) == [] and dict(
        history_facts([*events[1:2], {"time": 1.0, "event": "started"}])
    ).keys() == {"when"}


@pytest.mark.parametrize(("first_step", "steps"), [(0, [1, 11]), (20, [1, 11, 21, 31])])
def test_steps_of_a_killed_process_are_drawn_once(tmp_path, first_step, steps):
    for start, last in ((0, 51), (first_step, steps[-1])):  # the first one is killed
        board = TensorBoardLog(tmp_path, start)
        for step in range(start + 1, last + 1):
            board.write({"step": step, "loss": 1 / step})
        board.flush()
    assert [point.step for point in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")] == steps

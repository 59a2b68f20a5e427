"""Curves in TensorBoard are those of one run, however often it was killed."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpuswarm.train.look.tensorboard_log import TensorBoardLog


@pytest.mark.parametrize(("first_step", "steps"), [(0, [1, 11]), (20, [1, 11, 21, 31])])
def test_steps_of_a_killed_process_are_drawn_once(tmp_path, first_step, steps):
    for start, last in ((0, 51), (first_step, steps[-1])):  # the first one is killed
        board = TensorBoardLog(tmp_path, start)
        for step in range(start + 1, last + 1):
            board.write({"step": step, "loss": 1 / step})
        board.flush()
    assert [point.step for point in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")] == steps

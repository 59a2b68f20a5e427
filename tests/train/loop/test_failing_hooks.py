"""Hooks and loggers that fail or hang."""

import shutil
import socket
import threading
from contextlib import suppress
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from tests.train import toy
from tests.train.loop.test_hooks import NEVER_BETTER, Logger, fit, notes
from tpuswarm import (
    Every,
    InputError,
    RunFailed,
)
from tpuswarm.train.look import guarded_logger
from tpuswarm.train.loop.hooks import Step
from tpuswarm.train.run.directory import METRICS, read_rows

ERRORS = [OSError("no disk"), SystemExit(3), RunFailed("mine"), KeyError("a"), TimeoutError("no answer")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_failing_hook_and_logger_are_named_by_line_and_the_run_goes_on(tmp_path, error):
    def fails(step):
        if step.row["step"] >= 3:
            raise error

    loggers = Logger(fails=error), Logger()
    recipe = toy.recipe()
    recipe.loggers = lambda: fails(Step({"step": 3}, None))
    seen, hooks = [], [Every(2, fails), Every(2, lambda step: seen.append(step.row["step"]))]
    assert fit(tmp_path / "run", recipe, loggers=loggers, hooks=hooks).ended == "finished"
    rows = list(read_rows(tmp_path / "run" / METRICS))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9)) and seen == [2, 4, 6, 8]
    assert all(logger.rows == rows and logger.closed == 1 for logger in loggers)
    reported = notes(tmp_path / "run")
    for start in ("loggers of", "a logger failed at step 1", "a hook failed at step 4"):
        [note] = [note for note in reported if note.startswith(start) or note.startswith("mine")][:1]
        assert "training continues" in note and ("test_failing_hooks.py:" in note or note.startswith("mine"))
    assert f"a logger failed {len(rows)} times in all; metrics.jsonl has every row" in reported


def test_failing_hook_is_not_called_before_its_time(tmp_path):
    calls = []

    def fails(step):
        calls.append(step.row["step"])
        raise OSError("no disk")

    fit(tmp_path / "run", hooks=[Every("1h", fails)])
    assert calls == [8]


def test_failing_hook_ends_several_hosts(tmp_path, monkeypatch):
    """The others may wait for it in a collective of theirs."""

    def fails(step):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise OSError("no disk")

    with pytest.raises(InputError, match=r"a hook failed at step 4: OSError: no disk \(.*test_failing_hooks\.py:"):
        fit(tmp_path / "run", hooks=[Every(4, fails)])


def test_logger_that_hangs_is_left_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded_logger, "TIMEOUT_S", 0.5)

    def hang(row=None):
        while True:
            with suppress(Exception):  # as a logger does that tries again and again
                threading.Event().wait()

    written, sound = Mock(**{"write.side_effect": hang}), Logger()
    closed = Mock(**{"close.side_effect": hang})
    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody answers
        asked = Mock(**{"write.side_effect": lambda row: socket.create_connection(server.getsockname()).recv(1)})
        assert fit(tmp_path / "run", loggers=[written, closed, asked, sound]).ended == "finished"
    assert sound.rows == list(read_rows(tmp_path / "run" / METRICS)) and sound.closed == 1
    assert (written.write.call_count, asked.write.call_count, closed.write.call_count) == (1, 1, len(sound.rows))
    reported = [note for note in notes(tmp_path / "run") if "it hung for 0.5 s" in note]
    assert len(reported) == 3 and all("test_failing_hooks.py:" in note for note in reported)


def test_tensorboard_that_cannot_be_written_does_not_end_the_run(tmp_path):
    fit(tmp_path / "run", NEVER_BETTER, steps=4)
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / "tensorboard").touch()
    picture = np.zeros((4, 6, 3), np.uint8)
    assert fit(tmp_path / "run", NEVER_BETTER, hooks=[Every(1, lambda step: picture)]).ended == "finished"
    assert any("tensorboard" in note and "training continues" in note for note in notes(tmp_path / "run"))
    assert (tmp_path / "run" / "pictures" / "00000008-0.png").exists()

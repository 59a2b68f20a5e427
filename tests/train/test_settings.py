import signal

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process.stop import decide_stop
from tpuswarm.train.settings import count_steps, differences, refuse_differences


def test_only_what_is_asked_can_differ():
    stored = {"steps": 10, "clip": 1.0}
    assert differences(stored, {"steps": None, "clip": None, "ema": None}) == []
    assert differences(stored, {"steps": 10, "clip": 1}) == []
    found = differences(stored, {"steps": 20, "ema": 0.9})
    assert found == ["steps was 10, now 20", "ema was none, now 0.9"]
    with pytest.raises(InputError, match=r"steps was 10.*ema was none.*only --devices, .*may change"):
        refuse_differences("runs/x", found)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1000}, 4),
        ({"tokens": 768}, 3),
        ({"epochs": 2.0}, 50),
        ({"epochs": 0.001}, 1),
        ({}, None),
    ],
)
def test_length_of_a_run(given, steps):
    asked = {"steps": None, "tokens": None, "epochs": None, **given}
    assert count_steps(**asked, tokens_per_step=256, rows_per_epoch=100, batch=4) == steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 5, "tokens": 5}, "one of steps, tokens and epochs, not steps and tokens"),
        ({"steps": -5}, "steps must be above 0"),
        ({"epochs": 0.0}, "epochs must be above 0"),
    ],
)
def test_lengths_that_are_none(given, words):
    asked = {"steps": None, "tokens": None, "epochs": None, **given}
    with pytest.raises(InputError, match=words):
        count_steps(**asked, tokens_per_step=256, rows_per_epoch=100, batch=4)


def test_epochs_of_endless_data_are_refused():
    with pytest.raises(InputError, match="no epochs"):
        count_steps(None, None, 1.0, 256, None, 4)


@pytest.mark.parametrize(
    ("asked", "seconds", "busy", "save", "words"),
    [
        (signal.SIGINT, 500.0, True, True, "interrupted"),
        (signal.SIGTERM, 4.0, False, True, "a save takes 4.0 s of the 10.0 s left"),
        (signal.SIGTERM, 6.0, True, False, "a save takes 12.0 s, more than the 10.0 s left"),
        (signal.SIGTERM, 11.0, False, False, "more than the 10.0 s left"),
        (signal.SIGTERM, None, False, False, "no save has been timed yet"),
    ],
)
def test_saving_at_the_end_follows_the_notice(asked, seconds, busy, save, words):
    decision = decide_stop(asked, seconds, busy, left=10.0)
    assert decision.save == save and words in decision.reason

"""A run killed at any point of a save resumes with the metrics of an undisturbed run."""

import signal
from pathlib import Path

import pytest

from tests.crash import die_at
from tests.processes import ONE_DEVICE, Forked, rows_without_times
from tpuswarm.train.run.best import best_checkpoint
from tpuswarm.train.run.listing import read_status
from tpuswarm.train.storage.folders import BEST

pytestmark = pytest.mark.slow


def train(monkeypatch: pytest.MonkeyPatch, point: str, folder: Path, *goal: str) -> int:
    for name, value in ONE_DEVICE.items():
        monkeypatch.setenv(name, value)
    return Forked([die_at.__file__, point, str(folder), *goal]).wait(240)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics of a run that was never killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train(monkeypatch, "nowhere", folder) == 0
    return rows_without_times(folder)


@pytest.mark.parametrize("point", die_at.POINTS)
def test_run_killed_at_this_point_resumes(monkeypatch, undisturbed, tmp_path, point):
    folder = tmp_path / "run"
    assert train(monkeypatch, point, folder) == -signal.SIGKILL
    assert read_status(folder).state == "killed"
    assert train(monkeypatch, "nowhere", folder) == 0
    assert rows_without_times(folder) == undisturbed and read_status(folder).state == "finished"


@pytest.mark.parametrize(
    ("point", "goal", "step"), [("next best half written", "eval_loss", 20), ("best not named", "eval_worst:max", 7)]
)
def test_best_checkpoint_survives_a_kill(monkeypatch, undisturbed, tmp_path, point, goal, step):
    folder = tmp_path / "run"
    assert train(monkeypatch, point, folder, goal) == -signal.SIGKILL
    if (folder / BEST).exists():
        assert best_checkpoint(folder).step == 7, "a named checkpoint is complete"
    assert train(monkeypatch, "nowhere", folder, goal) == 0
    assert rows_without_times(folder) == undisturbed and best_checkpoint(folder).step == step

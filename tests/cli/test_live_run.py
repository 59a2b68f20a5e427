"""Whoever reads a run while it trains gets its newest whole checkpoint, however fast it saves and prunes."""

import signal

import jax
import pytest

from tests.processes import finish, start, wait_for
from tpuswarm import load
from tpuswarm.train.run.loaded import load_run
from tpuswarm.train.storage.folders import BEST

pytestmark = pytest.mark.slow
TINY = ["--tokenizer", "bytes", "--layers", "1", "--width", "32", "--heads", "2", "--batch", "8"]


@pytest.fixture(scope="module")
def live_run(tmp_path_factory, text_file):
    """A run that saves and prunes all the time."""
    folder = tmp_path_factory.mktemp("live") / "run"
    words = ["train", "gpt2-tiny", "--data", str(text_file), *TINY, "--steps", "10M", "--run", str(folder)]
    often = ["--save-every", "5", "--keep", "1", "--keep-best", "eval_loss", "--eval-every", "40"]
    process = start([*words, *often], folder.parent)
    wait_for((folder / BEST).exists, process)
    yield folder
    process.send_signal(signal.SIGINT)
    finish(process, 130)


def test_newest_and_best_state_are_read(live_run):
    steps = []
    for _ in range(10):
        for best in (False, True):
            loaded = load_run(live_run, jax.devices()[:1], best=best)
            assert loaded.notes == []
            steps.append(loaded.step)
        assert load(live_run)["params"].keys() == load(live_run, best=True)["params"].keys()
    assert len({*steps[::2]}) > 1 and steps[::2] == sorted(steps[::2]), "each time a newer one"


@pytest.mark.parametrize("words", [["sample", "--tokens", "4"], ["evaluate"], ["export"], ["status"], ["logs"]])
def test_commands_do_not_notice_that_it_trains(live_run, typed, tmp_path, words):
    command, *options = words
    arguments = [str(tmp_path / "exported")] if command == "export" else []
    code, _, err = typed(command, str(live_run), *arguments, *options)
    assert (code, err) == (0, "")

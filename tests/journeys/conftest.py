import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.runs import made_once
from tests.terminal import LARGE, SMALL, terminal

GOLDEN = Path(__file__).resolve().parents[1] / "recipes" / "golden" / "model"
"""A published GPT-2."""
SHAPE = "--layers 2 --heads 2 --width 16 --context 12"
"""Of that model."""


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run a command line in this process, in an empty folder; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    return lambda line: typed(*line.split())


class WatchedSwarm(NamedTuple):
    """A finished swarm of two that began with GOLDEN and whose text is gone; to read only."""

    run: Path
    small: str
    """A screen of 80 columns while it trained."""
    large: str
    """The same later, after the terminal was made larger."""
    text: str
    """All that was shown."""


@pytest.fixture(scope="session")
def watched_swarm(text_file, finished_run) -> WatchedSwarm:
    """Made once in a session, after `finished_run`, in a terminal that is resized meanwhile."""
    folder, screens = made_once("watched", lambda folder: _watch_a_swarm(folder, text_file))
    return WatchedSwarm(folder / "runs" / "swarm", *screens)


def _watch_a_swarm(folder: Path, text_file: Path) -> tuple[str, str, str]:
    shutil.copyfile(text_file, folder / "text.txt")
    words = (
        f"train gpt2-tiny --data text.txt {SHAPE} --init-from hf:{GOLDEN} --steps 400 --members 2 --cycle 10 --expect 1"
    )
    with terminal([*words.split(), "--outer", "average", "--run", "runs/swarm"], folder, SMALL) as opened:
        small = opened.wait(lambda shown: "commit 2" in shown.screen and is_whole(shown.screen))
        opened.resize(LARGE)
        large = opened.wait(
            lambda shown: "commit 4" in shown.screen and max(map(len, shown.lines)) == 120 and is_whole(shown.screen)
        )
        opened.finish()
    (folder / "text.txt").unlink()
    return small, large, opened.text


def is_whole(screen: str) -> bool:
    """Return whether the last row of a swarm's view is there: a frame may arrive in pieces."""
    return re.search(r"\nm1 +(?:alive|joining)", screen) is not None

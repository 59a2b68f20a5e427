"""`tpuswarm demo` from its start to its end, and a second one beside it."""

import json
import re
from contextlib import suppress

import pytest

from tests import processes
from tests.terminal import terminal
from tpuswarm.errors import InputError

pytestmark = pytest.mark.slow


def test_demo_trains_through_a_kill(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")  # without them it trains for minutes
    with terminal(["demo"], tmp_path, new=True) as opened:
        opened.wait("(m1)")
        opened.wait(lambda shown: re.search(r"m1 +lost", shown.screen))
        opened.wait(lambda shown: re.search(r"m1 +alive", shown.screen))
        opened.finish()
    assert "runs/demo finished at commit" in opened.sentences and "none twice" in opened.sentences
    assert "finished" in opened.screen and "what the model writes now" in opened.screen, "the end fits on a screen"
    folder = tmp_path / "runs" / "demo"
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page and "kill" in page
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert rows[-1]["eval_loss"] < 2.3 < 4.0 < losses[0]  # 2.159 and 2.2001 were seen
    again = processes.start(["demo"], tmp_path, new=True)

    def has_begun() -> bool:
        with suppress(InputError):  # no metrics for a moment, while the old run is replaced
            return processes.updates(folder) in range(1, 600)
        return False

    processes.wait_for(has_begun, again)
    _, err = processes.finish(processes.start(["demo"], tmp_path, new=True), 2)
    assert f"in use by process {again.pid}" in err
    again.kill()
    again.communicate()

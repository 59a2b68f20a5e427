"""Killed or stopped runs resume with the metrics of an undisturbed run, bit for bit."""

import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import PATIENCE, finish, rows_without_times, run, start, updates, wait_for
from tests.train import wide
from tpuswarm.train.run.listing import read_status

pytestmark = pytest.mark.slow
STEPS = 100
TRAIN = ["train", f"{wide.__file__}:held", "--batch", "16", "--steps", str(STEPS), "--save-every", "10",
         "--eval-every", "40", "--seed", "3", "--run", "run"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics of a run that was never disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(TRAIN, folder)
    rows = rows_without_times(folder / "run")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return rows


def start_until(rows: int, cwd: Path, *words: str) -> subprocess.Popen[str]:
    """Start a run and wait until it has `rows` updates; it has data for a few steps more, and cannot end."""
    (cwd / "hold_after").write_text(str(rows + 5))
    process = start([*TRAIN, *words], cwd)
    wait_for(lambda: updates(cwd / "run") >= rows, process)
    return process


def run_to_the_end(cwd: Path) -> tuple[str, str]:
    (cwd / "hold_after").unlink()
    return run(TRAIN, cwd)


def test_stopped_by_signals_and_in_use_until_then(undisturbed, tmp_path):
    folder = tmp_path / "run"
    for number, rows in ((signal.SIGINT, 15), (signal.SIGTERM, 40)):
        process = start_until(rows, tmp_path)
        wait_for(lambda: any(folder.glob("checkpoints/*/manifest.json")), process)  # how long a save takes
        process.send_signal(signal.SIGSTOP)
        try:
            _, err = run(TRAIN, tmp_path, code=2)
            assert f"run is in use by process {process.pid}" in err and err.count("\n") == 1
            seen = json.loads(run(["status", "run", "--json"], tmp_path)[0])
            assert (seen["state"], seen["pid"]) == ("running", process.pid)
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
            out, err = finish(process, 128 + number)
        finally:
            process.kill()
        stopped = updates(folder)
        assert f"saved at step {stopped}" in out and "Traceback" not in err and read_status(folder).state == "stopped"
    _, err = run_to_the_end(tmp_path)
    assert f"resumed from the checkpoint of step {stopped}" in err and rows_without_times(folder) == undisturbed


def test_notice_too_short_for_a_save_leaves_the_last_checkpoint(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start_until(10, tmp_path, "--grace", "0s")
    wait_for((folder / "checkpoints" / "00000010" / "manifest.json").exists, process)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, 128 + signal.SIGTERM)
    saved = max(int(path.parent.name) for path in (folder / "checkpoints").glob("*/manifest.json"))
    if updates(folder) > saved:
        assert "more than the 0.0 s left" in out and f"checkpoint of step {saved} is safe" in out
    _, err = run_to_the_end(tmp_path)
    assert f"resumed from the checkpoint of step {saved}" in err and rows_without_times(folder) == undisturbed


def test_killed_at_random_moments(undisturbed, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown with a failure
    moments, folder = random.Random(seed), tmp_path / "run"
    for _ in range(6):
        process = start_until(min(STEPS - 6, max(1, updates(folder) + moments.randrange(-8, 40))), tmp_path)
        process.send_signal(moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.communicate(timeout=PATIENCE)
    run_to_the_end(tmp_path)
    assert rows_without_times(folder) == undisturbed

"""`train --detach`: a run that outlives its terminal, and one that does not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.moments import TRAIN
from tests.processes import finish, run, start, updates, wait_for
from tests.terminal import terminal
from tpuswarm.cli.train import logs_and_stop
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.run.life import read_life
from tpuswarm.train.run.listing import read_status

pytestmark = pytest.mark.slow
FOLDER = Path("runs/a")


def test_detached_run_outlives_its_terminal(tmp_path):
    with terminal([*TRAIN, "--detach"], tmp_path) as opened:
        opened.wait("starting gpt2-tiny in runs/a … ")
        text = opened.finish()
        assert "runs/a trains in the background, process " in text and "to stop it: `tpuswarm stop runs/a`" in text
        assert updates(tmp_path / FOLDER) > 0
    pid = read_life(tmp_path / FOLDER).pid
    assert pid and os.getsid(pid) == pid, "it has no terminal"
    before = read_status(tmp_path / FOLDER).step
    follower = start(["logs", "-f", "runs/a"], tmp_path)
    wait_for(lambda: read_status(tmp_path / FOLDER).step > before, follower)
    assert json.loads(run(["status", "runs/a", "--json"], tmp_path)[0])["state"] == "running"

    _, err = finish(start([*TRAIN, "--detach"], tmp_path), 2)
    assert err == f"error: runs/a is in use by process {pid}; stop it first, or use another --run\n"
    out, _ = run(["stop", "runs/a"], tmp_path)
    assert "saved at step" in out and "To resume: the same `tpuswarm train` command with --run runs/a" in out
    log, _ = finish(follower)
    assert "gpt2-tiny" in log and out.strip() in log and "blocks/mlp/fc/w" in log, "the parameters are in the log"
    assert [log.count(f"{event}: ") for event in ("started", "model")] == [1, 1], "each event appears once"


def test_other_run_stops_with_its_terminal(tmp_path):
    saves = tmp_path / FOLDER / "checkpoints"
    with terminal([*TRAIN, "--save-every", "50"], tmp_path) as opened:
        # With the second one it is known how long a save takes.
        opened.wait(lambda _: any(int(path.parent.name) for path in saves.glob("*/manifest.json")))
        assert opened.hang_up() == 128 + signal.SIGHUP
    life = read_life(tmp_path / FOLDER)
    assert life.state == "stopped" and f"saved at step {updates(tmp_path / FOLDER)}" in life.message


def test_swarm_stops_with_its_terminal(tmp_path):
    folder = tmp_path / FOLDER
    with terminal([*TRAIN, "--members", "1", "--cycle", "8"], tmp_path) as opened:
        opened.wait(lambda _: (folder / "commits" / "000002.json").exists())
        assert opened.hang_up() == 128 + signal.SIGHUP
    life = read_life(folder)
    assert life.state == "stopped" and life.message.startswith("its terminal closed: ")
    found = verify(Store(folder), lambda _: None)
    assert found.problems == [] and found.undecided == 0 and found.newest is not None
    assert f"stopped at commit {found.newest}, " in life.message


RELEASES_ITS_RUN = """
import sys
from pathlib import Path
from tpuswarm.train.run.directory import Run
run = Run(Path("runs/a"), "a")
for step in (lambda: None, run.close):
    step()
    print(flush=True)
    sys.stdin.readline()
"""


def test_following_logs_waits_for_the_last_lines_of_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_and_stop, "LAST_WORDS_S", 600.0)
    process = start([], tmp_path, [sys.executable, "-c", RELEASES_ITS_RUN], stdin=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.readline()
    follower = logs_and_stop.RunProcess(tmp_path / FOLDER)
    assert follower.may_print()
    print(file=process.stdin, flush=True)
    process.stdout.readline()
    late = logs_and_stop.RunProcess(tmp_path / FOLDER)
    assert follower.may_print() and not late.may_print(), "who comes after the end does not wait"
    process.communicate("\n", timeout=240)
    assert not follower.may_print()


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path):
    with terminal([*TRAIN, "--detach"], tmp_path) as opened:
        opened.wait("starting gpt2-tiny in runs/a … ")
        opened.wait(lambda item: (tmp_path / FOLDER / "train.log").exists())
        opened.send(b"\x03")
        assert opened.finish(130).strip().endswith("interrupted")
    assert not list(tmp_path.iterdir())


def test_child_that_refuses_is_answered_as_in_the_foreground(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(*TRAIN, "--devices", "99", "--members", "2", "--detach")
    assert (code, out) == (2, "") and err.startswith("error: ") and "99" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_finished_run_is_not_started(typed, tmp_path, monkeypatch, text_file, finished_run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run.run, FOLDER)
    words = f"train gpt2-tiny --data {text_file} --layers 1 --steps 60 --lr 3e-3 --devices 1 --run runs/a --detach"
    code, out, _ = typed(*words.split())
    assert code == 0 and "nothing left to do" in out and "runs/a finished at step 60 of 60" in out

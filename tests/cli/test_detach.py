"""`train --detach`: a run that no terminal ends, and what becomes of one in a terminal that closes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run, start, updates, wait_for
from tests.terminal import Terminal, terminal
from tpuswarm.cli import control
from tpuswarm.train.run.directory import EVENTS, Run, read_rows
from tpuswarm.train.run.life import read_life

MODEL = ["--data", "fake", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "8"]
TRAIN = ["train", "gpt2-tiny", *MODEL, "--steps", "1000000", "--run", "runs/a"]
KINDS = pytest.mark.parametrize("swarm", [[], ["--members", "2", "--cycle", "10"]], ids=["plain", "swarm"])
FOLDER = Path("runs/a")


def training(terminal: Terminal, tmp_path: Path) -> bool:
    """Whether there is something that a stop would lose."""
    if (tmp_path / FOLDER / "status.json").exists():
        return any(row["event"] == "commit" for row in read_rows(tmp_path / FOLDER / EVENTS))
    first = tmp_path / FOLDER / "checkpoints" / "00000000" / "manifest.json"
    return first.exists() and updates(tmp_path / FOLDER) > 10


@KINDS
def test_a_terminal_that_closes_stops_a_run_and_the_same_command_resumes_it(tmp_path, swarm):
    with terminal([*TRAIN, *swarm], tmp_path) as opened:
        opened.wait(lambda each: training(each, tmp_path))
        assert opened.hang_up() == 128 + signal.SIGHUP
    life = read_life(tmp_path / FOLDER)
    assert life.state == "stopped", life
    stopped = status(tmp_path)
    assert (
        stopped["step"] > 0 and ("stopped at commit" if swarm else f"saved at step {stopped['step']}") in life.message
    )
    resumed = start([*TRAIN, *swarm], tmp_path)
    wait_for(lambda: status_now(tmp_path) > stopped["step"], resumed)
    resumed.send_signal(signal.SIGINT)
    _, err = resumed.communicate(timeout=240)
    assert resumed.returncode == 130, err
    assert bool(swarm) or f"resumed from the checkpoint of step {stopped['step']}" in err


def status(tmp_path: Path) -> dict:
    return json.loads(run(["status", str(FOLDER), "--json"], tmp_path)[0])


def status_now(tmp_path: Path) -> int:
    """Steps done, without a process of its own."""
    from tpuswarm.swarm.views.status import look
    from tpuswarm.train.run import listing

    folder = tmp_path / FOLDER
    return look(folder).step if (folder / "status.json").exists() else listing.status(folder).step


@KINDS
def test_a_detached_run_outlives_its_terminal_and_is_reached_from_another(tmp_path, swarm):
    with terminal([*TRAIN, *swarm, "--detach"], tmp_path) as opened:
        opened.wait("getting ready …")
        opened.wait("starting gpt2-tiny in runs/a … ")
        said = opened.finish()
        assert "runs/a is training, process " in said and "to stop it: `tpuswarm stop runs/a`" in said
        assert updates(tmp_path / FOLDER) > 0
    pid = read_life(tmp_path / FOLDER).pid
    assert pid and os.getsid(pid) == pid  # no terminal is over it
    before = status_now(tmp_path)
    follower = start(["logs", "-f", "runs/a"], tmp_path)
    wait_for(lambda: status_now(tmp_path) > before, follower)
    assert status(tmp_path)["state"] == "running"

    again = start([*TRAIN, *swarm, "--detach"], tmp_path)
    _, err = again.communicate(timeout=240)
    assert (again.returncode, err) == (
        2, f"error: runs/a is in use by process {pid}; stop it first, or use another --run\n",
    )  # fmt: skip
    out, _ = run(["stop", "runs/a"], tmp_path)
    assert "the same `tpuswarm train` command with --run runs/a resumes it" in out
    log, _ = follower.communicate(timeout=240)
    assert follower.returncode == 0 and "gpt2-tiny" in log and out.strip() in log
    assert "parameter  " not in log, "a table is not for a log"
    events = [line for line in log.splitlines() if "started: " in line or " joined (" in line]
    assert len(events) == (3 if swarm else 1), "what happened is told once"


LETS_GO_AND_LIVES_ON = """
import sys
from pathlib import Path
from tpuswarm.train.run.directory import Run
run = Run(Path("runs/a"), "a")
for step in (lambda: None, run.close, lambda: None):
    step()
    print(flush=True)
    sys.stdin.readline()
"""


def test_logs_f_stays_for_the_last_words_which_come_when_the_run_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "PARTING", 600.0)
    program = [sys.executable, "-c", LETS_GO_AND_LIVES_ON]
    process = start([], tmp_path, program, stdin=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.readline()
    speaker, late = control.Speaker(tmp_path / FOLDER), control.Speaker(tmp_path / FOLDER)
    assert speaker.may_speak()
    print(file=process.stdin, flush=True)
    process.stdout.readline()
    assert speaker.may_speak() and not late.may_speak(), "who comes late has nothing to wait for"
    process.communicate("\n\n", timeout=240)
    assert not speaker.may_speak()


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path):
    with terminal([*TRAIN, "--detach"], tmp_path) as opened:
        opened.wait("starting gpt2-tiny in runs/a … ")
        opened.wait(lambda each: (tmp_path / FOLDER / "train.log").exists())
        opened.send(b"\x03")
        assert opened.finish(130).strip().endswith("interrupted")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train gpt2-tny --detach", "unknown recipe 'gpt2-tny'; did you mean gpt2-tiny?"),
        ("train gpt2-tiny --steps 0 --detach", "steps must be a whole number above 0"),
        ("train gpt2-tiny --data nowhere.txt --detach", "nowhere.txt"),
        ("train gpt2-tiny --data fake --devices 99 --run runs/a --members 2 --detach", "99"),
        ("train gpt2-tiny --hosts 2 --host 0 --hosts-at localhost:1 --run runs/a --detach", "exclude each other"),
    ],
)
def test_wrong_input_is_answered_as_in_the_foreground(typed, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(*words.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_taken_or_finished(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "gpt2-tiny", *MODEL, "--steps", "2", "--run", "runs/a"]
    held = Run(FOLDER)
    code, _, err = typed(*words, "--detach")
    assert code == 2 and f"in use by process {os.getpid()}" in err
    held.close()
    assert typed(*words)[0] == 0
    code, out, _ = typed(*words, "--detach")
    assert code == 0 and "nothing left to do" in out and "runs/a finished at step 2 of 2" in out

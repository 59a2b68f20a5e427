"""`tpuswarm join` without a swarm: what keeps a machine's node alive, and what keeps a host of several alive."""

import os
import socket
import subprocess
import sys

import pytest

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines import node
from tpuswarm.swarm.engines.files import DISMISSED, ENVIRONMENT
from tpuswarm.swarm.runtime import join as joining
from tpuswarm.swarm.runtime.group import Group
from tpuswarm.swarm.runtime.join import _Life, join
from tpuswarm.train.line import ABSENT, FAILED, LEFT, LOST, TAKEN, WRONG


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    """An address that answers until it is closed, in the place of a swarm."""
    monkeypatch.setattr(node, "PAUSE", 0.05)
    monkeypatch.setattr(node, "CUT", 0.2)
    monkeypatch.setattr(node, "private_folder", lambda: tmp_path / "private")
    monkeypatch.setattr(joining, "PAUSE", 0.0)
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # set by joining, and to be as before afterwards
    (tmp_path / "private").mkdir()
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def ray_start(monkeypatch, script: str) -> list[subprocess.Popen]:
    """A shell's script in the place of `ray start`; the processes that were started."""
    started = []

    def start(address, parent, environment, output):
        command = ["sh", "-c", script, str(parent)]
        started.append(subprocess.Popen(command, stdout=output, start_new_session=True))
        return started[-1]

    monkeypatch.setattr(node, "_start", start)
    return started


def test_a_node_that_ends_is_started_again_while_the_swarm_lives(swarm, tmp_path, monkeypatch):
    started = ray_start(monkeypatch, "echo Ray runtime started")
    said = []

    def say(text: str) -> None:
        said.append(text)
        if len(started) == 3:
            swarm.close()

    join(address(swarm), None, tmp_path / "token", say)
    again = "this machine dropped out, but the swarm is alive; rejoining in"
    assert [text.startswith(again) for text in said] == [False, True, True, True, False]
    assert (len(started), said[-1]) == (4, "the swarm has ended")


def test_a_machine_that_is_too_busy_to_start_ray_tries_again(swarm, tmp_path, monkeypatch):
    started = ray_start(monkeypatch, "echo Exception: The current node timed out during startup.; exit 1")
    said = []

    def say(text: str) -> None:
        said.append(text)
        if len(started) == 2:
            swarm.close()

    join(address(swarm), None, tmp_path / "token", say)
    again = "this machine was too busy to start Ray, but the swarm is alive; trying again in 0 s"
    assert said[1:] == [again, again, "the swarm has ended"] and len(started) == 3


def test_a_node_that_never_came_up_is_not_tried_again(swarm, tmp_path, monkeypatch):
    started = ray_start(monkeypatch, "echo Ray is too old here")
    with pytest.raises(RunFailed, match=r"could not join .*: Ray is too old here"):
        join(address(swarm), None, tmp_path / "token", lambda text: None)
    assert len(started) == 1


@pytest.mark.parametrize(("how", "error"), [("wrong", InputError), ("failed", RunFailed)])
def test_a_machine_that_is_dismissed_is_told_why(swarm, tmp_path, monkeypatch, how, error):
    letter = f'{{"how": "{how}", "reason": "j0 cannot join: other data"}}'
    script = f"mkdir $0/$$; echo '{letter}' > $0/part; mv $0/part $0/$$/{DISMISSED}; exec sleep 60"
    started = ray_start(monkeypatch, script)
    with pytest.raises(error, match="j0 cannot join: other data"):
        join(address(swarm), None, tmp_path / "token", lambda text: None)
    assert [each.poll() is not None for each in started] == [True]
    assert list((tmp_path / "private").iterdir()) == []


def test_what_a_killed_node_left_is_removed_and_no_other_folder(swarm, tmp_path, monkeypatch):
    private = tmp_path / "private"
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (str(dead.pid), str(os.getpid()), "ray"):
        (private / name).mkdir()
    ray_start(monkeypatch, "echo Ray runtime started")
    node.be_node("127.0.0.1:1", tmp_path / "token", {}, lambda text: None)
    assert {path.name for path in private.iterdir()} == {str(os.getpid()), "ray"}


def test_ray_gets_a_folder_named_by_its_own_pid(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$$ $@"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (tmp_path / "out").open("w+") as out:
        process = node._start("127.0.0.1:1", tmp_path / "private", {}, out.fileno())
        assert process.wait(20) == 0
    said = (tmp_path / "out").read_text()
    assert said.startswith(f"{process.pid} start --address 127.0.0.1:1 --block")
    assert said.endswith(f" --temp-dir {tmp_path}/private/{process.pid}\n")


def test_a_node_shows_its_token_whatever_this_process_has_imported(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with (tmp_path / "out").open("w+") as out:
        node._start("127.0.0.1:1", tmp_path / "private", {}, out.fileno()).wait(20)
    assert (tmp_path / "out").read_text() == "token 0\n"


STEPPED = _Life(LOST, "host 0 is gone (connection closed), so this host stops too; start again", True)
GONE = STEPPED._replace(stepped=False)
ALONE = _Life(ABSENT, "host 0 did not answer", False)
SECOND = _Life(TAKEN, "not for another host 1", False)
FAREWELL = _Life(LEFT, "", True)


@pytest.mark.parametrize(
    ("lives", "error", "words"),
    [
        ([STEPPED, GONE, GONE, STEPPED, GONE, GONE, FAREWELL], None, "host 0 has left the swarm"),
        ([GONE] * 4, RunFailed, r"4 times without a step: host 0 is gone \(connection closed\); join"),
        ([_Life(-9, "", False)] * 4, RunFailed, "without a step: its process was killed"),
        ([STEPPED, ALONE, ALONE, ALONE, ALONE, FAREWELL], None, "host 0 has left the swarm"),
        ([ALONE], InputError, "host 0 did not answer"),
        ([SECOND], InputError, "not for another host 1"),
        ([STEPPED, SECOND, SECOND, FAREWELL], None, "host 0 has left the swarm"),
        ([STEPPED, SECOND, SECOND, SECOND], RunFailed, "not for another host 1"),
        ([STEPPED, _Life(WRONG, "m0 cannot join", False)], InputError, "m0 cannot join"),
        ([STEPPED, _Life(FAILED, "the disk is full", False)], RunFailed, "the disk is full"),
    ],
)
def test_a_host_lives_until_it_is_left_refused_or_gets_nowhere(swarm, tmp_path, monkeypatch, lives, error, words):
    left, said = list(lives), []
    monkeypatch.setattr(joining, "_live", lambda group, stop, say: left.pop(0))
    token = tmp_path / "token"
    group = Group("127.0.0.1:9", 2, 1, str(token))
    if error:
        with pytest.raises(error, match=words):
            join(address(swarm), group, token, said.append)
    else:
        join(address(swarm), group, token, said.append)
        assert said[-1].startswith(words)
    assert left == [] and sum("does not answer" in text for text in said) == (ALONE in lives and error is None)

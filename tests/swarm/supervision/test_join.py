"""`tpuswarm join` without a swarm: what keeps a machine's node alive, and what keeps a host of several alive."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines import node
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import BATCH, COMPILED, DISMISSED, ENVIRONMENT
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.supervision import join as joining
from tpuswarm.swarm.supervision.join import _Life, join
from tpuswarm.swarm.views.status import FINISHED, STOPPED, Progress, SwarmStatus, compose
from tpuswarm.train.hosts.line import ABSENT, FAILED, LEFT, LOST, TAKEN, WRONG


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

    def start(address, parent, name, environment, output, ports):
        command = ["sh", "-c", script, str(parent)]
        started.append(subprocess.Popen(command, stdout=output, start_new_session=True))
        return started[-1]

    monkeypatch.setattr(node, "_start", start)
    return started


def test_a_machine_s_own_batch_reaches_its_members(swarm, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(joining, "be_node", lambda at, token, name, environment, say, ports: told.append(environment))
    for batch in (8, None):
        join(address(swarm), None, None, tmp_path / "token", lambda text: None, batch=batch)
    assert told == [{BATCH: "8"}, {}]


def test_a_node_that_ends_is_started_again_while_the_swarm_lives(swarm, tmp_path, monkeypatch):
    started = ray_start(monkeypatch, "echo Ray runtime started")
    said = []

    def say(text: str) -> None:
        said.append(text)
        if len(started) == 3:
            swarm.close()

    join(address(swarm), None, None, tmp_path / "token", say)
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

    join(address(swarm), None, None, tmp_path / "token", say)
    again = "this machine was too busy to start Ray, but the swarm is alive; trying again in 0 s"
    assert said[1:] == [again, again, "the swarm has ended"] and len(started) == 3


def test_a_node_that_never_came_up_is_not_tried_again(swarm, tmp_path, monkeypatch):
    started = ray_start(monkeypatch, "echo Ray is too old here")
    with pytest.raises(RunFailed, match=r"could not join .*: Ray is too old here"):
        join(address(swarm), None, None, tmp_path / "token", lambda text: None)
    assert len(started) == 1


@pytest.mark.parametrize(("how", "error"), [("wrong", InputError), ("failed", RunFailed)])
def test_a_machine_that_is_dismissed_is_told_why(swarm, tmp_path, monkeypatch, how, error):
    letter = f'{{"how": "{how}", "reason": "j0 cannot join: other data"}}'
    script = f"mkdir $0/$$; echo '{letter}' > $0/part; mv $0/part $0/$$/{DISMISSED}; exec sleep 60"
    started = ray_start(monkeypatch, script)
    with pytest.raises(error, match="j0 cannot join: other data"):
        join(address(swarm), None, None, tmp_path / "token", lambda text: None)
    assert [each.poll() is not None for each in started] == [True]
    assert list((tmp_path / "private").iterdir()) == []


def test_what_a_killed_node_left_is_removed_and_no_other_folder(swarm, tmp_path, monkeypatch):
    private = tmp_path / "private"
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (str(dead.pid), str(os.getpid()), "ray"):
        (private / name).mkdir()
    ray_start(monkeypatch, "echo Ray runtime started")
    node.be_node("127.0.0.1:1", tmp_path / "token", None, {}, lambda text: None)
    assert {path.name for path in private.iterdir()} == {str(os.getpid()), "ray"}


def test_ray_gets_a_folder_named_by_its_own_pid(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$$ $@"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (tmp_path / "out").open("w+") as out:
        process = node._start("127.0.0.1:1", tmp_path / "private", None, {}, out.fileno())
        assert process.wait(20) == 0
    said = (tmp_path / "out").read_text()
    assert said.startswith(f"{process.pid} start --address 127.0.0.1:1 --block")
    assert said.endswith(f" --temp-dir {tmp_path}/private/{process.pid}\n")


def test_ray_listens_on_ports_of_its_range_alone(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$@"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (tmp_path / "out").open("w+") as out:
        node._start("127.0.0.1:1", tmp_path / "private", None, {}, out.fileno(), Ports(20_000, 20_099)).wait(20)
    words = (tmp_path / "out").read_text().split()
    given = {word: int(after) for word, after in pairwise(words) if word.endswith("-port")}
    assert len(given) == len(set(given.values())) == 8
    assert all(20_000 < port <= 20_099 for port in given.values())
    assert given["--max-worker-port"] - given["--min-worker-port"] == 92


def test_a_node_outlives_the_notice_of_a_preemption_but_not_a_join_that_is_killed(tmp_path):
    """The notice is SIGTERM to all processes of a machine: the member has work to hand in through its node."""
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    ray.chmod(0o700)  # a shell would let signals in while it waits
    code = (
        "import sys, time; from pathlib import Path; from tpuswarm.swarm.engines import node\n"
        f"sys.executable = '{tmp_path}/python'\n"
        "node._start('127.0.0.1:1', Path('private'), None, {}, 1); time.sleep(600)"
    )
    joined = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert joined.stdout
    pid = int(joined.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)

    def state():
        try:
            return Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return ""

    pending = re.search(r"ShdPnd:\s+(\w+)", state())
    assert pending and int(pending[1], 16) & (1 << signal.SIGTERM - 1), "it would take the signal"
    joined.kill()
    joined.wait()
    end = time.monotonic() + 60
    while "SigPnd" in state() and "State:\tZ" not in state():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_node_shows_its_token_whatever_this_process_has_imported(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with (tmp_path / "out").open("w+") as out:
        node._start("127.0.0.1:1", tmp_path / "private", None, {}, out.fileno()).wait(20)
    assert (tmp_path / "out").read_text() == "token 0\n"


@pytest.mark.parametrize(("phase", "said"), [(FINISHED, "is finished"), (STOPPED, "was stopped")])
def test_a_run_that_is_over_lets_its_members_go(tmp_path, monkeypatch, phase, said):
    class Bucket:
        def __init__(self, url):
            pass

        def read(self, name):
            status = compose(None, (), 100, (), "127.0.0.1:1", {}, 1.0, Progress(0.0))
            return TypeAdapter(SwarmStatus).dump_json(replace(status, phase=phase))

    monkeypatch.setattr(joining, "Bucket", Bucket)
    monkeypatch.setenv(COMPILED, "")  # set by joining, and to be as before afterwards
    heard = []
    joining.join_run("gs://some/runs/all", None, None, tmp_path / "token", heard.append)
    assert heard == [f"gs://some/runs/all {said}"]
    assert os.environ[COMPILED] == "gs://some/runs/all/compiled"


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
            join(address(swarm), None, group, token, said.append)
    else:
        join(address(swarm), None, group, token, said.append)
        assert said[-1].startswith(words)
    assert left == [] and sum("does not answer" in text for text in said) == (ALONE in lives and error is None)


def test_a_dashboard_listens_on_this_machine_alone_and_only_where_it_was_asked_for(tmp_path, monkeypatch):
    from tpuswarm.swarm.engines import ray as engine

    def told(**options):
        raise Exception(f"{options['include_dashboard']} at {options['dashboard_host']}")

    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")  # put back afterwards
    monkeypatch.setattr(engine.ray, "init", told)
    for asked in (False, True):
        cluster = engine.Cluster("run", tmp_path / "token", None, dashboard=asked)
        with pytest.raises(RunFailed, match=f"{asked} at 127.0.0.1"), cluster:
            pass


def test_a_machine_too_busy_to_start_ray_says_so(tmp_path, monkeypatch):
    from tpuswarm.swarm.engines import ray as engine

    def slow(**options):
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")  # put back afterwards
    monkeypatch.setattr(engine.ray, "init", slow)
    cluster = engine.Cluster("run", tmp_path / "token", None)
    with pytest.raises(RunFailed, match="Ray does not start on this machine: The current node timed out"), cluster:
        pass

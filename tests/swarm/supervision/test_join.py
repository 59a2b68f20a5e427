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
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines import node
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import BATCH, COMPILED, DISMISSED, ENVIRONMENT
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.supervision import join as joining
from tpuswarm.swarm.supervision.join import _HostEnd, join
from tpuswarm.swarm.views.status import FINISHED, STOPPED, Progress, SwarmStatus, compose
from tpuswarm.train.hosts import rendezvous
from tpuswarm.train.hosts.control_channel import ExitStatus


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    """A server in the place of a swarm; it answers until it is closed."""
    monkeypatch.setattr(node, "RESTART_PAUSE_S", 0.05)
    monkeypatch.setattr(node, "SILENCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(node, "private_folder", lambda: tmp_path / "private")
    monkeypatch.setattr(joining, "RECONNECT_PAUSE_S", 0.0)
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # joining sets it; restored after the test
    (tmp_path / "private").mkdir()
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def join_swarm(swarm, tmp_path):
    address = f"127.0.0.1:{swarm.getsockname()[1]}"

    def run(on_line=lambda text: None, group=None, **options) -> list[str]:
        lines = []
        join(address, None, group, tmp_path / "token", lambda text: lines.append(text) or on_line(text), **options)
        return lines

    return run


@pytest.fixture
def ray_start(monkeypatch):
    """Runs a shell script in the place of `ray start`; returns the list of started processes."""
    started = []

    def replace_with(script: str) -> list[subprocess.Popen]:
        def start(address, parent, resources, environment, output, ports):
            command = ["sh", "-c", script, str(parent)]
            started.append(subprocess.Popen(command, stdout=output, start_new_session=True))
            return started[-1]

        monkeypatch.setattr(node, "_start", start)
        return started

    return replace_with


def test_batch_of_a_machine_reaches_its_members(join_swarm, monkeypatch):
    environments = []
    monkeypatch.setattr(joining, "be_node", lambda at, token, name, environment, *_: environments.append(environment))
    for batch in (8, None):
        join_swarm(batch=batch)
    assert environments == [{BATCH: "8"}, {}]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo Ray runtime started", "this machine dropped out, but the swarm is alive; rejoining in"),
        ("echo Exception: The current node timed out during startup.; exit 1", "this machine was too busy to"),
    ],
)
def test_node_is_started_again_while_the_swarm_lives(swarm, join_swarm, ray_start, script, sentence):
    started = ray_start(script)
    _, *repeated, last = join_swarm(lambda text: swarm.close() if len(started) == 3 else None)
    assert len(repeated) == 3 and all(text.startswith(sentence) for text in repeated)
    assert (len(started), last) == (4, "the swarm has ended")


def test_node_that_never_came_up_is_not_tried_again(join_swarm, ray_start):
    started = ray_start("echo Ray is too old here")
    with pytest.raises(RunFailed, match=r"could not join .*: Ray is too old here"):
        join_swarm()
    assert len(started) == 1


def test_wrong_token_is_reported_while_ray_still_tries(join_swarm, ray_start):
    started = ray_start("echo 'Unauthenticated: RPC error: InvalidAuthToken: wrong'; exec sleep 600")
    with pytest.raises(InputError, match=r"the token in .*token does not match the run at 127.0.0.1:"):
        join_swarm()
    assert [process.poll() is not None for process in started] == [True]


def test_machine_that_gets_the_token_of_a_new_head_while_ray_tries_joins_again(swarm, join_swarm, tmp_path, ray_start):
    """A new head at the old address refuses the old token."""
    token = tmp_path / "token"
    refused = f"echo new >{token}; echo InvalidAuthToken; exec sleep 600"
    started = ray_start(f"if grep -q new {token}; then echo Ray runtime started; else {refused}; fi")
    lines = join_swarm(lambda text: swarm.close() if len(started) == 2 else None)
    assert [len(started), lines[-1]] == [3, "the swarm has ended"] and "rejoining" in lines[1]


def test_machine_leaves_a_dead_head_before_ray_gives_up(swarm, join_swarm, ray_start, monkeypatch):
    started = ray_start("exec sleep 600")
    start = node._start
    monkeypatch.setattr(node, "HEAD_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(node, "_start", lambda *args: (start(*args), swarm.close())[0])
    assert join_swarm()[-1] == "the swarm has ended"
    assert [process.poll() is not None for process in started] == [True]


def test_host_that_waits_for_host_0_uses_the_token_of_a_new_head(tmp_path, monkeypatch):
    token, read = tmp_path / "token", []
    token.write_text("old")
    monkeypatch.setattr(rendezvous, "initialize", lambda at, count, index, secret, *_: read.append(secret))
    Group("127.0.0.1:1", 2, 1, str(token)).gather()
    token.write_text("new\n")
    assert read[0]() == b"new"


@pytest.mark.parametrize(("how", "error"), [("wrong", InputError), ("failed", RunFailed)])
def test_dismissed_machine_shows_the_reason(join_swarm, tmp_path, ray_start, how, error):
    letter = f'{{"how": "{how}", "reason": "j0 cannot join: other data"}}'
    started = ray_start(f"mkdir $0/$$; echo '{letter}' > $0/part; mv $0/part $0/$$/{DISMISSED}; exec sleep 60")
    with pytest.raises(error, match="j0 cannot join: other data"):
        join_swarm()
    assert [process.poll() is not None for process in started] == [True]
    assert list((tmp_path / "private").iterdir()) == []


def test_leftovers_of_a_killed_node_are_removed(swarm, tmp_path, ray_start):
    private = tmp_path / "private"
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (str(dead.pid), str(os.getpid()), "ray"):
        (private / name).mkdir()
    ray_start("echo Ray runtime started")
    node.be_node("127.0.0.1:1", tmp_path / "token", None, {}, lambda text: None)
    assert {path.name for path in private.iterdir()} == {str(os.getpid()), "ray"}


def test_ray_start_gets_its_token_ports_and_a_folder_named_by_its_pid(tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED $$ $@"\n')
    ray.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ENVIRONMENT:  # set here if this process has imported Ray
        monkeypatch.delenv(name, raising=False)
    with (tmp_path / "out").open("w") as out:
        process = node._start("127.0.0.1:1", tmp_path / "private", {}, {}, out.fileno(), Ports(20_000, 20_099))
        assert process.wait(20) == 0
    printed = (tmp_path / "out").read_text()
    assert printed.startswith(f"token 0 {process.pid} start --address 127.0.0.1:1 --block")
    assert printed.endswith(f" --temp-dir {tmp_path}/private/{process.pid}\n")
    ports = {word: int(after) for word, after in pairwise(printed.split()) if word.endswith("-port")}
    assert len(ports) == len(set(ports.values())) == 8
    assert all(20_000 < port <= 20_099 for port in ports.values())
    assert ports["--max-worker-port"] - ports["--min-worker-port"] == 92


def test_node_outlives_the_notice_of_a_preemption_but_not_a_killed_join(tmp_path):
    """The notice is SIGTERM to all processes of a machine; the member still has to push its work through the node."""
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    ray.chmod(0o700)  # a shell would let signals in while it waits
    code = (
        "import sys, time; from pathlib import Path; from tpuswarm.swarm.engines import node\n"
        f"sys.executable = '{tmp_path}/python'\n"
        "node._start('127.0.0.1:1', Path('private'), {}, {}, 1); time.sleep(600)"
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
    assert pending and int(pending[1], 16) & (1 << signal.SIGTERM - 1), "the signal is not blocked"
    joined.kill()
    joined.wait()
    end = time.monotonic() + 60
    while "SigPnd" in state() and "State:\tZ" not in state():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("phase", "words"), [(FINISHED, "is finished"), (STOPPED, "was stopped")])
def test_join_waits_for_a_head_and_ends_when_the_run_is_over(tmp_path, monkeypatch, phase, words):
    lost = compose(None, (), 100, (), "127.0.0.1:1", {}, 1.0, Progress(0.0))
    found = iter([None, lost, lost, replace(lost, phase=phase)])

    def read(name):
        status = next(found) if name == "files/status.json" else None
        return None if status is None else TypeAdapter(SwarmStatus).dump_json(status)

    monkeypatch.setattr(joining, "Bucket", lambda url: SimpleNamespace(read_if_there=read))
    monkeypatch.setattr(joining, "HEAD_POLL_INTERVAL_S", 0.0)
    monkeypatch.setenv(COMPILED, "")  # joining sets it; restored after the test
    lines = []
    joining.join_run("gs://some/runs/all", None, None, tmp_path / "token", lines.append)
    assert lines == [
        "gs://some/runs/all has no head at the moment; waiting for one", f"gs://some/runs/all {words}",
    ]  # fmt: skip
    assert os.environ[COMPILED] == "gs://some/runs/all/compiled"


STEPPED = _HostEnd(ExitStatus.LOST, "host 0 is gone (connection closed), so this host stops too; start again", True)
GONE = STEPPED._replace(made_step=False)
ALONE = _HostEnd(ExitStatus.ABSENT, "host 0 did not answer", False)
SECOND = _HostEnd(ExitStatus.REFUSED, "not for another host 1", False)
FAREWELL = _HostEnd(ExitStatus.LEFT, "", True)


@pytest.mark.parametrize(
    ("lives", "error", "words"),
    [
        ([STEPPED, GONE, GONE, STEPPED, GONE, GONE, FAREWELL], None, "host 0 has left the swarm"),
        ([GONE] * 4, RunFailed, r"4 times without a step: host 0 is gone \(connection closed\); join"),
        ([_HostEnd(-9, "", False)] * 4, RunFailed, "without a step: its process was killed"),
        ([STEPPED, ALONE, ALONE, ALONE, ALONE, FAREWELL], None, "host 0 has left the swarm"),
        ([ALONE], InputError, "host 0 did not answer"),
        ([SECOND], InputError, "not for another host 1"),
        ([STEPPED, SECOND, SECOND, FAREWELL], None, "host 0 has left the swarm"),
        ([STEPPED, SECOND, SECOND, SECOND], RunFailed, "not for another host 1"),
        ([STEPPED, _HostEnd(ExitStatus.WRONG_INPUT, "m0 cannot join", False)], InputError, "m0 cannot join"),
        ([STEPPED, _HostEnd(ExitStatus.FAILED, "the disk is full", False)], RunFailed, "the disk is full"),
    ],
)
def test_host_is_started_again_until_it_leaves_is_refused_or_makes_no_step(
    join_swarm, tmp_path, monkeypatch, lives, error, words
):
    left = list(lives)
    monkeypatch.setattr(joining, "_run_host", lambda group, stop, say: left.pop(0))
    group = Group("127.0.0.1:9", 2, 1, str(tmp_path / "token"))
    if error:
        with pytest.raises(error, match=words):
            join_swarm(group=group)
    else:
        lines = join_swarm(group=group)
        assert lines[-1].startswith(words)
        assert any("does not answer" in line for line in lines) == (ALONE in lives)
    assert left == []

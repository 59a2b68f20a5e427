"""Calls and processes in threads and under the virtual clock; notices of a preemption; how Ray is started."""

import os
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from tests.web import serve_web
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines import ray as engine
from tpuswarm.swarm.engines import variables
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.opening import private_folder
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.effects import Call, Parallel, ProcessEnded, RunBlocking, Unreachable
from tpuswarm.swarm.processes.requests import request


def make_calls(*calls: Call):
    return (yield Parallel(calls))


class Server:
    def double(self, number: int) -> int:
        return 2 * number

    @request
    def fail(self) -> None:
        raise MemoryError

    @request
    def fail_later(self):
        yield RunBlocking("server works", lambda: {}["key"])


def call_in_threads(*calls: Call):
    both, found = threading.Barrier(2), []

    def carry(call: Call):
        if call.address == "nobody":
            raise Unreachable(call.address)
        answer = getattr(Server(), call.method)(*call.arguments)
        both.wait(timeout=60)
        return answer

    def process():
        found.append((yield from make_calls(*calls)))

    node = NodeThreads(carry)
    node.start("calls", process())
    assert node.wait(60)
    if node.failure:
        raise node.failure
    return found[0]


def test_threads_make_calls_at_once_and_answer_each():
    calls = [Call("a", "double", (1,)), Call("nobody", "double", (2,)), Call("b", "double", (3,))]
    first, second, third = call_in_threads(*calls)
    assert (first, third) == (2, 6) and isinstance(second, Unreachable)
    assert call_in_threads() == []
    with pytest.raises(AttributeError, match="halve"):
        call_in_threads(Call("a", "halve", (1,)), Call("nobody", "double", (1,)))


def test_calls_under_the_virtual_clock_take_as_long_as_the_slowest():
    travel_s = {"slow": 2.0, "fast": 0.5}
    engine = Inproc(1, seconds=lambda rnd, name: 0.0)
    engine.travel_seconds = lambda node, call, back: travel_s[call.address]
    for name in travel_s:
        engine.serve(name, Server())

    def answers(*calls):
        found = []
        engine.spawn("me", make_calls(*calls), found.append)
        assert engine.run(lambda: bool(found), 100)
        return found[0]

    both = Call("slow", "double", (1,)), Call("fast", "double", (2,))
    assert answers(*both) == [2, 4] and engine.now == 4.0
    engine.kill("fast")
    first, second = answers(*both)
    assert first == 2 and isinstance(second, Unreachable)
    assert answers() == []


def test_node_that_ended_does_not_wait_for_a_hung_process():
    never, hung = threading.Event(), threading.Event()

    def train():
        yield RunBlocking("member trains", lambda: hung.set() or never.wait(60))

    def exchange():
        yield RunBlocking("member waits", lambda: hung.wait(60))
        raise ProcessEnded("fenced")

    node = NodeThreads(lambda call: None)
    node.start("train", train())
    node.start("exchange", exchange())
    assert not node.drain(0.1) and isinstance(node.failure, ProcessEnded)
    never.set()
    assert node.drain(60)


@pytest.mark.parametrize(("method", "error"), [("fail", MemoryError), ("fail_later", KeyError)])
def test_unexpected_error_of_a_request_ends_the_server_and_refuses_no_member(method, error):
    node = NodeThreads(lambda call: None)
    with pytest.raises(Unreachable):
        node.call(Server(), method, ())
    assert isinstance(node.failure, error)


SCRIPT = """
import threading
from tpuswarm.swarm.engines import notice
notice.POLL_INTERVAL_S = 0.01
left = threading.Event()
notice.on_notice(left.set)
print("ready", flush=True)
left.wait()
print("left", flush=True)
"""


def start_and_wait(**environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_process_that_is_second_uses_the_token_of_the_first(tmp_path, monkeypatch):
    path = tmp_path / "token"

    def token_hex(size):
        path.write_text("first")
        return "second"

    monkeypatch.setattr(variables.secrets, "token_hex", token_hex)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    variables.use_token(path)
    assert path.read_text() == "first"


def test_empty_token_is_named_before_ray_starts(tmp_path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(InputError, match=r"token is empty; .*delete it: the run draws a new one"):
        variables.use_token(tmp_path / "token")


def test_sigterm_is_a_notice():
    process = start_and_wait()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=240)[0] == "left\n" and process.returncode == 0


def test_member_leaves_once_the_metadata_server_says_preempted():
    requests, answers = [], [(200, b"FALSE"), (503, b"restarting"), (200, b"FALSE"), (200, b"TRUE")]

    def answer(path, headers):
        requests.append((path, headers["Metadata-Flavor"]))
        return answers[len(requests) - 1]

    with serve_web(answer) as host:
        process = start_and_wait(GCE_METADATA_HOST=host)
        assert process.communicate(timeout=240)[0] == "left\n"
    assert requests == [("/computeMetadata/v1/instance/preempted", "Google")] * len(answers)


SLOW_START = "The current node timed out during startup. This could happen because"


@pytest.fixture
def open_ray(monkeypatch):
    """Open Ray; its starts end with the errors of a list, None for success. `open_ray.made` has their options."""

    def run(errors, address=None, dashboard=False):
        run.made = []

        def init(**options):
            run.made.append(options)
            if error := errors[len(run.made) - 1]:
                raise Exception(error)
            return object()

        monkeypatch.setattr(engine.ray, "init", init)
        monkeypatch.setattr(engine.ray, "shutdown", lambda: None)
        return engine.open_ray(address, 0, None, dashboard)

    return run


@pytest.mark.parametrize("dashboard", [False, True])
def test_dashboard_listens_on_this_machine_alone_and_only_on_request(open_ray, dashboard):
    open_ray([None], dashboard=dashboard)
    assert open_ray.made[0]["include_dashboard"] == dashboard and open_ray.made[0]["dashboard_host"] == "127.0.0.1"


KILLED_RAY = """
import os, signal, sys, time
from pathlib import Path
import psutil
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.engines.ray import Cluster

victim, who = sys.argv[1:]
with Cluster("run", Path("token"), None, is_open=who == "open") as cluster:
    processes = psutil.Process(), *psutil.Process().children(recursive=True)
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    print(*(socket.laddr.ip for socket in sockets if socket.status == "LISTEN"))
    cluster.require_alive()
    [server] = [child for child in psutil.Process().children() if child.name() == victim]
    os.kill(server.pid, signal.SIGKILL)
    while True:
        try:
            cluster.require_alive()
        except RunFailed as error:
            print(error)
            break
        time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "who"), [("raylet", "alone"), ("gcs_server", "open")])
def test_ray_listens_to_other_machines_only_if_some_may_join_and_its_death_is_noticed(tmp_path, victim, who):
    """Calls of a dead process never return, so a run would hang for ever."""
    command = [sys.executable, "-c", KILLED_RAY, victim, who]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    addresses, _, death = done.stdout.partition("\n")
    assert len(addresses.split()) >= 4
    assert all(address.endswith("127.0.0.1") for address in addresses.split()) == (who == "alone")
    assert death.startswith("a process of Ray died (pid ") and "start the same command again" in death


def test_jax_does_not_warn_of_the_processes_that_ray_starts(monkeypatch, recwarn):
    jax.devices()  # its threads run, as after reading the parameters of an earlier run
    monkeypatch.setattr(engine.ray, "init", lambda **_: subprocess.run(["true"], preexec_fn=lambda: None, check=True))
    engine.open_ray("127.0.0.1:1", 0, None, False)
    assert not recwarn.list


def test_slow_start_is_repeated_once_in_a_clean_session(open_ray):
    session = private_folder() / "ray" / f"session_of_a_test_{os.getpid()}"
    session.mkdir(parents=True)
    assert open_ray([SLOW_START, None])
    assert len(open_ray.made) == 2 and not session.exists()


@pytest.mark.parametrize(
    ("errors", "address", "words"),
    [
        ([SLOW_START, SLOW_START], None, "Ray does not start on this machine: The current node timed out"),
        (["no space left"], None, "Ray does not start on this machine: no space left"),
        ([SLOW_START], "10.0.0.1:6379", "the Ray cluster at 10.0.0.1:6379 does not answer: The current node timed out"),
    ],
)
def test_failed_start_is_reported(open_ray, errors, address, words):
    with pytest.raises(RunFailed, match=words):
        open_ray(errors, address)
    assert len(open_ray.made) == len(errors)


def test_full_disk_of_rays_folder_is_reported_before_ray_starts(on_small_disk):
    script = """
import os, subprocess, sys
from pathlib import Path
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.engines import node, opening
from tpuswarm.swarm.engines.variables import private_folder
subprocess.run(["mount", "--bind", sys.argv[1], private_folder()], check=True)
for start in (
    lambda: opening.open_ray(None, 2**20, None, False),
    lambda: node.be_node("127.0.0.1:1", Path(sys.argv[1]) / "token", None, {}, str),
):
    try:
        start()
    except RunFailed as error:
        print(error)
"""
    found = on_small_disk(script)
    assert len(found) == 2
    for sentence in found:
        assert f"in {private_folder().with_name('tpuswarm-0')} for sockets and logs" in sentence
        assert sentence.endswith("but only 4 MiB are free: make room on that disk")


def test_call_is_awaited_as_long_as_its_payload_needs():
    state = 6 * 10**9

    def seconds(name, *arguments, state=state):
        return engine.call_timeout_s(Call("a", name, arguments), state)

    assert (seconds("beat"), seconds("push")) == (20.0, 60.0)
    assert seconds("put", "identity", 0, {"s": np.zeros(10 * 2**20, np.float32)}, "digest") == 64.0
    assert 600 < seconds("fetch") == seconds("merge") < 660
    assert seconds("merge", state=10**6) < 61

"""How Ray is started for a run, and how long its calls may take."""

import os

import numpy as np
import pytest

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.engines import ray as engine
from tpuswarm.swarm.engines.opening import private_folder
from tpuswarm.swarm.processes.effects import Call

SLOW = "The current node timed out during startup. This could happen because"


@pytest.fixture
def start(monkeypatch):
    """Opens Ray; its starts end with the errors of a list, None for success. `start.made` has their options."""

    def run(errors, address=None, dashboard=False):
        run.made = []

        def init(**options):
            run.made.append(options)
            if error := errors[len(run.made) - 1]:
                raise Exception(error)
            return object()

        monkeypatch.setattr(engine.ray, "init", init)
        return engine.open_ray(address, 0, None, dashboard)

    return run


@pytest.mark.parametrize("dashboard", [False, True])
def test_dashboard_listens_on_this_machine_alone_and_only_on_request(start, dashboard):
    start([None], dashboard=dashboard)
    assert start.made[0]["include_dashboard"] == dashboard and start.made[0]["dashboard_host"] == "127.0.0.1"


def test_slow_start_is_repeated_once_in_a_clean_session(start):
    session = private_folder() / "ray" / f"session_of_a_test_{os.getpid()}"
    session.mkdir(parents=True)
    assert start([SLOW, None])
    assert len(start.made) == 2 and not session.exists()


@pytest.mark.parametrize(
    ("errors", "address", "words"),
    [
        ([SLOW, SLOW], None, "Ray does not start on this machine: The current node timed out"),
        (["no space left"], None, "Ray does not start on this machine: no space left"),
        ([SLOW], "10.0.0.1:6379", "the Ray cluster at 10.0.0.1:6379 does not answer: The current node timed out"),
    ],
)
def test_failed_start_is_reported(start, errors, address, words):
    with pytest.raises(RunFailed, match=words):
        start(errors, address)
    assert len(start.made) == len(errors)


def test_call_is_awaited_as_long_as_its_payload_needs():
    state = 6 * 10**9

    def seconds(name, *arguments, state=state):
        return engine.seconds_for(Call("a", name, arguments), state)

    assert (seconds("beat"), seconds("push")) == (20.0, 60.0)
    assert seconds("put", "identity", 0, {"s": np.zeros(10 * 2**20, np.float32)}, "digest") == 64.0
    assert 600 < seconds("fetch") == seconds("merge") < 660
    assert seconds("merge", state=10**6) < 61

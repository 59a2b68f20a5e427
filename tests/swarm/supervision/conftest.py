"""What the tests of a supervisor share."""

import json
from itertools import chain

import pytest

from tests.swarm.supervision.played import PLAN, Cluster
from tpuswarm.swarm.supervision import supervisor as module
from tpuswarm.swarm.supervision import telling
from tpuswarm.swarm.supervision.supervisor import Supervisor
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.train.run.directory import Run


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Let a supervisor live until its run ends; the test's generator goes on to its next `yield` at each look."""
    for place, name in ((module, "LOOK"), (module, "BACKOFF"), (telling, "STATUS")):
        monkeypatch.setattr(place, name, 0.0)
    cluster = Cluster()

    def run(script, plan=PLAN):
        steps = None

        def watch(supervisor):
            nonlocal steps
            steps = steps or chain(script(supervisor, cluster), range(5))
            assert next(steps, None) != 4, "the script is over and the run is not"

        held = Run(tmp_path / "run")
        try:
            return Supervisor(held, plan, cluster, Screen(), lambda number: {}, watch).go()
        finally:
            held.close()

    run.events = lambda kind: [
        event
        for event in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if event["event"] == kind
    ]
    return run

"""Run a supervisor against a fake cluster."""

from itertools import chain

import pytest

from tests.swarm.supervision.fake_cluster import PLAN, FakeCluster
from tpuswarm.swarm.supervision import run_reporter
from tpuswarm.swarm.supervision import supervisor as module
from tpuswarm.swarm.supervision.supervisor import Supervisor
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.train.run.directory import Run, read_rows


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Supervise a run to its end; the test's generator goes on to its next `yield` in each round.

    `supervise.finished` finishes the run after the generator, and checks that it is finished.
    """
    for place, name in ((module, "POLL_INTERVAL_S"), (module, "MIN_BACKOFF_S"), (run_reporter, "STATUS_INTERVAL_S")):
        monkeypatch.setattr(place, name, 0.0)
    cluster, folder = FakeCluster(), Run(tmp_path / "run")

    def run(script, plan=PLAN):
        steps = None

        def watch(supervisor):
            nonlocal steps
            steps = steps or chain(script(supervisor, cluster), range(5))
            assert next(steps, None) != 4, "the script is over and the run is not"

        return Supervisor(folder, plan, cluster, Screen(), lambda number: {}, watch).run_to_end()

    def finished(script, plan=PLAN):
        def script_and_end(supervisor, cluster):
            yield from script(supervisor, cluster)
            cluster.finish()

        assert run(script_and_end, plan).how == "finished"

    run.finished = finished
    run.events = lambda kind: [row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["event"] == kind]
    yield run
    folder.close()

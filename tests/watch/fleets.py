"""A fleet for tests: two machines, one of them busy, and one lost."""

from tests.fleet.loop import desired, pool
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, Worker
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.store.document import Document
from tpuswarm.swarm.views.status import RunView
from tpuswarm.watch.state import Machines, State
from tpuswarm.watch.top import Chip, Row

NOW = 1e9


def fleet_state(run: RunView | None) -> tuple[State, list[Row]]:
    """Return a fleet of two machines and its rows."""
    target = desired(pool(count=3))
    labels = {FLEET_LABEL: target.fleet, POOL_LABEL: "small"}
    machines = tuple(
        Machine(f"v2-usc1f-{number}", "us-central1-f", "tpu", "v2-8", "ready", "READY", how="spot", labels=labels,
                created=NOW - 7200, workers=(Worker("10.0.0.2", None),))
        for number in range(2)
    )  # fmt: skip
    lost = Event(NOW - 60, "small", "v2-usc1f-2", "preempted", "the cloud took it")
    document = Document("fleet", "rehearsal", "p", target, ("us-central1-f",), events=(lost,))
    chips = (Chip(0, 80.0, 2e9, 8e9), Chip(1, 60.0, 6e9, 8e9))
    rows = [Row("v2-usc1f-0/0", "busy", "", chips), Row("v2-usc1f-1/0", "idle", "no program")]
    return State("gs://b/run", run, Machines(document, Listing(machines, frozenset()), [lost]), NOW), rows

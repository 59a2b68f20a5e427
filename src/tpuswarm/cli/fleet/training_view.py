"""Read and draw the training of a fleet, again and again."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.cli.fleet.view import FleetReader, open_fleet
from tpuswarm.cloud.errors import CloudError
from tpuswarm.errors import InputError
from tpuswarm.fleet import training
from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines, read_swarm
from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
from tpuswarm.fleet.store.fleets import fleet_of_file
from tpuswarm.swarm.views import status
from tpuswarm.train.process.terminal import say
from tpuswarm.train.storage.copy import bring
from tpuswarm.watch.state import Machines, State

POLL_INTERVAL_S = 5.0
"""Each poll calls all zones and the bucket."""


class FleetTraining(NamedTuple):
    """The training of a fleet."""

    url: str
    read_fleet: FleetReader

    def read(self) -> State:
        try:
            run = status.look(bring(self.url))
        except InputError:  # it has not begun yet
            run = None
        return State(self.url, run, Machines(*self.read_fleet()), time.time())

    def watch(self, console: Any) -> None:
        """Redraw it until the run ends."""
        from tpuswarm.train.process.drawn import Drawn

        with Drawn(console=console, auto_refresh=False) as live:
            while True:
                state = self.read()
                live.update(state.draw(console.width, console.height - 1), refresh=True)
                if state.look and state.look.state == "finished":
                    return
                time.sleep(POLL_INTERVAL_S)


def find_fleet_training(url: str | None, file: Path | None = None) -> FleetTraining | None:
    """Return the training of this folder's fleet, if it has one and `url` does not name another run."""
    path = file or DEFAULT_FILE
    if not asks_for_machines(path):
        return None
    try:
        spec = read_swarm(path)
        if spec.train is None or (spec.storage is None and spec.train.run is None):
            return None
        run_url = training.run_url(spec)
        if url not in (None, run_url):
            return None
        if url is None and not (fleet_of_file(spec).folder / "fleet.json").exists():
            return None  # not created from this computer: do not call a cloud for a list of runs
        use_rehearsed_buckets(path)
        fleet, read_fleet = open_fleet(str(path))
        return FleetTraining(run_url, read_fleet) if fleet.store(fleet.provider()).load() else None
    except (CloudError, InputError) as error:
        if url is not None:
            say(f"warning: cannot show its machines: {error}", err=True)
        return None

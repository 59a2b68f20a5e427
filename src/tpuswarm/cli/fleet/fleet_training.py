"""Show the training of a fleet, for other commands."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.cli.fleet.view import POLL_INTERVAL_S, FleetReader, open_fleet
from tpuswarm.cloud.errors import CloudError, Unreachable
from tpuswarm.cloud.rehearsal.connect import default_folder, is_running
from tpuswarm.errors import InputError
from tpuswarm.fleet import training
from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines, read_swarm
from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
from tpuswarm.fleet.store.fleets import fleet_of_file
from tpuswarm.swarm.views import status
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.storage.copy import download_run
from tpuswarm.watch.state import Machines, State


class FleetTraining(NamedTuple):
    """The training of a fleet."""

    url: str
    read_fleet: FleetReader

    def read(self) -> State:
        try:
            run = status.read_run(download_run(self.url))
        except InputError:  # it has not begun yet
            run = None
        return State(self.url, run, Machines(*self.read_fleet()), time.time())

    def watch(self, console: Any) -> None:
        """Redraw it until the run ends. Raises RunFailed if its jobs have failed for good."""
        from rich.text import Text

        from tpuswarm.train.process.live_region import LiveRegion

        with LiveRegion(console=console, auto_refresh=False) as live:
            while True:
                try:
                    state = self.read()
                except Unreachable as error:  # the training does not depend on this command
                    live.update(Text(f"{error}; trying again"), refresh=True)
                    time.sleep(POLL_INTERVAL_S)
                    continue
                live.update(state.draw(console.width, console.height - 1), refresh=True)
                if state.run and state.run.state == "finished":
                    return
                state.require_jobs()
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
        if url is None and spec.provider == "rehearsal" and not is_running(default_folder()):
            return None
        use_rehearsed_buckets(path)
        fleet, read_fleet = open_fleet(str(path))
        return FleetTraining(run_url, read_fleet) if fleet.store(fleet.provider()).load() else None
    except (CloudError, InputError) as error:
        if url is not None:
            echo(f"warning: cannot show its machines: {error}", err=True)
        return None

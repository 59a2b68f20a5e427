"""The training of a fleet, read again and again."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.watch.state import State


LOOK = 5.0
"""Seconds between two looks: each asks all zones, and the bucket."""


class Training(NamedTuple):
    """What reads a training's fleet again and again."""

    url: str
    read: Any
    """Document, listing and events."""

    def see(self) -> "State":
        """As it is now."""
        from tpuswarm.swarm.views.status import look
        from tpuswarm.train.storage.copy import bring
        from tpuswarm.watch.state import Machines, State

        try:
            seen = look(bring(self.url))
        except InputError:  # not begun yet
            seen = None
        return State(self.url, seen, Machines(*self.read()), time.time())

    def watch(self, console: Any) -> None:
        """Draw it anew until the run ends."""
        from tpuswarm.train.process.drawn import Drawn

        with Drawn(console=console, auto_refresh=False) as live:
            while True:
                seen = self.see()
                live.update(seen.draw(console.width, console.height - 1), refresh=True)
                if seen.look and seen.look.state == "finished":
                    return
                time.sleep(LOOK)


def training_here(url: str | None, file: Path | None = None) -> Training | None:
    """The training of the fleet of this folder; None: there is none, or another run is meant."""
    from tpuswarm.cli.fleet.view import look_at
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.fleet import training
    from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines, read_swarm
    from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
    from tpuswarm.fleet.store import fleets

    path = file or DEFAULT_FILE
    if not asks_for_machines(path):
        return None
    try:
        read = read_swarm(path)
        if read.train is None or (read.storage is None and read.train.run is None):
            return None
        its = training.run_url(read)
        if url not in (None, its):
            return None
        if url is None and not (fleets.fleet_of_file(read).folder / "fleet.json").exists():
            return None  # this computer has not made it: a list of runs is not worth asking a cloud
        use_rehearsed_buckets(path)
        fleet, reads = look_at(str(path))
        return Training(its, reads) if fleet.store(fleet.provider()).load() else None
    except (CloudError, InputError) as error:
        if url is not None:
            say(f"its machines cannot be shown: {error}", err=True)
        return None

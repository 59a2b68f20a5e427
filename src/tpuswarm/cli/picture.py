"""One picture of a fleet that trains: its machines, its members, and what it costs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.core.actions import Event
    from tpuswarm.fleet.doing import Doing
    from tpuswarm.fleet.keeping.document import Document
    from tpuswarm.swarm.views.status import Look


LOOK = 5.0
"""Seconds between two looks: each asks all zones, and the bucket."""


class Seen(NamedTuple):
    """A training and its fleet, at one moment."""

    url: str
    document: "Document"
    listing: "Listing"
    events: "list[Event]"
    look: "Look | None"
    """None: the run has not begun."""
    at: float
    """Unix seconds."""

    def json(self) -> dict[str, Any]:
        """The run's object, with machines and dollars."""
        from dataclasses import asdict

        from tpuswarm.fleet.view import spent

        found = self._doings()
        return {
            **(self.look.json() if self.look else {"run": self.url, "state": "not begun"}),
            "machines": [{**asdict(each), "member": each.member.id if each.member else None} for each in found],
            "dollars": spent(self.document, self.listing, self.at).dollars,
        }

    def _doings(self) -> "list[Doing]":
        from tpuswarm.fleet.doing import doings

        headed = self.look is not None and self.look.state == "running"
        members = self.look.status.members if self.look and headed else None
        return doings(self.document, self.listing, self.events, members, self.at)

    def draw(self, width: int, height: int | None = None) -> Any:
        """All of it; with a height as much of it as has room, what needs a look first."""
        from rich.console import Group
        from rich.text import Text

        from tpuswarm.fleet.doing import counted
        from tpuswarm.fleet.view import costs_line, doings_table, lines_of
        from tpuswarm.swarm.views.drawing import About, draw

        look = self.look
        found = self._doings()
        left = look.status.left if look else None
        carried = look.status.carried if look else 0
        said = [Text(f"{self.document.desired.fleet}: {counted(found) or 'no machine'}")]
        said.append(Text(costs_line(self.document, self.listing, self.at, left, carried)))
        if look is None:
            return Group(Text(f"{self.url} has not begun"), *doings_table(found, "tokens", width, height), *said)
        if look.state != "running":
            said.append(Text(f"{look.state}{': ' if look.message else ''}{look.message}"))
        about = About(look.recipe, look.run, look.tokens_per_step, look.unit, ended=look.state != "running")
        room = None if height is None else height - lines_of(said, width)
        picture = draw(about, look.status, (), width, room, lambda rows: doings_table(found, about.unit, width, rows))
        return Group(picture, *said)


class Training(NamedTuple):
    """What reads a training's fleet again and again."""

    url: str
    read: Any
    """Document, listing and events."""

    def see(self) -> Seen:
        """As it is now."""
        from tpuswarm.swarm.views.status import look
        from tpuswarm.train.bucket.mirror import bring

        try:
            seen = look(bring(self.url))
        except InputError:  # not begun yet
            seen = None
        document, listing, events = self.read()
        return Seen(self.url, document, listing, events, seen, time.time())

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
    from tpuswarm.cli.fleet import look_at
    from tpuswarm.cli.over_fleet import is_fleet
    from tpuswarm.cli.storage import as_rehearsed
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.fleet import training
    from tpuswarm.fleet.file import DEFAULT, read_swarm
    from tpuswarm.fleet.keeping import fleets

    path = file or DEFAULT
    if not is_fleet(path):
        return None
    try:
        read = read_swarm(path)
        if read.train is None or (read.storage is None and read.train.run is None):
            return None
        its = training.run_of(read)
        if url not in (None, its):
            return None
        if url is None and not (fleets.of_file(read).folder / "fleet.json").exists():
            return None  # this computer has not made it: a list of runs is not worth asking a cloud
        as_rehearsed(path)
        fleet, reads = look_at(str(path))
        return Training(its, reads) if fleet.store(fleet.provider()).load() else None
    except (CloudError, InputError) as error:
        if url is not None:
            say(f"its machines cannot be shown: {error}", err=True)
        return None

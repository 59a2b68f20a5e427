"""How a run and its fleet stand at one moment: all that `status`, the page and the metrics say comes from it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.fleet.activity import MachineActivity, list_activities
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.view import total_spending
from tpuswarm.swarm.views.status import RunView
from tpuswarm.train.run.listing import Status

if TYPE_CHECKING:
    from rich.console import RenderableType


class Machines(NamedTuple):
    """A fleet as it was looked at once."""

    document: Document
    listing: Listing
    events: list[Event]


class State(NamedTuple):
    """A run, its fleet, or both."""

    url: str
    """What a person calls the run; empty where there is none."""
    look: RunView | Status | None
    """None: the run has not begun."""
    machines: Machines | None
    """None: it is on this computer alone."""
    at: float
    """Unix seconds."""

    def json(self) -> dict[str, Any]:
        """The run's object; of a fleet with machines and dollars."""
        if self.swarm is not None:
            said = self.swarm.json()
        elif self.look is not None:
            said = asdict(self.look)
        else:
            said = {"run": self.url, "state": "not begun"}
        if self.machines is None:
            return said
        document, listing, _ = self.machines
        doing = [{**asdict(each), "member": each.member.id if each.member else None} for each in self.doings()]
        return said | {"machines": doing, "dollars": total_spending(document, listing, self.at).dollars}

    @property
    def there(self) -> Sequence[Machine]:
        """Machines that the cloud shows, of other fleets too."""
        return self.machines.listing.machines if self.machines else ()

    @property
    def events(self) -> list[Event]:
        """What happened to its machines."""
        return self.machines.events if self.machines else []

    @property
    def swarm(self) -> RunView | None:
        """The run, where it is a swarm that has begun."""
        return self.look if isinstance(self.look, RunView) else None

    def doings(self) -> list[MachineActivity]:
        """What each machine is at, those that need a look first."""
        if self.machines is None:
            return []
        members = self.swarm.status.members if self.swarm and self.swarm.state == "running" else None
        return list_activities(*self.machines, members, self.at)

    def draw(self, width: int, height: int | None = None) -> "RenderableType":
        """A swarm over a fleet; with a height as much of it as has room, what needs a look first."""
        from rich.console import Group
        from rich.text import Text

        from tpuswarm.fleet.activity import count_activities
        from tpuswarm.fleet.view import activities_table, costs_line, count_lines
        from tpuswarm.swarm.views.drawing import About, draw

        assert self.machines is not None
        (document, listing, _), look = self.machines, self.swarm
        found = self.doings()
        left = look.status.left if look else None
        carried = look.status.carried if look else 0
        said = [Text(f"{document.desired.fleet}: {count_activities(found) or 'no machine'}")]
        said.append(Text(costs_line(document, listing, self.at, left, carried)))
        if look is None:
            return Group(Text(f"{self.url} has not begun"), *activities_table(found, "tokens", width, height), *said)
        if look.state != "running":
            said.append(Text(f"{look.state}{': ' if look.message else ''}{look.message}"))
        about = About(look.recipe, look.run, look.tokens_per_step, look.unit, ended=look.state != "running")
        room = None if height is None else height - count_lines(said, width)
        picture = draw(
            about, look.status, (), width, room, lambda rows: activities_table(found, about.unit, width, rows)
        )
        return Group(picture, *said)

"""Hold the state of a run and its fleet, for `status`, the page and the metrics."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.activity import MachineActivity, list_activities
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.training import why_ended
from tpuswarm.fleet.view import machine_rows, running_rate, total_spending
from tpuswarm.swarm.views.status import RunView
from tpuswarm.train.run.listing import Status

if TYPE_CHECKING:
    from rich.console import RenderableType


class Machines(NamedTuple):
    """Snapshot of a fleet."""

    document: Document
    listing: Listing
    events: list[Event]


class State(NamedTuple):
    """A run, its fleet, or both."""

    url: str
    """The run's name; empty: no run."""
    run: RunView | Status | None
    """Not begun if None."""
    machines: Machines | None
    """No fleet if None."""
    at: float
    """Unix time."""

    def json(self) -> dict[str, Any]:
        """Return the run for JSON; with a fleet also machines and dollars."""
        if self.swarm is not None:
            document = self.swarm.json()
        elif self.run is not None:
            document = asdict(self.run)
        else:
            document = {"run": self.url, "state": "not begun"}
        if self.machines is None:
            return document
        fleet, listing, _ = self.machines
        activities = [
            {**asdict(activity), "member": activity.member.id if activity.member else None}
            for activity in self.activities()
        ]
        return document | {"machines": activities, "dollars": total_spending(fleet, listing, self.at).dollars}

    @property
    def there(self) -> Sequence[Machine]:
        """Machines of the project, of other fleets too."""
        return self.machines.listing.machines if self.machines else ()

    @property
    def events(self) -> list[Event]:
        """Events of the fleet."""
        return self.machines.events if self.machines else []

    @property
    def swarm(self) -> RunView | None:
        """The run, if it is a swarm that has begun."""
        return self.run if isinstance(self.run, RunView) else None

    def require_jobs(self) -> None:
        """Raise RunFailed if the jobs of the training have failed for good."""
        if self.machines is None:
            return
        document, listing, _ = self.machines
        if why := why_ended(document.jobs):
            rate = running_rate(machine_rows(document.desired, listing, (), self.at))
            raise RunFailed(
                f"the training has ended: {why}. Its machines cost {rate.hour} an hour: fix it and run "
                "`tpuswarm train` again, or delete them with `tpuswarm down`"
            )

    def activities(self) -> list[MachineActivity]:
        """Return what each machine does, problems first."""
        if self.machines is None:
            return []
        members = self.swarm.status.members if self.swarm and self.swarm.state == "running" else None
        return list_activities(*self.machines, members, self.at)

    def draw(self, width: int, height: int | None = None) -> "RenderableType":
        """Draw a swarm and its fleet, problems first, cut to a height."""
        from rich.console import Group
        from rich.text import Text

        from tpuswarm.fleet.activity import count_activities
        from tpuswarm.fleet.view import activities_table, costs_line, count_lines
        from tpuswarm.swarm.views.drawing import About, draw

        assert self.machines is not None
        (document, listing, _), run = self.machines, self.swarm
        found = self.activities()
        left = run.status.left if run else None
        carried = run.status.carried if run else 0
        lines = [Text(f"{document.desired.fleet}: {count_activities(found) or 'no machine'}")]
        lines.append(Text(costs_line(document, listing, self.at, left, carried)))
        if run is None:
            return Group(Text(f"{self.url} has not begun"), *activities_table(found, "tokens", width, height), *lines)
        if run.state == "killed":
            lines.append(Text("its head is gone: a keeper starts another one"))
        elif run.state != "running":
            lines.append(Text(f"{run.state}{': ' if run.message else ''}{run.message}"))
        about = About(run.recipe, run.run, run.tokens_per_step, run.unit, ended=run.state != "running")
        room = None if height is None else height - count_lines(lines, width)
        picture = draw(
            about, run.status, (), width, room, lambda rows: activities_table(found, about.unit, width, rows)
        )
        return Group(picture, *lines)

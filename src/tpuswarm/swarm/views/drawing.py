"""A swarm as a picture: how far it is, its members or those among them that need a look, its alarms."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure, format_step_rate
from tpuswarm.swarm.views.status import FINISHED, MemberStatus, SwarmStatus
from tpuswarm.train.look.display import speed_text
from tpuswarm.train.look.live import Column, bar, sparkline, table

BEHIND = 2
"""A member may be this many commits behind: its push is in flight."""
SLOW = 0.5
"""Of the median speed: a slower member needs a look."""
HEAD = 8
"""Rows of a picture besides members and alarms, the heading of the members among them."""
REST = 2
"""Rows for the members that are only counted."""
ALARMS = 3
"""Rows that alarms may take of a screen."""


@dataclass(frozen=True)
class About:
    """What does not change while a swarm runs."""

    title: str
    run: str
    tokens_per_step: int
    unit: str
    """What these tokens are: tokens, or rows where a row counts for one."""
    ended: bool = False
    """Nothing goes on, so there is no speed and no time left."""


Members = Callable[[int | None], list[RenderableType]]
"""What stands for the members, in so many rows; None: in all that it takes."""


def draw(
    about: About,
    status: SwarmStatus,
    losses: Sequence[float],
    width: int,
    height: int | None = None,
    instead: Members | None = None,
) -> RenderableType:
    """All of it; with a height only as many members and alarms as have room, those that need a look first.

    instead: of the table of members, for who knows more about them.
    """
    count = len(status.members)
    alarms, room = [Text(f"alarm: {each}", style="red") for each in status.alarms], None
    if height is not None:
        alarms = _fitting(alarms, width)
        room = max(1, height - HEAD - sum(_rows(each, width) for each in alarms))
    return Group(
        Text(f"{about.title}, {count} member{'' if count == 1 else 's'}: {about.run}", overflow="fold"),
        bar(min(status.tokens.applied, status.horizon), status.horizon, f"{about.unit} counted", width),
        *facts(about, status),
        *([Text(sparkline(losses, width), style="cyan")] if losses else []),
        *(instead(room) if instead else members(status, about.unit, width, room)),
        *alarms,
    )


def facts(about: About, status: SwarmStatus) -> list[Text]:
    """Time and speed, losses, tokens, the round."""
    tokens = status.tokens
    version = "–" if status.version is None else f"{status.version}"
    held_out = format_figure(status.eval_loss)
    if status.eval_version is not None:
        held_out += f" (commit {status.eval_version})"
    goodput = "–" if status.goodput is None else f"{status.goodput:.1%}"
    speed = status.tokens_per_s
    steps, rows = format_step_rate(speed / about.tokens_per_step), speed_text(speed, about.unit)
    ended = about.ended or status.phase == FINISHED
    now = f"   {format_duration(status.left)} left   {steps:>15}   {rows:>18}"
    return [
        Text(f"{format_duration(status.elapsed)} elapsed{'' if ended else now}"),
        Text(f"training loss {format_figure(status.loss):5} (last 20 steps of each)   held-out loss {held_out}"),
        Text(
            f"commit {version}   goodput {goodput}   {about.unit}: {tokens.outstanding:,} in flight, "
            f"{tokens.lost:,} lost, {tokens.dropped:,} dropped"
        ),
        Text(f"round: {status.phase}"),
    ]


def members(status: SwarmStatus, unit: str, width: int, room: int | None) -> list[RenderableType]:
    """A row for each member; where there is not room for so many, for those that need a look, and the rest in words."""
    if room is None or len(status.members) <= room:
        return [members_table(status.members, status.horizon, unit, width)]
    found = needing_a_look(status)
    shown = found[: max(0, room - REST)]
    rest = _rest(status, {each.id for each, _ in shown}, len(found) - len(shown), unit)
    if not shown:
        return [Text(rest)]
    why = [words for _, words in shown]
    return [members_table([each for each, _ in shown], status.horizon, unit, width, why), Text(rest)]


def members_table(
    shown: Sequence[MemberStatus], horizon: int, unit: str, width: int, why: Sequence[str] = ()
) -> RenderableType:
    """One row for each; why: what is to be looked at, for each of them, or nothing."""
    columns = [
        Column("member"),
        Column("state", width=len("evaluating")),
        Column("pid", right=True, width=7, rank=2),
        Column("incarnation", width=8, rank=4),
        Column("commit", right=True, rank=1),
        Column(unit, right=True, width=len(f"{horizon:,}"), rank=3),
        Column(f"{unit}/s", right=True, width=9, rank=1),
        Column("loss", right=True, width=len("0.01234")),
        Column(""),
    ]
    rows = [
        (
            each.id,
            each.state,
            "–" if each.pid is None else f"{each.pid}",
            (each.incarnation or "–")[:8],
            "–" if each.base is None else f"{each.base}",
            f"{each.tokens:,}",
            "–" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            format_figure(each.loss),
            why[number] if why else "",
        )
        for number, each in enumerate(shown)
    ]
    return table(columns, rows, width)


def needing_a_look(status: SwarmStatus) -> list[tuple[MemberStatus, str]]:
    """Members that need a look and, where their state does not say it, why; the most pressing first."""
    speeds = [each.tokens_per_s for each in status.members if each.state == "alive" and each.tokens_per_s]
    slow = SLOW * median(speeds) if speeds else 0.0
    found: list[tuple[int, MemberStatus, str]] = []
    for each in status.members:
        alive = each.state == "alive"
        reasons = (
            (any(alarm.startswith(f"{each.id} ") for alarm in status.alarms), "alarm"),
            (each.state == "lost", ""),
            (alive and (each.lag or 0) > BEHIND, f"{each.lag} commits behind"),
            (alive and each.tokens_per_s is not None and each.tokens_per_s < slow, "slow"),
            (each.state == "joining", ""),
        )
        first = next(((rank, why) for rank, (holds, why) in enumerate(reasons) if holds), None)
        if first:
            found.append((first[0], each, first[1]))
    return [(each, why) for _, each, why in sorted(found, key=lambda one: one[0])]


def _rest(status: SwarmStatus, shown: Collection[str], more: int, unit: str) -> str:
    """The members without a row, in words; more: so many of them need a look."""
    rest = [each for each in status.members if each.id not in shown]
    count = Counter(each.state for each in rest)
    said = [f"{count[state]:,} {state}" for state in ("alive", "evaluating", "joining", "lost", "left") if count[state]]
    alive = [each for each in rest if each.state == "alive"]
    if speeds := [each.tokens_per_s for each in alive if each.tokens_per_s is not None]:
        said.append(f"{min(speeds):,.0f} to {max(speeds):,.0f} {unit}/s each")
    if losses := [each.loss for each in alive if each.loss is not None]:
        said.append(f"loss {format_figure(min(losses))} to {format_figure(max(losses))}")
    if more:
        said.append(f"{more:,} of them need{'s' * (more == 1)} a look")
    return f"{len(rest):,} {'more' if shown else 'members'}: {', '.join(said)}"


def _fitting(alarms: list[Text], width: int) -> list[Text]:
    """As many as have room, and how many more there are."""
    shown: list[Text] = []
    for each in alarms:
        if sum(_rows(one, width) for one in [*shown, each]) > ALARMS and shown:
            rest = len(alarms) - len(shown)
            return [*shown, Text(f"and {rest} more alarm{'s' * (rest > 1)}", style="red")]
        shown.append(each)
    return shown


def _rows(text: Text, width: int) -> int:
    return -(-cell_len(text.plain) // width)

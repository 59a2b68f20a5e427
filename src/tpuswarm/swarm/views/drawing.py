"""Draw a swarm: its progress, its alarms, and its members or the most urgent ones."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure, format_step_rate
from tpuswarm.swarm.views.status import FINISHED, MemberStatus, SwarmStatus, people_sentence
from tpuswarm.train.look.display import format_speed, metrics_line
from tpuswarm.train.look.widgets import Column, draw_bar, lay_out, make_table, sparkline

MAX_LAG = 2
"""A member may be this many commits behind while its push is in flight."""
MIN_SPEED_SHARE = 0.5
"""A member below this share of the median speed is slow."""
HEAD_ROW_COUNT = 8
"""Rows besides members and alarms, with the heading of the members."""
SUMMARY_ROW_COUNT = 2
"""Rows for members that are only counted."""
MAX_ALARM_ROWS = 3


@dataclass(frozen=True)
class About:
    """Facts about a swarm that do not change."""

    title: str
    run: str
    tokens_per_step: int
    unit: str
    """`tokens`, or `rows` if each row counts as one."""
    ended: bool = False
    """Whether the run has ended, so that it has no speed and no time left."""


Members = Callable[[int | None], list[RenderableType]]
"""Draws the members in this many rows; None for no limit."""


def draw(
    about: About,
    status: SwarmStatus,
    losses: Sequence[float],
    width: int,
    height: int | None = None,
    instead: Members | None = None,
) -> RenderableType:
    """Draw everything; with a height, only as many members and alarms as fit, the most urgent first.

    instead: draws the members in another way.
    """
    count = len(status.members)
    members_word = f", {count} member{'' if count == 1 else 's'}" if count else ""
    alarms, room = [Text(f"alarm: {alarm}", style="red") for alarm in status.alarms], None
    if height is not None:
        alarms = _fitting_alarms(alarms, width)
        room = max(
            1,
            height
            - HEAD_ROW_COUNT
            - bool(status.eval_metrics)
            - any(status.people)
            - sum(_row_count(alarm, width) for alarm in alarms),
        )
    return Group(
        Text(f"{about.title}{members_word}: {about.run}", overflow="fold"),
        draw_bar(min(status.tokens.applied, status.horizon), status.horizon, f"{about.unit} counted", width),
        *facts(about, status, width),
        *([Text(sparkline(losses, width), style="cyan")] if losses else []),
        *(instead(room) if instead else members(status, about.unit, width, room)),
        *alarms,
    )


def facts(about: About, status: SwarmStatus, width: int) -> list[Text]:
    """Return lines for time and speed, losses, tokens, and the round."""
    tokens = status.tokens
    version = "–" if status.version is None else f"{status.version}"
    held_out = format_figure(status.eval_loss)
    if status.eval_version is not None:
        held_out += f" (commit {status.eval_version})"
    goodput = "–" if status.goodput is None else f"{status.goodput:.1%}"
    speed = status.tokens_per_s
    steps, rows = format_step_rate(speed / about.tokens_per_step), format_speed(speed, about.unit)
    ended = about.ended or status.phase == FINISHED
    now = [f"{format_duration(status.left)} left", f"{steps:>15}", f"{rows:>18}"]
    losses = [f"training loss {format_figure(status.loss):5} (last 20 steps of each)", f"held-out loss {held_out}"]
    fates = f"{about.unit}: {tokens.outstanding:,} in flight, {tokens.lost:,} lost, {tokens.dropped:,} dropped"
    metrics = [Text(metrics_line(status.eval_metrics), no_wrap=True, overflow="ellipsis")]
    return [
        *lay_out([f"{format_duration(status.elapsed)} elapsed", *([] if ended else now)], width),
        *lay_out(losses, width),
        *(metrics if status.eval_metrics else []),
        *lay_out([f"commit {version}", f"goodput {goodput}", fates], width),
        Text(f"round: {status.phase}"),
        *([Text(people, no_wrap=True, overflow="ellipsis")] if (people := people_sentence(status.people)) else []),
    ]


def members(status: SwarmStatus, unit: str, width: int, room: int | None) -> list[RenderableType]:
    """Draw a row for each member, or only for urgent ones with a summary of the rest."""
    if room is None or len(status.members) <= room:
        return [members_table(status.members, status.horizon, unit, width)]
    urgent = find_urgent_members(status)
    shown = urgent[: max(0, room - SUMMARY_ROW_COUNT)]
    rest = _summarize_rest(status, {member.id for member, _ in shown}, len(urgent) - len(shown), unit)
    if not shown:
        return [Text(rest)]
    reasons = [reason for _, reason in shown]
    return [members_table([member for member, _ in shown], status.horizon, unit, width, reasons), Text(rest)]


def members_table(
    shown: Sequence[MemberStatus], horizon: int, unit: str, width: int, reasons: Sequence[str] = ()
) -> RenderableType:
    """Draw one row for each member; reasons: why each needs attention, if any."""
    links = [member.link for member in shown]
    columns = [
        Column("member"),
        Column("state", width=len("evaluating")),
        Column("pid", right=True, width=7, rank=2),
        Column("incarnation", width=8, rank=4),
        Column("commit", right=True, rank=1),
        Column(unit, right=True, width=len(f"{horizon:,}"), rank=3),
        Column(f"{unit}/s", right=True, width=9, rank=1),
        Column("loss", right=True, width=len("0.01234")),
        *([Column("link", rank=2)] if any(links) else []),
        Column(""),
    ]
    rows = [
        (
            member.id,
            member.state,
            "–" if member.pid is None else f"{member.pid}",
            (member.incarnation or "–")[:8],
            "–" if member.base is None else f"{member.base}",
            f"{member.tokens:,}",
            "–" if member.tokens_per_s is None else f"{member.tokens_per_s:,.0f}",
            format_figure(member.loss),
            *([links[number]] if any(links) else []),
            reasons[number] if reasons else "",
        )
        for number, member in enumerate(shown)
    ]
    return make_table(columns, rows, width)


def find_urgent_members(status: SwarmStatus) -> list[tuple[MemberStatus, str]]:
    """Return members that need attention, most urgent first, with the reason unless their state says it."""
    speeds = [member.tokens_per_s for member in status.members if member.state == "alive" and member.tokens_per_s]
    slow = MIN_SPEED_SHARE * median(speeds) if speeds else 0.0
    found: list[tuple[int, MemberStatus, str]] = []
    for member in status.members:
        alive = member.state == "alive"
        reasons = (
            (any(alarm.startswith(f"{member.id} ") for alarm in status.alarms), "alarm"),
            (member.state == "lost", ""),
            (alive and (member.lag or 0) > MAX_LAG, f"{member.lag} commits behind"),
            (alive and member.tokens_per_s is not None and member.tokens_per_s < slow, "slow"),
            (member.state == "joining", ""),
        )
        first = next(((rank, reason) for rank, (holds, reason) in enumerate(reasons) if holds), None)
        if first:
            found.append((first[0], member, first[1]))
    return [(member, reason) for _, member, reason in sorted(found, key=lambda entry: entry[0])]


def _summarize_rest(status: SwarmStatus, shown: Collection[str], urgent: int, unit: str) -> str:
    """Summarize the members without a row; urgent: how many need attention."""
    rest = [member for member in status.members if member.id not in shown]
    count = Counter(member.state for member in rest)
    parts = [
        f"{count[state]:,} {state}" for state in ("alive", "evaluating", "joining", "lost", "left") if count[state]
    ]
    alive = [member for member in rest if member.state == "alive"]
    if speeds := [member.tokens_per_s for member in alive if member.tokens_per_s is not None]:
        parts.append(f"{min(speeds):,.0f} to {max(speeds):,.0f} {unit}/s each")
    if losses := [member.loss for member in alive if member.loss is not None]:
        parts.append(f"loss {format_figure(min(losses))} to {format_figure(max(losses))}")
    if urgent:
        parts.append(f"{urgent:,} of them need{'s' * (urgent == 1)} a look")
    return f"{len(rest):,} {'more' if shown else 'members'}: {', '.join(parts)}"


def _fitting_alarms(alarms: list[Text], width: int) -> list[Text]:
    """Return the alarms that fit, and the number of the others."""
    shown: list[Text] = []
    for alarm in alarms:
        if sum(_row_count(text, width) for text in [*shown, alarm]) > MAX_ALARM_ROWS and shown:
            rest = len(alarms) - len(shown)
            return [*shown, Text(f"and {rest} more alarm{'s' * (rest > 1)}", style="red")]
        shown.append(alarm)
    return shown


def _row_count(text: Text, width: int) -> int:
    return -(-cell_len(text.plain) // width)

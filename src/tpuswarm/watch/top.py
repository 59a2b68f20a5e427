"""What `top` shows: of each host its chips, who has them, what they train, and whether it needs a look."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tpuswarm.cloud.protocol import Machine
from tpuswarm.config.formatting import format_age, format_figure
from tpuswarm.config.units import GIB
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.hosts.routes import ReachableHosts
from tpuswarm.swarm.views.status import MemberStatus
from tpuswarm.watch.follow import EVERY, Sample

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Literal["away", "ill", "silent", "idle", "busy"]
ORDER: Sequence[State] = ("away", "ill", "silent", "idle", "busy")
"""Those that need a look first."""
COLORS: Mapping[State, str] = {"away": "red", "ill": "red", "silent": "yellow", "idle": "yellow", "busy": "green"}
LATE = 5 * EVERY
"""Seconds after which a host that has said nothing is silent."""
BLOCKS = "▁▂▃▄▅▆▇█"
DASH = "–"
"""For what nobody says: it is not zero."""
ALWAYS = ("host", "state", "busy", "HBM GiB", "owner", "age")
"""Columns that are shown although no row says anything in them."""


@dataclass(frozen=True)
class Chip:
    """One device, as JAX counts them on v2 and v3 two a chip; None for what libtpu does not say."""

    device: int
    duty_percent: float | None
    hbm_used_bytes: float | None
    hbm_total_bytes: float | None


@dataclass(frozen=True)
class Row:
    """One host."""

    host: str
    state: State
    why: str
    chips: tuple[Chip, ...] = ()
    owners: tuple[Mapping[str, Any], ...] = ()
    """Processes that have a chip: pid, user, command, age_s, libtpu, and the last row they wrote (watch/chips.py)."""
    step: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    version: int | None = None
    """The commit that its member has adopted."""
    age_s: float | None = None
    """Of its machine."""


def rows(
    reached: ReachableHosts, samples: Mapping[str, Sample], members: Iterable[MemberStatus], now: float
) -> list[Row]:
    """Of all hosts, those that need a look first; samples: by label; members: of the swarm that the fleet trains."""
    known = {each.id.removeprefix("j-"): each for each in members}
    made = []
    for sentence in reached.away:
        name, _, why = sentence.partition(" ")
        made.append(Row(name, "away", why))
    for host in reached.hosts:
        machine, sample = reached.machines[host.label], samples.get(host.label)
        made.append(_row(host.label, machine, sample, known.get(machine.name), now))

    def place(row: Row) -> Any:
        name, _, worker = row.host.partition("/")
        return ORDER.index(row.state), by_number(name), int(worker or 0)

    return sorted(made, key=place)


def _row(label: str, machine: Machine, sample: Sample | None, member: MemberStatus | None, now: float) -> Row:
    made = Row(label, "silent", "asked, and not heard from yet")
    if sample is not None and sample.said is None:
        made = Row(label, "away", sample.why)
    elif sample is not None and sample.said is not None:
        chips, owners = _chips(sample.said), tuple(sample.said["owners"])
        row: Mapping[str, Any] = next((each["row"] for each in owners if each.get("row")), {})
        made = Row(label, *_state(machine, sample, chips, owners, now), chips, owners, row.get("step"),
                   row.get("tokens_per_s"), row.get("loss"))  # fmt: skip
    if member is not None:
        made = replace(made, tokens_per_s=member.tokens_per_s, loss=member.loss, version=member.base)
    return replace(made, age_s=now - machine.created if machine.created else None)


def _chips(said: Mapping[str, Any]) -> tuple[Chip, ...]:
    values = {name: {int(device): one for device, one in said[name].items()} for name in ("duty", "used", "total")}
    if duty := sorted(values["duty"].items()):  # of a chip; memory is of a device, of which v2 and v3 have two a chip
        each_has = max(1, len(values["used"]) // len(duty))
        first = [chip * each_has for chip in range(len(duty))] if each_has > 1 else [number for number, _ in duty]
        values["duty"] = {at + n: one for at, (_, one) in zip(first, duty, strict=True) for n in range(each_has)}
    devices = sorted(set().union(*values.values()))
    return tuple(Chip(each, *(values[name].get(each) for name in ("duty", "used", "total"))) for each in devices)


def _state(
    machine: Machine, sample: Sample, chips: Sequence[Chip], owners: Sequence[Mapping[str, Any]], now: float
) -> tuple[State, str]:
    assert sample.said is not None
    if machine.healthy is False:
        return "ill", machine.why or "the cloud says that it is not healthy"
    if now - sample.at > LATE:
        return "silent", f"silent for {format_age(now - sample.at)}"
    if chips:
        return "busy", ""
    if not sample.said["chips"]:
        return "idle", "shows no chips"
    if owners:
        return "busy", "no metrics of libtpu"
    return "idle", "no program"


def draw(found: Sequence[Row], width: int, height: int | None = None, devices: bool = False) -> "RenderableType":
    """A table; with a height as many rows as have room. devices: below each host a row for each of its devices."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.train.look.live import Column, table

    parts = [Text(_summary(found))]
    libraries = sorted({_library(each) for row in found for each in row.owners} - {""})
    parts += [Text(f"libtpu: {each}", style="dim") for each in libraries]
    columns = [
        Column("host"), Column("state"), Column("busy"), Column("HBM GiB", right=True), Column("owner", rank=3),
        Column("step", right=True, rank=3), Column("tokens/s", right=True, rank=1),
        Column("loss", right=True, rank=1), Column("commit", right=True, rank=4),
        Column("age", right=True, rank=2), Column("why", wraps=16),
    ]  # fmt: skip
    lines: list[tuple[State, tuple[str, ...]]] = []
    for each in found:
        lines.append((each.state, _cells(each)))
        for chip in each.chips if devices else ():
            blank = ("",) * (len(columns) - 4)  # what is said of the host is not said of its devices
            lines.append((each.state, (f"  device {chip.device}", "", _busy([chip]), _memory([chip]), *blank)))
    room = len(lines) if height is None else max(1, height - len(parts) - 2)
    shown = lines[:room]
    said = [{cells[number] for _, cells in shown} - {"", DASH} for number in range(len(columns))]
    used = [number for number, each in enumerate(columns) if said[number] or each.name in ALWAYS]
    columns = [columns[number] for number in used]
    cells = [tuple(each[number] for number in used) for _, each in shown]
    colors = [COLORS[state] for state, _ in shown]
    made: list[RenderableType] = [table(columns, cells, width, colors)]
    if len(shown) < len(lines):
        made.append(Text(f"and {len(lines) - len(shown):,} more", style="dim"))
    return Group(*made, *parts)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.host, row.state, _busy(row.chips), _memory(row.chips), _owner(row.owners),
        DASH if row.step is None else f"{row.step:,}",
        DASH if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        DASH if row.loss is None else format_figure(row.loss),
        DASH if row.version is None else str(row.version),
        DASH if row.age_s is None else format_age(row.age_s), row.why,
    )  # fmt: skip


def _busy(chips: Sequence[Chip]) -> str:
    """A block for each, and their mean."""
    known = [each.duty_percent for each in chips if each.duty_percent is not None]
    if not known:
        return DASH
    blocks = "".join(
        DASH if each.duty_percent is None else BLOCKS[min(7, int(each.duty_percent / 12.5))] for each in chips
    )
    return f"{blocks} {sum(known) / len(known):.0f}%"


def _memory(chips: Sequence[Chip]) -> str:
    """Of the fullest."""
    known = [(each.hbm_used_bytes, each.hbm_total_bytes) for each in chips]
    full = max(((used, total) for used, total in known if used is not None and total is not None), default=None)
    return DASH if full is None else f"{full[0] / GIB:.1f}/{full[1] / GIB:.0f}"


def _owner(owners: Sequence[Mapping[str, Any]]) -> str:
    if not owners:
        return DASH
    one = owners[0]
    more = f" +{len(owners) - 1}" if len(owners) > 1 else ""
    return f"{one['pid']} {one['user']}{more}"


def _library(owner: Mapping[str, Any]) -> str:
    said = owner.get("libtpu") or {}
    told = ", ".join(f"{name}={value}" for name, value in sorted(said.items()) if name != "loaded")
    return " ".join(each for each in (said.get("loaded", ""), told) if each)


def _summary(found: Sequence[Row]) -> str:
    counts = [(state, sum(each.state == state for each in found)) for state in ORDER]
    states = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{time.strftime('%H:%M:%S')}  {len(found)} host{'s' * (len(found) != 1)}: {states}"

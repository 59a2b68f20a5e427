"""Show hosts for `top`: chips, their owners, training, and problems."""

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
from tpuswarm.train.process.metadata import format_maintenance
from tpuswarm.watch.follow import SAMPLE_INTERVAL_S, Sample

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Literal["away", "ill", "silent", "idle", "busy"]
STATE_ORDER: Sequence[State] = ("away", "ill", "silent", "idle", "busy")
"""Problems first."""
COLORS: Mapping[State, str] = {"away": "red", "ill": "red", "silent": "yellow", "idle": "yellow", "busy": "green"}
SILENT_AFTER_S = 5 * SAMPLE_INTERVAL_S
BLOCKS = "▁▂▃▄▅▆▇█"
DASH = "–"
"""Unknown, not zero."""
FIXED_COLUMNS = ("host", "state", "busy", "HBM GiB", "owner", "age")
"""Shown even if empty."""


@dataclass(frozen=True)
class Chip:
    """One JAX device (v2 and v3 have two per chip); None: unknown."""

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
    """Processes with a chip: pid, user, command, age_s, libtpu, and their last metrics (watch/chips.py)."""
    step: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    version: int | None = None
    """Version of its member."""
    age_s: float | None = None
    """Age of its machine."""


def make_host_rows(
    reached: ReachableHosts, samples: Mapping[str, Sample], members: Iterable[MemberStatus], now: float
) -> list[Row]:
    """Return a row for each host, problems first; samples: by label; members: of the fleet's swarm."""
    members_by_machine = {member.id.removeprefix("j-"): member for member in members}
    rows = []
    for sentence in reached.away:
        name, _, why = sentence.partition(" ")
        rows.append(Row(name, "away", why))
    for host in reached.hosts:
        machine, sample = reached.machines[host.label], samples.get(host.label)
        rows.append(_row(host.label, machine, sample, members_by_machine.get(machine.name), now))

    def sort_key(row: Row) -> Any:
        name, _, worker = row.host.partition("/")
        return STATE_ORDER.index(row.state), by_number(name), int(worker or 0)

    return sorted(rows, key=sort_key)


def _row(label: str, machine: Machine, sample: Sample | None, member: MemberStatus | None, now: float) -> Row:
    row = Row(label, "silent", "no answer yet")
    if sample is not None and sample.data is None:
        row = Row(label, "away", sample.why)
    elif sample is not None and sample.data is not None:
        chips, owners = _chips(sample.data), tuple(sample.data["owners"])
        metrics: Mapping[str, Any] = next((owner["row"] for owner in owners if owner.get("row")), {})
        state, why = _state(machine, sample, chips, owners, now)
        why = "; ".join(filter(None, (why, format_maintenance(sample.data["maintenance"]))))
        row = Row(label, state, why, chips, owners, metrics.get("step"),
                   metrics.get("tokens_per_s"), metrics.get("loss"))  # fmt: skip
    if member is not None:
        row = replace(row, tokens_per_s=member.tokens_per_s, loss=member.loss, version=member.base)
    return replace(row, age_s=now - machine.created if machine.created else None)


def _chips(data: Mapping[str, Any]) -> tuple[Chip, ...]:
    values = {name: {int(device): value for device, value in data[name].items()} for name in ("duty", "used", "total")}
    if duty := sorted(values["duty"].items()):  # per chip, but memory is per device
        per_chip = max(1, len(values["used"]) // len(duty))
        first = [chip * per_chip for chip in range(len(duty))] if per_chip > 1 else [number for number, _ in duty]
        values["duty"] = {at + n: value for at, (_, value) in zip(first, duty, strict=True) for n in range(per_chip)}
    devices = sorted(set().union(*values.values()))
    return tuple(Chip(device, *(values[name].get(device) for name in ("duty", "used", "total"))) for device in devices)


def _state(
    machine: Machine, sample: Sample, chips: Sequence[Chip], owners: Sequence[Mapping[str, Any]], now: float
) -> tuple[State, str]:
    assert sample.data is not None
    if machine.healthy is False:
        return "ill", machine.why or "the cloud calls it unhealthy"
    if now - sample.at > SILENT_AFTER_S:
        return "silent", f"silent for {format_age(now - sample.at)}"
    if chips:
        return "busy", ""
    if not sample.data["chips"]:
        return "idle", "shows no chips"
    if owners:
        return "busy", "no libtpu metrics"
    return "idle", "no program"


def draw_hosts(rows: Sequence[Row], width: int, height: int | None = None, devices: bool = False) -> "RenderableType":
    """Draw a table, cut to a height. devices: add a row for each device below its host."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.train.look.widgets import Column, make_table

    parts = [Text(_summary(rows))]
    libraries = sorted({_library(owner) for row in rows for owner in row.owners} - {""})
    parts += [Text(f"libtpu: {library}", style="dim") for library in libraries]
    columns = [
        Column("host"), Column("state"), Column("busy"), Column("HBM GiB", right=True), Column("owner", rank=3),
        Column("step", right=True, rank=3), Column("tokens/s", right=True, rank=1),
        Column("loss", right=True, rank=1), Column("commit", right=True, rank=4),
        Column("age", right=True, rank=2), Column("why", wraps=16),
    ]  # fmt: skip
    lines: list[tuple[State, tuple[str, ...]]] = []
    for row in rows:
        lines.append((row.state, _cells(row)))
        for chip in row.chips if devices else ():
            blank = ("",) * (len(columns) - 4)
            lines.append((row.state, (f"  device {chip.device}", "", _busy([chip]), _memory([chip]), *blank)))
    room = len(lines) if height is None else max(1, height - len(parts) - 2)
    shown = lines[:room]
    values = [{cells[number] for _, cells in shown} - {"", DASH} for number in range(len(columns))]
    used = [number for number, column in enumerate(columns) if values[number] or column.name in FIXED_COLUMNS]
    columns = [columns[number] for number in used]
    cells = [tuple(row_cells[number] for number in used) for _, row_cells in shown]
    colors = [COLORS[state] for state, _ in shown]
    made: list[RenderableType] = [make_table(columns, cells, width, colors)]
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
    """Draw a block for each chip, and their mean."""
    known = [chip.duty_percent for chip in chips if chip.duty_percent is not None]
    if not known:
        return DASH
    blocks = "".join(
        DASH if chip.duty_percent is None else BLOCKS[min(7, int(chip.duty_percent / 12.5))] for chip in chips
    )
    return f"{blocks} {sum(known) / len(known):.0f}%"


def _memory(chips: Sequence[Chip]) -> str:
    """Format the fullest device."""
    known = [(chip.hbm_used_bytes, chip.hbm_total_bytes) for chip in chips]
    full = max(((used, total) for used, total in known if used is not None and total is not None), default=None)
    return DASH if full is None else f"{full[0] / GIB:.1f}/{full[1] / GIB:.0f}"


def _owner(owners: Sequence[Mapping[str, Any]]) -> str:
    if not owners:
        return DASH
    one = owners[0]
    more = f" +{len(owners) - 1}" if len(owners) > 1 else ""
    return f"{one['pid']} {one['user']}{more}"


def _library(owner: Mapping[str, Any]) -> str:
    facts = owner.get("libtpu") or {}
    variables = ", ".join(f"{name}={value}" for name, value in sorted(facts.items()) if name != "loaded")
    return " ".join(part for part in (facts.get("loaded", ""), variables) if part)


def _summary(rows: Sequence[Row]) -> str:
    counts = [(state, sum(row.state == state for row in rows)) for state in STATE_ORDER]
    states = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{time.strftime('%H:%M:%S')}  {len(rows)} host{'s' * (len(rows) != 1)}: {states}"

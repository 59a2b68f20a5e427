"""What a page is sent of a state: facts, and tables of members and machines, of which later only what changed."""

from collections.abc import Sequence
from typing import Any

from tpuswarm.config.formatting import format_age
from tpuswarm.fleet.decide.money import format_dollars
from tpuswarm.fleet.view import ACTIVITY_COLORS, STATE_COLORS, machine_rows, running_rate, total_spending
from tpuswarm.swarm.views.drawing import find_urgent_members
from tpuswarm.swarm.views.status import RunView
from tpuswarm.watch.state import State
from tpuswarm.watch.top import Row as Host

Table = dict[str, list[Any]]
"""Rows by what they are about."""
Sections = dict[str, Any]


def sections(state: State, hosts: Sequence[Host]) -> Sections:
    """Everything about one moment: `facts`, `alarms`, and the tables `members` and `machines`."""
    return {
        "facts": _facts(state),
        "alarms": list(state.swarm.status.alarms) if state.swarm else [],
        "members": _members(state.swarm) if state.swarm else {},
        "machines": _machines(state, hosts),
    }


def changes(before: Sections, now: Sections) -> Sections:
    """What differs: of a table the rows that do, None for those that are gone; of all else the whole."""
    found: Sections = {}
    for name, value in now.items():
        old = before[name]
        if value == old:
            continue
        if name in ("members", "machines"):
            found[name] = {key: row for key, row in value.items() if old.get(key) != row}
            found[name] |= {key: None for key in old if key not in value}
        else:
            found[name] = value
    return found


def _facts(state: State) -> dict[str, Any]:
    look = state.look
    found: dict[str, Any] = {"at": state.at, "run": state.url, "state": "not begun" if state.url else ""}
    if look is not None:
        found |= {
            "run": look.run, "recipe": look.recipe, "state": look.state, "pid": look.pid, "message": look.message,
            "unit": look.unit, "step": look.step, "steps": look.steps, "tokens": look.tokens, "loss": look.loss,
            "eval_loss": look.eval_loss, "tokens_per_s": look.tokens_per_s,
        }  # fmt: skip
    if isinstance(look, RunView):
        status = look.status
        found |= {
            "horizon": status.horizon, "goodput": status.goodput, "version": status.version, "phase": status.phase,
            "left": status.left, "elapsed": status.elapsed, "eval_version": status.eval_version,
            "heard": status.time, "lost": status.tokens.lost, "dropped": status.tokens.dropped,
            "outstanding": status.tokens.outstanding, "swarm": True,
        }  # fmt: skip
    elif look is not None:
        horizon = look.tokens * look.steps // look.step if look.step else 0
        found |= {"horizon": horizon, "left": look.left, "elapsed": look.elapsed, "devices": look.devices}
    if state.machines is not None:
        document, listing, _ = state.machines
        rate = running_rate(machine_rows(document.desired, listing, (), state.at))
        wanted = 0 if document.desired.down else sum(pool.count for pool in document.desired.pools)
        found |= {
            "fleet": document.desired.fleet, "wanted": wanted, "hourly": rate.hour,
            "dollars": format_dollars(total_spending(document, listing, state.at).dollars),
        }  # fmt: skip
    return found


def _members(look: RunView) -> Table:
    """state, place among those that need a look, why it does, tokens/s, loss, commit, lag, tokens, pid, incarnation."""
    found = find_urgent_members(look.status) if look.state == "running" else []
    needs = {each.id: (place, why) for place, (each, why) in enumerate(found)}
    return {
        each.id: [
            each.state, *needs.get(each.id, (None, "")),
            None if each.tokens_per_s is None else round(each.tokens_per_s),
            None if each.loss is None else float(f"{each.loss:.4g}"), each.base, each.lag, each.tokens, each.pid,
            (each.incarnation or "")[:8],
        ]
        for each in look.status.members
    }  # fmt: skip


def _machines(state: State, hosts: Sequence[Host]) -> Table:
    """pool, type, zone, state, its colour, what it is at, its colour, why, age, losses, $/h, $, busy (%), HBM (used and
    total of the fullest device, in bytes), hosts.
    """
    if state.machines is None:
        return {}
    document, listing, events = state.machines
    at: dict[str, list[Host]] = {}
    for host in hosts:
        at.setdefault(host.host.partition("/")[0], []).append(host)
    doings = state.doings() if state.url else []
    doing = {each.machine: each for each in doings}
    found: Table = {}
    for row in machine_rows(document.desired, listing, events, state.at):
        here, does = at.get(row.name, []), doing.get(row.name)
        what = (does.kind, ACTIVITY_COLORS.get(does.kind, ""), does.why) if does else ("", "", row.why)
        color = "red" if row.healthy is False else STATE_COLORS.get(row.state, "yellow")
        found[row.name] = [
            row.pool, row.type, row.zone, "unhealthy" if row.healthy is False else row.said.lower(), color, *what,
            None if row.age_s is None else format_age(row.age_s), row.preemptions, row.hourly,
            None if row.cost is None else round(row.cost, 2), _busy(here), _memory(here), len(row.workers),
        ]  # fmt: skip
    for each in doings:
        if each.kind == "missing":
            empty = [None] * 7
            found[f"{each.pool}: missing"] = [
                each.pool, "", "", "missing", "red", each.kind, "red", each.why, *empty,
            ]  # fmt: skip
    return found


def _busy(hosts: Sequence[Host]) -> float | None:
    known = [chip.duty_percent for host in hosts for chip in host.chips if chip.duty_percent is not None]
    return round(sum(known) / len(known)) if known else None


def _memory(hosts: Sequence[Host]) -> list[float | None] | None:
    """Of the fullest."""
    chips = [chip for host in hosts for chip in host.chips]
    known = [[each.hbm_used_bytes, each.hbm_total_bytes] for each in chips if each.hbm_used_bytes is not None]
    return max(known, key=lambda each: each[0] or 0.0, default=None)

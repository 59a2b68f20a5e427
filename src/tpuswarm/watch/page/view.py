"""Turn a state into sections of a page: facts, and tables of members and machines; find the changes."""

from collections.abc import Sequence
from typing import Any

from tpuswarm.config.formatting import format_age
from tpuswarm.fleet.decide.money import format_dollars
from tpuswarm.fleet.view import ACTIVITY_COLORS, STATE_COLORS, machine_rows, running_rate, total_spending
from tpuswarm.swarm.views.drawing import find_urgent_members
from tpuswarm.swarm.views.status import RunView, people_sentence
from tpuswarm.watch.state import State
from tpuswarm.watch.top import Row as Host

Table = dict[str, list[Any]]
"""Rows by name."""
Sections = dict[str, Any]


def make_sections(state: State, hosts: Sequence[Host]) -> Sections:
    """Return `facts`, `alarms`, and the tables `members` and `machines`."""
    return {
        "facts": _facts(state),
        "alarms": list(state.swarm.status.alarms) if state.swarm else [],
        "members": _members(state.swarm) if state.swarm else {},
        "machines": _machines(state, hosts),
    }


def changed_sections(before: Sections, now: Sections) -> Sections:
    """Return the sections that differ; of tables only the changed rows, with None for deleted ones."""
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
    run = state.run
    found: dict[str, Any] = {"at": state.at, "run": state.url, "state": "not begun" if state.url else ""}
    if run is not None:
        found |= {
            "run": run.run, "recipe": run.recipe, "state": run.state, "pid": run.pid, "message": run.message,
            "unit": run.unit, "step": run.step, "steps": run.steps, "tokens": run.tokens, "loss": run.loss,
            "eval_loss": run.eval_loss, "tokens_per_s": run.tokens_per_s,
        }  # fmt: skip
    if isinstance(run, RunView):
        status = run.status
        found |= {
            "horizon": status.horizon, "goodput": status.goodput, "version": status.version, "phase": status.phase,
            "left": status.left, "elapsed": status.elapsed, "eval_version": status.eval_version,
            "heard": status.time, "lost": status.tokens.lost, "dropped": status.tokens.dropped,
            "outstanding": status.tokens.outstanding, "swarm": True, "people": people_sentence(status.people),
        }  # fmt: skip
    elif run is not None:
        horizon = run.tokens * run.steps // run.step if run.step else 0
        found |= {"horizon": horizon, "left": run.left, "elapsed": run.elapsed, "devices": run.devices}
    if state.machines is not None:
        document, listing, _ = state.machines
        rate = running_rate(machine_rows(document.desired, listing, (), state.at))
        wanted = 0 if document.desired.down else sum(pool.count for pool in document.desired.pools)
        found |= {
            "fleet": document.desired.fleet, "wanted": wanted, "hourly": rate.hour,
            "dollars": format_dollars(total_spending(document, listing, state.at).dollars),
        }  # fmt: skip
    return found


def _members(run: RunView) -> Table:
    """Columns: state, rank among urgent members, why, tokens/s, loss, commit, lag, tokens, pid, incarnation, link."""
    urgent = find_urgent_members(run.status) if run.state == "running" else []
    ranks = {member.id: (rank, why) for rank, (member, why) in enumerate(urgent)}
    return {
        member.id: [
            member.state, *ranks.get(member.id, (None, "")),
            None if member.tokens_per_s is None else round(member.tokens_per_s),
            None if member.loss is None else float(f"{member.loss:.4g}"), member.base, member.lag, member.tokens,
            member.pid, (member.incarnation or "")[:8], member.link,
        ]
        for member in run.status.members
    }  # fmt: skip


def _machines(state: State, hosts: Sequence[Host]) -> Table:
    """Columns: pool, type, zone, state, its color, activity, its color, why, age, losses, $/h, $, busy (%), HBM, hosts.

    HBM: used and total bytes of the fullest device.
    """
    if state.machines is None:
        return {}
    document, listing, events = state.machines
    hosts_by_machine: dict[str, list[Host]] = {}
    for host in hosts:
        hosts_by_machine.setdefault(host.host.partition("/")[0], []).append(host)
    activities = state.activities() if state.url else []
    by_machine = {activity.machine: activity for activity in activities}
    found: Table = {}
    for row in machine_rows(document.desired, listing, events, state.at):
        own_hosts, activity = hosts_by_machine.get(row.name, []), by_machine.get(row.name)
        kind = activity.kind if activity else ""
        cells = (kind, ACTIVITY_COLORS.get(kind, ""), activity.why) if activity else ("", "", row.why)
        color = "red" if row.healthy is False else STATE_COLORS.get(row.state, "yellow")
        found[row.name] = [
            row.pool, row.type, row.zone, "unhealthy" if row.healthy is False else row.state_word, color, *cells,
            None if row.age_s is None else format_age(row.age_s), row.preemptions, row.hourly,
            None if row.cost is None else round(row.cost, 2), _busy(own_hosts), _memory(own_hosts), len(row.workers),
        ]  # fmt: skip
    for activity in activities:
        if activity.kind == "missing":
            empty = [None] * 7
            found[f"{activity.pool}: missing"] = [
                activity.pool, "", "", "missing", "red", activity.kind, "red", activity.why, *empty,
            ]  # fmt: skip
    return found


def _busy(hosts: Sequence[Host]) -> float | None:
    known = [chip.duty_percent for host in hosts for chip in host.chips if chip.duty_percent is not None]
    return round(sum(known) / len(known)) if known else None


def _memory(hosts: Sequence[Host]) -> list[float | None] | None:
    """Return used and total bytes of the fullest device."""
    chips = [chip for host in hosts for chip in host.chips]
    known = [[chip.hbm_used_bytes, chip.hbm_total_bytes] for chip in chips if chip.hbm_used_bytes is not None]
    return max(known, key=lambda pair: pair[0] or 0.0, default=None)

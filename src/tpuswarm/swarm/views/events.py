"""Describe the events of a run in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpuswarm.swarm.core.values import Record

MAX_NAMED_MEMBERS = 12
"""Members of a commit that are named; the others are counted."""


def commit_event(record: Record) -> dict[str, Any]:
    """Return the facts of a commit for events.jsonl."""
    parts = [
        {
            "member": decision.identity.incarnation.member,
            "incarnation": decision.identity.incarnation.name,
            "tokens": decision.tokens,
            "weight": decision.weight,
            "fate": decision.fate,
            "reason": decision.reason,
        }
        for decision in record.decisions
    ]
    return {
        "version": record.version,
        "epoch": record.epoch,
        "tokens": record.tokens,
        "contributors": [part for part in parts if part["fate"] == "applied"],
        "others": [part for part in parts if part["fate"] != "applied"],
        "rule": record.rule,
        "rate": record.rate,
    }


def sentence(event: Mapping[str, Any]) -> str:
    """Describe an event of events.jsonl in one line."""
    try:
        return _sentence(event)
    except (KeyError, TypeError, ValueError):
        return f"{event['event']}: this line of events.jsonl is damaged"


def _sentence(event: Mapping[str, Any]) -> str:
    kind = event["event"]
    if kind == "commit":
        parts = [*event["contributors"], *event["others"]]
        return commit_sentence(event["version"], event["tokens"], _unit(event), parts)
    if kind == "joined":
        joined = "rejoined" if event.get("again") else "joined"
        return f"{event['member']} {joined} ({event['incarnation'][:8]}, pid {event['pid']})"
    if kind == "lost":
        how = "killed" if event["message"] == "killed" else f"lost ({event['message']})"
        back = "; it rejoins when its machine is back" if event.get("own_machine") else ""
        lost = f"about {event['tokens']:,} uncommitted {_unit(event)} lost"
        return f"{event['member']} {how}; {lost}, commits are safe{back}"
    if kind == "left":
        lost = f"; {event['tokens']:,} uncommitted {_unit(event)} lost" if event.get("tokens") else ""
        return f"{event['member']} left cleanly{lost}"
    if kind in ("coordinator", "shard"):
        return f"{event['name']}: {event['message']}"
    text = str(event.get("message") or event.get("text") or "")
    return f"{kind}: {text}" if text else kind


def _unit(event: Mapping[str, Any]) -> str:
    return str(event.get("unit", "tokens"))


def commit_sentence(version: int, tokens: int, unit: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Describe a commit: its members with their weights, or of many members their number and range of weights.

    unit: `tokens` or `rows`.
    """
    applied = [part for part in parts if part["fate"] == "applied"]
    others = [part for part in parts if part["fate"] != "applied"]
    who = ", ".join(f"{part['member']} {part['weight']:.0%}" for part in applied) or "nobody"
    if len(applied) > MAX_NAMED_MEMBERS:
        least, most = min(part["weight"] for part in applied), max(part["weight"] for part in applied)
        who = f"{len(applied)} members, {least:.1%} to {most:.1%} each"
    not_in = "".join(f"; {part['member']} {part['fate']}: {part['reason']}" for part in others[:MAX_NAMED_MEMBERS])
    more = f"; {len(others) - MAX_NAMED_MEMBERS} more were not counted" if len(others) > MAX_NAMED_MEMBERS else ""
    return f"commit {version}: {who}; {tokens:,} {unit} counted{not_in}{more}"

"""What happened in a run, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpuswarm.swarm.core.values import Record

NAMED = 12
"""Members of a commit who are named; more are too many to read."""


def commit_event(record: Record) -> dict[str, Any]:
    """The facts of a commit for events.jsonl."""
    parts = [
        {
            "member": each.identity.incarnation.member,
            "incarnation": each.identity.incarnation.name,
            "tokens": each.tokens,
            "weight": each.weight,
            "fate": each.fate,
            "reason": each.reason,
        }
        for each in record.decisions
    ]
    return {
        "version": record.version,
        "epoch": record.epoch,
        "tokens": record.tokens,
        "contributors": [each for each in parts if each["fate"] == "applied"],
        "others": [each for each in parts if each["fate"] != "applied"],
        "rule": record.rule,
        "rate": record.rate,
    }


def sentence(event: Mapping[str, Any]) -> str:
    """An event of events.jsonl as a line for a person."""
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
        return f"{event['member']} left cleanly"
    if kind in ("coordinator", "shard"):
        return f"{event['name']}: {event['message']}"
    text = str(event.get("message") or event.get("text") or "")
    return f"{kind}: {text}" if text else kind


def _unit(event: Mapping[str, Any]) -> str:
    """What its tokens are."""
    return str(event.get("unit", "tokens"))


def commit_sentence(version: int, tokens: int, unit: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """A commit in words: who is in it, and with what weight; of many members how many, and the least and the most.

    unit: what its tokens are, tokens or rows.
    """
    applied = [each for each in parts if each["fate"] == "applied"]
    others = [each for each in parts if each["fate"] != "applied"]
    who = ", ".join(f"{each['member']} {each['weight']:.0%}" for each in applied) or "nobody"
    if len(applied) > NAMED:
        least, most = min(each["weight"] for each in applied), max(each["weight"] for each in applied)
        who = f"{len(applied)} members, {least:.1%} to {most:.1%} each"
    not_in = "".join(f"; {each['member']} {each['fate']}: {each['reason']}" for each in others[:NAMED])
    more = f"; {len(others) - NAMED} more were not counted" if len(others) > NAMED else ""
    return f"commit {version}: {who}; {tokens:,} {unit} counted{not_in}{more}"

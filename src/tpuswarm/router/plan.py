"""Pure decisions: from what is asked for, what is there and what was recorded to what has to be changed, and back."""

import shlex
from collections.abc import Mapping as Values
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpuswarm.router.mapping import Mapping, in_a_row, parse_ports, show_ports
from tpuswarm.router.record import KeptSetting, Record
from tpuswarm.router.ruleset import TABLE, Listing, ruleset
from tpuswarm.router.settings import OPEN_FILES, UNIT, Setting, at_boot, tuning


@dataclass(frozen=True)
class Asked:
    """What a person wants; `tune` and `persist` hold from the apply that asks for them until a remove."""

    file: Path
    mapping: Mapping
    tune: bool
    persist: bool
    open_files: int = OPEN_FILES
    """The most that this kernel allows a process."""

    def settings(self) -> tuple[Setting, ...]:
        """Those that should hold."""
        return (
            *(tuning(self.mapping, self.open_files) if self.tune else ()),
            *(at_boot(self.file, self.tune) if self.persist else ()),
        )


class Change(NamedTuple):
    """The text of a file now and afterwards; None: there is no such file."""

    path: str
    now: str | None
    then: str | None

    def __str__(self) -> str:
        if self.now is None and self.then is not None:
            return f"write {self.path}"
        if self.then is None:
            return f"delete {self.path}"
        if (now := one_line(self.now)) and (then := one_line(self.then)):
            return f"{self.path}: {now} -> {then}"
        return f"rewrite {self.path}"


@dataclass(frozen=True)
class Plan:
    """What an apply does, in this order, after the record is written."""

    record: Record
    """With `rest` as it is known: None if the ruleset is still to be loaded."""
    changes: tuple[Change, ...]
    ruleset: str | None
    """None: the kernel has it."""
    ports: int
    """That lead somewhere."""

    def steps(self) -> list[str]:
        """In words; none if everything is as asked for."""
        steps = [str(change) for change in self.changes]
        if self.ruleset:
            ports = f"{self.ports:,} ports" if self.ports > 1 else "1 port"
            steps.append(f"nft: table ip {TABLE}, {ports}, in one transaction")
        return steps


def plan(asked: Asked, listing: Listing | None, values: Values[str, str | None], record: Record | None) -> Plan:
    """What to do; `values` holds the texts of all settings asked for, `listing` is our table, if it is there."""
    text = ruleset(asked.mapping)
    loaded = (
        record is not None
        and listing is not None
        and (record.ruleset, record.rest) == (text, listing.rest)
        and listing.targets == asked.mapping.targets
    )
    ports = set(asked.mapping.targets) | (earlier_ports(record) if record else set())
    kept = {each.path: each for each in record.settings} if record else {}
    for path, value in asked.settings():
        old = values[path]
        if path in kept and same(old, kept[path].new):
            old = kept[path].old  # what is there now is ours
        kept.pop(path, None)
        if not same(old, value):
            kept[path] = KeptSetting(path=path, old=old, new=value)
    return Plan(
        Record(
            file=str(asked.file),
            tune=asked.tune,
            persist=asked.persist,
            ruleset=text,
            ports=tuple(map(show_ports, in_a_row(sorted(ports)))),
            rest=record.rest if record and loaded else None,
            settings=tuple(kept.values()),
        ),
        tuple(Change(path, values[path], value) for path, value in asked.settings() if not same(values[path], value)),
        None if loaded else text,
        len(asked.mapping.targets),
    )


def restoring(record: Record, values: Values[str, str | None]) -> tuple[tuple[Change, ...], tuple[KeptSetting, ...]]:
    """What brings the settings back, the last one first; and those that hold neither their old nor our value.

    These are someone else's by now. `values` holds the texts of all recorded settings.
    """
    changes = [Change(each.path, values[each.path], each.old) for each in reversed(record.settings)]
    kept = {each.path: each for each in record.settings}
    foreign = [each for each in changes if not same(each.now, each.then) and not same(each.now, kept[each.path].new)]
    return (
        tuple(each for each in changes if not same(each.now, each.then) and each not in foreign),
        tuple(kept[each.path] for each in foreign),
    )


def undo(record: Record) -> list[str]:
    """What `remove` does, as commands of a shell, for whoever has to do it without us."""
    lines = [f"nft delete table ip {TABLE}"]
    for each in reversed(record.settings):
        path = shlex.quote(each.path)
        lines.append(f"rm {path}" if each.old is None else f"echo {shlex.quote(each.old.strip())} > {path}")
    if any(each.path == UNIT for each in record.settings):
        lines.append("systemctl daemon-reload")
    return lines


def earlier_ports(record: Record) -> set[int]:
    """Those of all mappings since the last remove."""
    return {port for text in record.ports for port in parse_ports(text)}


def same(one: str | None, other: str | None) -> bool:
    """Whether two texts of a setting mean the same: the kernel writes tabs and a newline where blanks were given."""
    return one == other if one is None or other is None else one.split() == other.split()


def one_line(text: str | None) -> str:
    """A text as a sentence can hold it; empty for one of several lines, or none."""
    return "" if text is None or "\n" in text.strip() else " ".join(text.split())

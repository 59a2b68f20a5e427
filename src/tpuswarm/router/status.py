"""Pure: what the file asks for, what the kernel has and what was recorded, side by side."""

from collections import Counter
from collections.abc import Mapping as Values
from dataclasses import dataclass

from tpuswarm.router.mapping import Mapping, Target, in_a_row, show_ports
from tpuswarm.router.plan import earlier_ports, one_line, same
from tpuswarm.router.record import Record
from tpuswarm.router.ruleset import Listing, ruleset


@dataclass(frozen=True)
class Row:
    """A port that the kernel translates."""

    port: int
    to: str
    attempts: int
    """To connect, since the rules were last changed; one that is refused, or tried again, counts too."""
    open: int | None
    """Connections established now; None where the kernel does not say."""


@dataclass(frozen=True)
class Status:
    """What `tpuswarm router status` shows."""

    file: str | None
    rows: tuple[Row, ...]
    kept: int | None
    """Established connections that an earlier mapping sent elsewhere; None where the kernel does not say."""
    followed: tuple[int, int] | None
    """Connections of all kinds that the kernel follows, and how many it can; beyond, it drops their packets."""
    drift: tuple[str, ...]
    """What is not as it was asked for, in sentences."""


def status(
    record: Record | None,
    listing: Listing | None,
    asked: Mapping | str,
    values: Values[str, str | None],
    open_now: Counter[tuple[int, Target]] | None,
    followed: tuple[int, int] | None,
) -> Status:
    """`asked` is what the recorded file means now, or why it means nothing; `values`: of all recorded settings."""
    rows, kept = [], None
    if listing:
        for port, target in sorted(listing.targets.items()):
            count = None if open_now is None else open_now[port, target]
            rows.append(Row(port, str(target), listing.attempts[port], count))
        if open_now is not None:
            ports = listing.targets.keys() | (earlier_ports(record) if record else set())
            kept = sum(
                count
                for (port, target), count in open_now.items()
                if port in ports and listing.targets.get(port) != target
            )
    drift = tuple(_drift(record, listing, asked, values))
    return Status(record.file if record else None, tuple(rows), kept, followed, drift)


def _drift(
    record: Record | None, listing: Listing | None, asked: Mapping | str, values: Values[str, str | None]
) -> list[str]:
    if record is None:
        return ["the rules are ours, but the record of settings is gone: apply again"] if listing else []
    found = []
    if listing is None:
        found.append("the kernel has no rules: someone deleted them, or the machine was rebooted; apply again")
    elif record.rest is None:
        found.append("the last apply did not finish: apply again")
    elif record.rest != listing.rest:
        found.append("someone changed the rules in the kernel: apply again")
    if isinstance(asked, str):
        found.append(asked)
    elif listing:
        there = _differences(listing.targets, asked.targets, record.file)
        if not there and ruleset(asked) != record.ruleset:
            there = [f"sources or interfaces in {record.file} changed since the last apply: apply again"]
        found += there
    for each in record.settings:
        if not same(now := values[each.path], each.new):
            said = "is gone" if now is None else "was changed"
            if (value := one_line(now)) and (new := one_line(each.new)):
                said = f"is {value}, not {new}"
            found.append(f"{each.path} {said}: apply again")
    return found


def _differences(kernel: dict[int, Target], file: dict[int, Target], name: str) -> list[str]:
    missing, extra = sorted(file.keys() - kernel.keys()), sorted(kernel.keys() - file.keys())
    other = sorted(port for port in file.keys() & kernel.keys() if file[port] != kernel[port])
    found = []
    if missing:
        found.append(f"in {name}, not in the kernel: {_counted(missing)}")
    if extra:
        found.append(f"in the kernel, not in {name}: {_counted(extra)}")
    if other:
        first = other[0]
        found.append(
            f"forwarded elsewhere than in {name}: {_counted(other)}; {first} goes to {kernel[first]}, not {file[first]}"
        )
    return found


def _counted(ports: list[int]) -> str:
    return f"{len(ports):,} port{'s' * (len(ports) > 1)} ({', '.join(map(show_ports, in_a_row(ports)))})"

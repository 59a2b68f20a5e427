"""Compare the file, the kernel and the last apply."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.router import machine
from tpuswarm.router.apply import Applied, digest, read_applied
from tpuswarm.router.file import read_router
from tpuswarm.router.mapping import Mapping, Target, format_ports, merge_ports
from tpuswarm.router.ruleset import Listing, ruleset
from tpuswarm.router.settings import tuning

ESTABLISHED = re.compile(
    r"^ipv4 .* ESTABLISHED src=\S+ dst=(?P<router>\S+) sport=\d+ dport=(?P<port>\d+) .*?"
    r"\bsrc=(?P<address>\S+) dst=\S+ sport=(?P<to>\d+) ",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """One forwarded port."""

    port: int
    to: str
    attempts: int
    """Connections tried since the rules were loaded, including refused and repeated ones."""
    open: int | None
    """Unknown if None."""


@dataclass(frozen=True)
class Status:
    """Output of `tpuswarm router status`."""

    file: str | None
    rows: tuple[Row, ...]
    kept: int | None
    """Open connections to earlier targets of these ports; unknown if None."""
    followed: tuple[int, int] | None
    """Connections that the kernel tracks, and its limit; it drops packets beyond."""
    drift: tuple[str, ...]


def read_status() -> Status:
    """Read how things are; change nothing."""
    applied, listing, text = read_applied(), machine.list_table(), machine.read_connections()
    mapping: Mapping | str = ""
    drift = []
    if applied:
        try:
            _, mapping = read_router(Path(applied.file))
        except InputError as error:
            mapping = str(error)
        if isinstance(mapping, Mapping) and machine.SYSCTL.exists():
            for setting in tuning(mapping):
                if not machine.has_value(setting):
                    value = " ".join((machine.read_file(setting.path) or "nothing").split())
                    drift.append(f"{setting.path} is {value}, not {setting.value}: apply again")
    rows, kept = count_traffic(listing, None if text is None else count_connections(text))
    drift = rule_drift(applied, listing, mapping) + drift
    return Status(applied.file if applied else None, rows, kept, machine.tracked_connections(), tuple(drift))


def count_connections(text: str) -> Counter[tuple[int, Target]]:
    """Count the open connections by port and target, from the kernel's list of tracked connections."""
    found: Counter[tuple[int, Target]] = Counter()
    for line in ESTABLISHED.finditer(text):
        target = Target(None if line["address"] == line["router"] else line["address"], int(line["to"]))
        if target != (None, int(line["port"])):
            found[int(line["port"]), target] += 1
    return found


def count_traffic(
    listing: Listing | None, connections: Counter[tuple[int, Target]] | None
) -> tuple[tuple[Row, ...], int | None]:
    """Return a row for each port, and how many connections of these ports go to earlier targets."""
    if not listing:
        return (), None
    rows = tuple(
        Row(port, str(target), listing.attempts[port], None if connections is None else connections[port, target])
        for port, target in sorted(listing.targets.items())
    )
    if connections is None:
        return rows, None
    return rows, sum(count for (port, to), count in connections.items() if listing.targets.get(port, to) != to)


def rule_drift(applied: Applied | None, listing: Listing | None, mapping: Mapping | str) -> list[str]:
    """Return in sentences what differs; `mapping` is an error if the file cannot be read."""
    if applied is None:
        return [f"the rules are ours, but {machine.RULES} is missing: apply again"] if listing else []
    drift = []
    if listing is None:
        drift.append("the kernel has no rules: someone deleted them, or the machine restarted; apply again")
    elif applied.listing.rest != listing.rest:
        drift.append("someone changed the rules in the kernel: apply again")
    if isinstance(mapping, str):
        drift.append(mapping)
    elif listing:
        differences = _differences(listing.targets, mapping.targets, applied.file)
        if not differences and digest(ruleset(mapping)) != applied.digest:
            differences = [f"sources or interfaces in {applied.file} changed since the last apply: apply again"]
        drift += differences
    return drift


def _differences(kernel: dict[int, Target], file: dict[int, Target], name: str) -> list[str]:
    missing, extra = sorted(file.keys() - kernel.keys()), sorted(kernel.keys() - file.keys())
    other = sorted(port for port in file.keys() & kernel.keys() if file[port] != kernel[port])
    found = []
    if missing:
        found.append(f"in {name}, not in the kernel: {_describe_ports(missing)}")
    if extra:
        found.append(f"in the kernel, not in {name}: {_describe_ports(extra)}")
    if other:
        port = other[0]
        found.append(
            f"forwarded elsewhere than in {name}: {_describe_ports(other)}; "
            f"{port} goes to {kernel[port]}, not {file[port]}"
        )
    return found


def _describe_ports(ports: list[int]) -> str:
    return f"{len(ports):,} port{'s' * (len(ports) > 1)} ({', '.join(map(format_ports, merge_ports(ports)))})"

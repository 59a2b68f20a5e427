"""Parse ports and targets as ROUTER.toml writes them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import NamedTuple

PORTS = re.compile(r"(\d+)(?:-(\d+))?")
TO = re.compile(r"(?P<host>[^:]*):(?P<ports>[^:]*)")


class Target(NamedTuple):
    """Destination of a port; without an address it is a port of the router itself."""

    address: str | None
    port: int

    def __str__(self) -> str:
        return f"{self.address or ''}:{self.port}"


@dataclass(frozen=True)
class Mapping:
    """All that a router forwards: TCP over IPv4."""

    outside: str
    """Interface where connections arrive."""
    inside: str
    """Interface to the targets; may be the same."""
    sources: tuple[str, ...]
    """Networks that may connect, as 10.0.0.0/8; disjoint and sorted."""
    targets: dict[int, Target]
    """By port of the router, sorted."""


def parse_ports(text: str) -> range:
    """Parse `48000-48255` or `48000`; raise ValueError for anything else."""
    match = PORTS.fullmatch(text.strip())
    if not match:
        raise ValueError(f"ports look like 48000-48255 or 48000, not {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"ports go from 1 to 65535, the lower one first, not {text}")
    return range(first, last + 1)


def expand_targets(ports: range, to: str) -> dict[int, Target]:
    """Return the target of each port, where `to` is HOST:PORT; raise ValueError for anything else.

    HOST is an address, a range (`10.0.0.11-10.0.0.20`), an address with `{i}` for the index of the port from 0, or
    empty for the router itself. PORT is one port or a range. Ranges must be as long as `ports`.
    """
    match = TO.fullmatch(to.strip())
    if not match:
        raise ValueError(f"a target looks like 10.0.0.2:8470, or :8470 for the router itself, not {to!r}")
    numbers = parse_ports(match["ports"])
    hosts = _hosts(match["host"], len(ports))
    for what, count in ((f"{match['host']} is {len(hosts)} addresses", len(hosts)),
                        (f":{match['ports']} is {len(numbers)} ports", len(numbers))):  # fmt: skip
        if count not in (1, len(ports)):
            raise ValueError(f"{what} for {format_ports(ports)}, which is {len(ports)}: use the same number")
    return {
        port: Target(hosts[min(i, len(hosts) - 1)], numbers[min(i, len(numbers) - 1)]) for i, port in enumerate(ports)
    }


def _hosts(text: str, count: int) -> list[str | None]:
    if not text:
        return [None]
    if "{" in text:
        return [_address(text.replace("{i}", str(i)), f" (i = {i}, from 0 to {count - 1})") for i in range(count)]
    ends = [IPv4Address(_address(end)) for end in text.split("-", 1)]
    if ends[0] > ends[-1]:
        raise ValueError(f"an address range goes from low to high, not {text}")
    if (size := int(ends[-1]) - int(ends[0]) + 1) > 65535:
        raise ValueError(f"{text} is {size:,} addresses, but there are only 65,535 ports")
    return [_address(str(ends[0] + i)) for i in range(size)]


def _address(text: str, where: str = "") -> str:
    try:
        address = IPv4Address(text)
    except AddressValueError:
        raise ValueError(f"{text} is not an IPv4 address{where}; use one like 10.0.0.2, or 10.0.{{i}}.2") from None
    if address.is_loopback or address.is_unspecified:
        raise ValueError(f"{text}{where} is the router itself: omit the address, as in :8470")
    if address.is_multicast or address == IPv4Address("255.255.255.255"):
        raise ValueError(f"{text}{where} is not the address of a single machine")
    return str(address)


def format_ports(ports: range) -> str:
    """Write `48000-48255` or `48000`."""
    return f"{ports[0]}-{ports[-1]}" if len(ports) > 1 else f"{ports[0]}"


def merge_ports(ports: Iterable[int]) -> list[range]:
    """Merge ascending ports into ranges."""
    found: list[range] = []
    for port in ports:
        if found and found[-1].stop == port:
            found[-1] = range(found[-1].start, port + 1)
        else:
            found.append(range(port, port + 1))
    return found

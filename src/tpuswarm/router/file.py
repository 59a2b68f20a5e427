"""Read ROUTER.toml: who may connect, through which interfaces, and which ports lead where."""

import re
from ipaddress import IPv4Network, collapse_addresses
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, model_validator

from tpuswarm.config.toml_file import StrictTable, read_toml
from tpuswarm.errors import InputError
from tpuswarm.router.mapping import Mapping, Target, expand_targets, format_ports, merge_ports, parse_ports


def _check_interface(name: str) -> str:
    # Linux allows more, but nftables would read a * at the end as a pattern.
    if not re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name):
        raise ValueError(f"an interface name looks like eth0, with at most 15 characters, not {name!r}")
    return name


def _check_network(text: str) -> str:
    try:
        return str(IPv4Network(text))
    except ValueError as error:
        raise ValueError(f"a source is an IPv4 network such as 10.0.0.0/8 or an address: {error}") from None


Interface = Annotated[str, AfterValidator(_check_interface)]
Network = Annotated[str, AfterValidator(_check_network)]


class Range(StrictTable):
    """[[ranges]]: consecutive ports and their targets."""

    ports: str
    to: str

    def numbers(self) -> range:
        return parse_ports(self.ports)

    @model_validator(mode="after")
    def _check_target(self) -> "Range":
        expand_targets(self.numbers(), self.to)
        return self


class Single(StrictTable):
    """[[targets]]: one port and its target."""

    port: StrictInt
    to: str

    def numbers(self) -> range:
        return parse_ports(str(self.port))

    @model_validator(mode="after")
    def _check_target(self) -> "Single":
        expand_targets(self.numbers(), self.to)
        return self


class RouterFile(StrictTable):
    outside: Interface
    inside: Interface
    sources: Annotated[tuple[Network, ...], Field(min_length=1)]
    ranges: tuple[Range, ...] = ()
    targets: tuple[Single, ...] = ()

    def tables(self) -> dict[str, Range | Single]:
        """Return all tables by their names in errors, such as `ranges 2`."""
        named: dict[str, Range | Single] = {f"ranges {number}": table for number, table in enumerate(self.ranges, 1)}
        return named | {f"targets {number}": table for number, table in enumerate(self.targets, 1)}


def read_router(path: Path) -> tuple[RouterFile, Mapping]:
    """Read a file and its mapping; raise InputError for anything wrong in it."""
    file = read_toml(path, RouterFile)
    try:
        return file, make_mapping(file)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def make_mapping(file: RouterFile) -> Mapping:
    """Return the mapping of a file; raise InputError if it has no ports, or one twice."""
    tables = file.tables()
    if not tables:
        raise InputError("there is no [[ranges]] or [[targets]], so there is nothing to forward")
    owners: dict[int, str] = {}
    targets: dict[int, Target] = {}
    for name, table in tables.items():
        ports = table.numbers()
        if taken := [port for port in ports if port in owners]:
            owner = owners[taken[0]]
            shared = ", ".join(map(format_ports, merge_ports(port for port in taken if owners[port] == owner)))
            raise InputError(f"{owner} and {name} both have port {shared}: a port has one target")
        owners |= dict.fromkeys(ports, name)
        targets |= expand_targets(ports, table.to)
    networks = collapse_addresses(IPv4Network(source) for source in file.sources)
    return Mapping(
        file.outside, file.inside, tuple(map(str, networks)), {port: targets[port] for port in sorted(targets)}
    )

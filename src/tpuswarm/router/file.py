"""ROUTER.toml: who may connect, through which interfaces, and which ports lead where."""

import re
from ipaddress import IPv4Network, collapse_addresses
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, model_validator

from tpuswarm.config.toml_file import StrictTable, read_toml
from tpuswarm.errors import InputError
from tpuswarm.router.mapping import Mapping, Target, expand, in_a_row, parse_ports, show_ports


def _interface(name: str) -> str:
    # What Linux takes and nftables reads as a name: it would take a * at the end for any number of letters.
    if not re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name):
        raise ValueError(f"an interface name looks like eth0, with at most 15 characters, not {name!r}")
    return name


def _network(text: str) -> str:
    try:
        return str(IPv4Network(text))
    except ValueError as error:
        raise ValueError(f"a source is an IPv4 network such as 10.0.0.0/8 or an address: {error}") from None


Interface = Annotated[str, AfterValidator(_interface)]
Network = Annotated[str, AfterValidator(_network)]


class Range(StrictTable):
    """[[ranges]]: ports in a row and their targets, as `mapping.expand` reads them."""

    ports: str
    to: str

    def numbers(self) -> range:
        """The ports."""
        return parse_ports(self.ports)

    @model_validator(mode="after")
    def _fits(self) -> "Range":
        expand(self.numbers(), self.to)
        return self


class Single(StrictTable):
    """[[targets]]: one port and its target."""

    port: StrictInt
    to: str

    def numbers(self) -> range:
        """The port."""
        return parse_ports(str(self.port))

    @model_validator(mode="after")
    def _fits(self) -> "Single":
        expand(self.numbers(), self.to)
        return self


class RouterFile(StrictTable):
    """The whole file."""

    outside: Interface
    inside: Interface
    sources: Annotated[tuple[Network, ...], Field(min_length=1)]
    ranges: tuple[Range, ...] = ()
    targets: tuple[Single, ...] = ()

    def tables(self) -> dict[str, Range | Single]:
        """Its ranges and targets by their names in sentences, such as `ranges 2`."""
        named: dict[str, Range | Single] = {f"ranges {number}": each for number, each in enumerate(self.ranges, 1)}
        return named | {f"targets {number}": each for number, each in enumerate(self.targets, 1)}


def read_router(path: Path) -> tuple[RouterFile, Mapping]:
    """The file as it is written and what it means. Raises InputError, a sentence, for anything not right in it."""
    file = read_toml(path, RouterFile)
    try:
        return file, mapping(file)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def mapping(file: RouterFile) -> Mapping:
    """What the file means. Raises InputError where two of its tables have the same port, or where it has none."""
    tables = file.tables()
    if not tables:
        raise InputError("there is no [[ranges]] or [[targets]], so there is nothing to forward")
    owners: dict[int, str] = {}
    targets: dict[int, Target] = {}
    for name, each in tables.items():
        ports = each.numbers()
        if taken := [port for port in ports if port in owners]:
            owner = owners[taken[0]]
            shared = ", ".join(map(show_ports, in_a_row(port for port in taken if owners[port] == owner)))
            raise InputError(f"{owner} and {name} both have port {shared}: a port has one target")
        owners |= dict.fromkeys(ports, name)
        targets |= expand(ports, each.to)
    networks = collapse_addresses(IPv4Network(each) for each in file.sources)
    return Mapping(
        file.outside, file.inside, tuple(map(str, networks)), {port: targets[port] for port in sorted(targets)}
    )

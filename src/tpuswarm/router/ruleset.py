"""A mapping as the text that `nft -f` reads, and what `nft list table` prints as values again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpuswarm.router.mapping import Mapping, Target, in_a_row, show_ports

TABLE = "tpuswarm_router"
MARK = "made by tpuswarm router"
"""The comment of the table: one of its name without it is someone else's."""

ELEMENT = re.compile(r"(\d+) counter packets (\d+) bytes \d+ : (?:([\d.]+) \. )?(\d+)")
ELEMENTS = re.compile(r"\s*elements = \{[^}]*\}")
FORWARDING = re.compile(r"chain (\S+) \{\s*type filter hook forward [^}]*policy drop;")


def ruleset(mapping: Mapping) -> str:
    """One transaction that puts the table in the place of one that may be there, and touches no other.

    The look-up of a port is one in a hash table, by the first packet of a connection only: the kernel's record of
    connections translates all others, also when the table changes. It has to be a packet that opens a connection: when
    the kernel begins to keep records, any packet of an older connection, such as your own SSH, is a first one too.
    """
    remote = {port: target for port, target in mapping.targets.items() if target.address}
    own = {port: target for port, target in mapping.targets.items() if not target.address}
    new = f'iifname "{mapping.outside}" ip saddr @sources fib daddr type local tcp flags syn / fin,syn,rst,ack'
    elements = [f"{port} : {target.address} . {target.port}" for port, target in remote.items()]
    lines = [
        f"table ip {TABLE}",  # so that there is one to delete
        f"delete table ip {TABLE}",
        f"table ip {TABLE} {{",
        f'\tcomment "{MARK}"',
        *_block("set sources", "type ipv4_addr", "flags interval", elements=mapping.sources),
        *_block("set ports", "type inet_service", "flags interval", elements=map(show_ports, in_a_row(remote))),
        *_block("map targets", "type inet_service : ipv4_addr . inet_service", "counter", elements=elements),
    ]
    look_ups = [f"{new} dnat ip to tcp dport map @targets"]
    if own:
        elements = [f"{port} : {target.port}" for port, target in own.items()]
        lines += _block("map own", "type inet_service : inet_service", "counter", elements=elements)
        look_ups.append(f"{new} redirect to :tcp dport map @own")
    lines += _block("chain prerouting", "type nat hook prerouting priority dstnat; policy accept;", *look_ups)
    # Answers have to come back through the router. What others translate is left alone, unless it is the same port, for
    # the same sources, at the same interface.
    ours = "ct status dnat meta l4proto tcp ct original ip saddr @sources ct original proto-dst @ports"
    masquerade = f'iifname "{mapping.outside}" oifname "{mapping.inside}" {ours} masquerade'
    lines += _block("chain postrouting", "type nat hook postrouting priority srcnat; policy accept;", masquerade)
    return "\n".join([*lines, "}"]) + "\n"


def _block(name: str, *lines: str, elements: Iterable[str] = ()) -> list[str]:
    """An object of the table; every element has a line of its own."""
    if listed := [f"\t{each}," for each in elements]:
        lines = (*lines, "elements = {", *listed, "}")
    return ["", f"\t{name} {{", *(f"\t\t{line}" for line in lines), "\t}"]


@dataclass(frozen=True)
class Listing:
    """Our table as the kernel has it."""

    targets: dict[int, Target]
    attempts: dict[int, int]
    """By port: first packets since the table was made; one that is refused, or sent again, counts too."""
    rest: str
    """All but the elements of the maps, as nft prints it: the same as long as nobody touches the rules."""


def dropping(text: str) -> list[str]:
    """The chains, as `ip filter FORWARD`, that drop forwarded packets by their policy, from `nft list chains`."""
    found = []
    for table in re.split(r"^(?=table )", text, flags=re.MULTILINE):
        for name in FORWARDING.findall(table):
            found.append(f"{table.split()[1]} {table.split()[2]} {name}")
    return found


def is_ours(text: str) -> bool:
    """Whether a table, as `nft list table` prints it, bears our mark."""
    return f'comment "{MARK}"' in text


def parse_listing(text: str) -> Listing:
    """Our table as `nft list table` prints it."""
    found = list(ELEMENT.finditer(text))
    return Listing(
        {int(each[1]): Target(each[3], int(each[4])) for each in found},
        {int(each[1]): int(each[2]) for each in found},
        ELEMENTS.sub(lambda each: "" if ELEMENT.search(each[0]) else each[0], text),
    )

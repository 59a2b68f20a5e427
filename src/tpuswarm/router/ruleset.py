"""Write a mapping as input for `nft -f`, and parse what `nft list table` prints."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpuswarm.router.mapping import Mapping, Target, format_ports, merge_ports

TABLE = "tpuswarm_router"
MARK = "made by tpuswarm router"
"""Comment of the table; a table of this name without it belongs to someone else."""

ELEMENT = re.compile(r"(\d+) counter(?: packets (\d+) bytes \d+)? : (?:([\d.]+) \. )?(\d+)")
ELEMENTS = re.compile(r"\s*elements = \{[^}]*\}")
COUNTERS = re.compile(r" packets \d+ bytes \d+")
FORWARD_CHAIN = re.compile(r"chain (\S+) \{\s*type filter hook forward [^}]*policy drop;")


def ruleset(mapping: Mapping) -> str:
    """Return one transaction that replaces our table and touches no other.

    Only the first packet of a connection looks up its port; the kernel's connection table translates all others, also
    after the rules change. The rules match only packets that open a connection. Otherwise, when the kernel starts
    tracking, they would translate the next packet of any older connection, such as your own SSH.
    """
    remote = {port: target for port, target in mapping.targets.items() if target.address}
    own = {port: target for port, target in mapping.targets.items() if not target.address}
    new = f'iifname "{mapping.outside}" ip saddr @sources fib daddr type local tcp flags syn / fin,syn,rst,ack'
    elements = [f"{port} : {target.address} . {target.port}" for port, target in remote.items()]
    lines = [
        replace_table(),
        f"table ip {TABLE} {{",
        f'\tcomment "{MARK}"',
        *_block("set sources", "type ipv4_addr", "flags interval", elements=mapping.sources),
        *_block("set ports", "type inet_service", "flags interval", elements=map(format_ports, merge_ports(remote))),
        *_block("map targets", "type inet_service : ipv4_addr . inet_service", "counter", elements=elements),
    ]
    look_ups = [f"{new} dnat ip to tcp dport map @targets"]
    if own:
        elements = [f"{port} : {target.port}" for port, target in own.items()]
        lines += _block("map own", "type inet_service : inet_service", "counter", elements=elements)
        look_ups.append(f"{new} redirect to :tcp dport map @own")
    lines += _block("chain prerouting", "type nat hook prerouting priority dstnat; policy accept;", *look_ups)
    # Masquerading brings answers back through the router. It leaves connections that others translate alone, unless
    # they use the same port, sources and interface.
    ours = "ct status dnat meta l4proto tcp ct original ip saddr @sources ct original proto-dst @ports"
    masquerade = f'iifname "{mapping.outside}" oifname "{mapping.inside}" {ours} masquerade'
    lines += _block("chain postrouting", "type nat hook postrouting priority srcnat; policy accept;", masquerade)
    return "\n".join([*lines, "}"]) + "\n"


def replace_table() -> str:
    """Return the commands that delete our table whether or not it exists."""
    return f"table ip {TABLE}\ndelete table ip {TABLE}"


def _block(name: str, *lines: str, elements: Iterable[str] = ()) -> list[str]:
    if listed := [f"\t{element}," for element in elements]:
        lines = (*lines, "elements = {", *listed, "}")
    return ["", f"\t{name} {{", *(f"\t\t{line}" for line in lines), "\t}"]


@dataclass(frozen=True)
class Listing:
    """Our table as nft prints it."""

    text: str
    """Without counters."""
    targets: dict[int, Target]
    attempts: dict[int, int]
    """First packets by port since the rules were loaded, including refused and repeated ones."""
    rest: str
    """All but the elements of the maps."""


def parse_listing(text: str) -> Listing:
    """Parse the output of `nft list table`."""
    elements = list(ELEMENT.finditer(text))
    return Listing(
        COUNTERS.sub("", text),
        {int(element[1]): Target(element[3], int(element[4])) for element in elements},
        {int(element[1]): int(element[2] or 0) for element in elements},
        ELEMENTS.sub(lambda found: "" if ELEMENT.search(found[0]) else found[0], text),
    )


def is_ours(text: str) -> bool:
    """Return whether a printed table has our mark."""
    return f'comment "{MARK}"' in text


def dropping_chains(text: str) -> list[str]:
    """Return chains such as `ip filter FORWARD` that drop forwarded packets by policy, from `nft list chains`."""
    found = []
    for table in re.split(r"^(?=table )", text, flags=re.MULTILINE):
        for name in FORWARD_CHAIN.findall(table):
            found.append(f"{table.split()[1]} {table.split()[2]} {name}")
    return found

"""What the kernel says of connections, read: the files /proc/net/nf_conntrack and /proc/net/tcp."""

import re
from collections import Counter

from tpuswarm.router.mapping import Target

LISTEN = "0A"
LOOPBACK = re.compile(r"[0-9A-F]{6}7F:|0{24}01000000:")
"""127.0.0.0/8 and ::1, with the bytes of each word in a PC's order."""
OPEN = re.compile(
    r"^ipv4 .* ESTABLISHED src=\S+ dst=(?P<door>\S+) sport=\d+ dport=(?P<port>\d+) .*?"
    r"\bsrc=(?P<address>\S+) dst=\S+ sport=(?P<to>\d+) ",
    re.MULTILINE,
)


def open_connections(text: str) -> Counter[tuple[int, Target]]:
    """How many established connections came to a port and were translated to a target, from nf_conntrack's lines."""
    found: Counter[tuple[int, Target]] = Counter()
    for each in OPEN.finditer(text):
        target = Target(None if each["address"] == each["door"] else each["address"], int(each["to"]))
        if target != (None, int(each["port"])):
            found[int(each["port"]), target] += 1
    return found


def listening_ports(text: str) -> set[int]:
    """The ports at which this machine listens for others, from the lines of /proc/net/tcp and tcp6."""
    found = set()
    for fields in map(str.split, text.splitlines()):
        if len(fields) > 3 and fields[3] == LISTEN and not LOOPBACK.match(fields[1]):
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found

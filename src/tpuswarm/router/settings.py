"""What to set on a router's host beside its rules. A setting is a file with a text, a kernel's or a system's own."""

import sys
from pathlib import Path
from typing import NamedTuple

from tpuswarm.router.mapping import Mapping

KERNEL = ("/proc/", "/sys/")
"""Where the files are not the system's but the kernel's."""
SYSCTL = "/proc/sys/net"
LIMITS = "/etc/security/limits.d/tpuswarm-router.conf"
UNIT = "/etc/systemd/system/tpuswarm-router.service"
ENABLED = "/etc/systemd/system/multi-user.target.wants/tpuswarm-router.service"
"""A link to the unit: what `systemctl enable` makes."""

OPEN_FILES = 1_048_576
"""The kernel's own limit for one process (fs.nr_open), unless it was lowered; above it nobody could log in any more."""
BUFFER = 128 * 2**20
BACKLOG = 100_000
LISTEN = 65_535
QUEUE = 100_000


class Setting(NamedTuple):
    """The text that a file should have."""

    path: str
    value: str


def forwarding(mapping: Mapping) -> tuple[Setting, ...]:
    """Needed for any target but the router's own ports.

    For the two interfaces only: switching it on for all of them resets other settings of the kernel.
    """
    return tuple(Setting(f"{SYSCTL}/ipv4/conf/{each}/forwarding", "1") for each in _interfaces(mapping))


def tuning(mapping: Mapping, open_files: int = OPEN_FILES) -> tuple[Setting, ...]:
    """What `--tune` sets: forwarding, and room for bursts of packets and for connections that end on this host."""
    # Where packets leave as they came, the router would tell machines to pass it by. The kernel sends that if either
    # of the two says so (ip-sysctl.txt, send_redirects).
    one_armed = ("all", mapping.outside) if mapping.outside == mapping.inside else ()
    return (
        *forwarding(mapping),
        *(Setting(f"{SYSCTL}/ipv4/conf/{each}/send_redirects", "0") for each in one_armed),
        *ends(),
        *(Setting(f"/sys/class/net/{each}/tx_queue_len", str(QUEUE)) for each in _interfaces(mapping)),
        Setting(LIMITS, f"* - nofile {open_files}"),
    )


def ends() -> tuple[Setting, ...]:
    """Room for connections that begin or end on a host, a router or one behind it."""
    return (
        Setting(f"{SYSCTL}/ipv4/tcp_congestion_control", "bbr"),
        Setting(f"{SYSCTL}/core/somaxconn", str(LISTEN)),
        Setting(f"{SYSCTL}/core/netdev_max_backlog", str(BACKLOG)),
        Setting(f"{SYSCTL}/core/rmem_max", str(BUFFER)),
        Setting(f"{SYSCTL}/core/wmem_max", str(BUFFER)),
        Setting(f"{SYSCTL}/ipv4/tcp_rmem", f"4096 131072 {BUFFER}"),  # TCP heeds the third, not rmem_max
        Setting(f"{SYSCTL}/ipv4/tcp_wmem", f"4096 16384 {BUFFER}"),
    )


def at_boot(file: Path, tune: bool) -> tuple[Setting, ...]:
    """What `--persist` sets: a systemd unit that applies `file`, absolute, and the link that enables it."""
    words = [sys.executable, "-m", "tpuswarm", "router", "apply", str(file), *(["--tune"] if tune else [])]
    unit = f"""\
[Unit]
Description=Router of {_unit_text(str(file))}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=oneshot
RemainAfterExit=yes
Restart=on-failure
RestartSec=5
ExecStart={" ".join(map(_unit_word, words))}

[Install]
WantedBy=multi-user.target"""
    return Setting(UNIT, unit), Setting(ENABLED, UNIT)


def _interfaces(mapping: Mapping) -> tuple[str, ...]:
    return tuple(dict.fromkeys((mapping.outside, mapping.inside)))


def _unit_text(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _unit_word(word: str) -> str:
    """A word of a command line as systemd reads it (systemd.service(5), "Command lines")."""
    if not set(word) & set(" \t\"'\\;$%"):
        return word
    for mark, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(mark, written)
    return f'"{word}"'

"""List the kernel settings of a router and the systemd unit that loads its rules at boot."""

from typing import NamedTuple

from tpuswarm.router.mapping import Mapping

BUFFER_BYTES = 128 * 2**20
RECEIVE_QUEUE_PACKETS = 100_000
ACCEPT_QUEUE_LIMIT = 65_535
OPEN_FILES = 1_048_576
"""As many as the kernel allows by default (fs.nr_open)."""


class Setting(NamedTuple):
    """A kernel setting by its name in sysctl.d(5)."""

    name: str
    value: str

    @property
    def path(self) -> str:
        """The kernel's file of this setting."""
        return "/proc/sys/" + (self.name if "/" in self.name else self.name.replace(".", "/"))


def forwarding(mapping: Mapping) -> tuple[Setting, ...]:
    """Return the settings that every router needs.

    They cover two interfaces only: turning on forwarding for all of them resets other settings of the kernel.
    """
    interfaces = dict.fromkeys((mapping.outside, mapping.inside))
    return tuple(Setting(f"net/ipv4/conf/{name}/forwarding", "1") for name in interfaces)


def tuning(mapping: Mapping) -> tuple[Setting, ...]:
    """Return the settings of `--tune`: forwarding, no redirects, and room for bursts and long connections."""
    # A router with one interface would tell its clients to bypass it. The kernel sends such redirects if either "all"
    # or the interface allows them (ip-sysctl.txt, send_redirects).
    single = ("all", mapping.outside) if mapping.outside == mapping.inside else ()
    redirects = tuple(Setting(f"net/ipv4/conf/{name}/send_redirects", "0") for name in single)
    return (*forwarding(mapping), *redirects, *endpoint_settings())


def endpoint_settings() -> tuple[Setting, ...]:
    """Return the settings of a host at either end of a connection."""
    return (
        Setting("net.ipv4.tcp_congestion_control", "bbr"),
        Setting("net.ipv4.tcp_tw_reuse", "1"),  # a client soon opens a connection again to the same port
        Setting("net.core.somaxconn", str(ACCEPT_QUEUE_LIMIT)),
        Setting("net.core.netdev_max_backlog", str(RECEIVE_QUEUE_PACKETS)),
        Setting("net.core.rmem_max", str(BUFFER_BYTES)),
        Setting("net.core.wmem_max", str(BUFFER_BYTES)),
        Setting("net.ipv4.tcp_rmem", f"4096 131072 {BUFFER_BYTES}"),  # TCP ignores rmem_max and uses the third
        Setting("net.ipv4.tcp_wmem", f"4096 16384 {BUFFER_BYTES}"),
    )


def sysctl_file(settings: tuple[Setting, ...]) -> str:
    """Write settings as a file of sysctl.d."""
    return "".join(f"{name} = {value}\n" for name, value in settings)


def limits_file() -> str:
    """Write a file of limits.d that lets every user open as many sockets as a client needs."""
    return "".join(f"{who} {kind} nofile {OPEN_FILES}\n" for who in ("*", "root") for kind in ("soft", "hard"))


def unit_file(nft: str, rules: str) -> str:
    """Write the systemd unit that loads the file `rules` at boot."""
    return f"""\
[Unit]
Description=Port forwarding of tpuswarm router
Wants=network-pre.target
Before=network-pre.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={nft} -f {rules}

[Install]
WantedBy=multi-user.target
"""

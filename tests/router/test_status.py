"""Parsing, settings and drift, without a machine."""

from dataclasses import replace

import pytest

from tpuswarm.router.apply import Applied, digest
from tpuswarm.router.machine import parse_listening_ports
from tpuswarm.router.mapping import Mapping, Target
from tpuswarm.router.ruleset import dropping_chains, parse_listing, ruleset
from tpuswarm.router.settings import Setting, sysctl_file, tuning, unit_file
from tpuswarm.router.status import count_connections, count_traffic, rule_drift

TABLE = """table ip tpuswarm_router {
	comment "made by tpuswarm router"
	set sources {
		type ipv4_addr
		flags interval
		elements = { 10.0.0.0/8 }
	}

	map targets {
		type inet_service : ipv4_addr . inet_service
		counter
		elements = { 80 counter packets %d bytes 180 : 10.0.0.2 . 8080,
				82 counter packets 0 bytes 0 : 10.0.0.3 . 8080 }
	}

	map own {
		type inet_service : inet_service
		counter
		elements = { 81 counter packets 1 bytes 60 : 9090 }
	}
"""
LISTING = parse_listing(TABLE % 3)
MAPPING = Mapping("eth0", "eth1", ("10.0.0.0/8",), dict(sorted(LISTING.targets.items())))
APPLIED = Applied("/etc/router.toml", digest(ruleset(MAPPING)), LISTING)
CONNTRACK = """\
ipv4     2 tcp      6 431999 ESTABLISHED src=10.1.0.2 dst=10.1.0.1 sport=5000 dport=80 \
src=10.0.0.2 dst=10.9.0.1 sport=8080 dport=5000 [ASSURED] mark=0 zone=0 use=2
ipv4     2 tcp      6 431999 ESTABLISHED src=10.1.0.2 dst=10.1.0.1 sport=5001 dport=80 packets=3 bytes=164 \
src=10.0.0.7 dst=10.9.0.1 sport=8080 dport=5001 packets=1 bytes=60 [ASSURED] mark=0 zone=0 use=2
ipv4     2 tcp      6 431999 ESTABLISHED src=10.1.0.2 dst=10.1.0.1 sport=5002 dport=81 \
src=10.1.0.1 dst=10.1.0.2 sport=9090 dport=5002 [ASSURED] mark=0 zone=0 use=2
ipv4     2 tcp      6 431999 ESTABLISHED src=10.1.0.2 dst=10.1.0.1 sport=5003 dport=22 \
src=10.1.0.1 dst=10.1.0.2 sport=22 dport=5003 [ASSURED] mark=0 zone=0 use=2
ipv4     2 tcp      6 118 TIME_WAIT src=10.1.0.2 dst=10.1.0.1 sport=5004 dport=80 \
src=10.0.0.2 dst=10.9.0.1 sport=8080 dport=5004 [ASSURED] mark=0 zone=0 use=2
ipv4     2 udp      17 29 src=10.1.0.2 dst=10.1.0.1 sport=5005 dport=80 src=10.1.0.1 dst=10.1.0.2 sport=80 dport=5005
"""


def test_output_of_nft_is_parsed_and_compared_without_counters():
    assert LISTING.targets == {80: Target("10.0.0.2", 8080), 82: Target("10.0.0.3", 8080), 81: Target(None, 9090)}
    assert LISTING.attempts == {80: 3, 82: 0, 81: 1}
    again = parse_listing(TABLE % 99)
    assert (again.text, again.rest) == (LISTING.text, LISTING.rest) and "10.0.0.0/8" in LISTING.rest
    assert parse_listing(LISTING.text).targets == LISTING.targets
    assert parse_listing(TABLE.replace("10.0.0.0/8", "11.0.0.0/8") % 3).rest != LISTING.rest


def test_chains_that_drop_forwarded_packets_are_found():
    text = """# Warning: table ip filter is managed by iptables-nft, do not touch!
table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy drop;
	}
	chain FORWARD {
		type filter hook forward priority filter; policy drop;
	}
}
table inet fire {
	chain other {
	}
	chain between {
		type filter hook forward priority filter + 10; policy accept;
	}
	chain inside {
		type filter hook forward priority filter; policy drop;
	}
}
"""
    assert dropping_chains(text) == ["ip filter FORWARD", "inet fire inside"]


def test_open_connections_are_counted_by_target():
    found = count_connections(CONNTRACK)
    assert found == {
        (80, Target("10.0.0.2", 8080)): 1,
        (80, Target("10.0.0.7", 8080)): 1,
        (81, Target(None, 9090)): 1,
    }
    rows, to_old_targets = count_traffic(LISTING, found)
    assert [(row.port, row.to, row.attempts, row.open) for row in rows] == [
        (80, "10.0.0.2:8080", 3, 1), (81, ":9090", 1, 1), (82, "10.0.0.3:8080", 0, 0),
    ]  # fmt: skip
    assert to_old_targets == 1


def test_listening_ports_are_parsed():
    text = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0 3 1
"""
    assert parse_listening_ports(text) == {22, 80}


def test_settings_are_a_sysctl_file_and_the_unit_loads_the_rules():
    """A dot in an interface name is no separator."""
    settings = tuning(replace(MAPPING, outside="eth0.100", inside="eth0.100"))
    assert settings[0].path == "/proc/sys/net/ipv4/conf/eth0.100/forwarding"
    assert Setting("net.core.somaxconn", "1").path == "/proc/sys/net/core/somaxconn"
    text = sysctl_file(settings)
    assert "net/ipv4/conf/eth0.100/send_redirects = 0\n" in text and "net.core.somaxconn = 65535\n" in text
    assert "ExecStart=/usr/sbin/nft -f /etc/r.nft\n" in unit_file("/usr/sbin/nft", "/etc/r.nft")


def with_ports(*ports: int) -> Mapping:
    return replace(MAPPING, targets=MAPPING.targets | dict.fromkeys(ports, Target("10.0.0.9", 1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"listing": None}, "the kernel has no rules"),
        ({"applied": None}, "/etc/tpuswarm-router.nft is missing: apply again"),
        ({"listing": replace(LISTING, rest="x")}, "someone changed the rules in the kernel"),
        ({"mapping": "there is no file /etc/router.toml"}, "there is no file /etc/router.toml"),
        ({"mapping": replace(MAPPING, sources=("10.0.0.0/9",))}, "in /etc/router.toml changed since the last apply"),
        ({"mapping": with_ports(90, 91)}, "in /etc/router.toml, not in the kernel: 2 ports (90-91)"),
        (
            {"listing": replace(LISTING, targets=with_ports(90).targets)},
            "in the kernel, not in /etc/router.toml: 1 port (90)",
        ),
        ({"mapping": with_ports(80)}, "1 port (80); 80 goes to 10.0.0.2:8080, not 10.0.0.9:1"),
    ],
)
def test_drift_is_one_sentence(change, words):
    same = {"applied": APPLIED, "listing": LISTING, "mapping": MAPPING}
    assert rule_drift(**same) == rule_drift(None, None, "") == []
    [sentence] = rule_drift(**same | change)
    assert words in sentence

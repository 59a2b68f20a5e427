"""Plans, status and parsing, without a machine."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.router.mapping import Mapping, Target
from tpuswarm.router.plan import Asked, Change, plan, restoring, same, undo
from tpuswarm.router.record import KeptSetting, Record, parse_record
from tpuswarm.router.ruleset import Listing, dropping, parse_listing, ruleset
from tpuswarm.router.settings import ENABLED, LIMITS, UNIT, at_boot, tuning
from tpuswarm.router.sockets import listening_ports, open_connections
from tpuswarm.router.status import status

MAPPING = Mapping("eth0", "eth1", ("10.0.0.0/8",), {80: Target("10.0.0.2", 8080), 81: Target(None, 9090)})
ASKED = Asked(Path("/etc/router.toml"), MAPPING, tune=True, persist=False)
LISTING = Listing(MAPPING.targets, {80: 3, 81: 0}, "rules")
BEFORE = {path: None if path == LIMITS else "7\n" for path, _ in tuning(MAPPING)}
AFTER = {path: value if path == LIMITS else f"{value}\n" for path, value in tuning(MAPPING)}


def applied(asked: Asked = ASKED, values=BEFORE) -> Record:
    return plan(asked, None, values, None).record.model_copy(update={"rest": "rules"})


def test_first_plan_changes_everything():
    planned = plan(ASKED, None, BEFORE, None)
    assert [(change.path, change.now, change.then) for change in planned.changes] == [
        (path, BEFORE[path], value) for path, value in tuning(MAPPING)
    ]
    assert planned.ruleset == ruleset(MAPPING) and planned.record.rest is None
    assert planned.steps()[-1] == "nft: table ip tpuswarm_router, 2 ports, in one transaction"


def test_second_plan_changes_nothing():
    again = plan(ASKED, LISTING, AFTER, applied())
    assert not again.steps() and again.record == applied()


@pytest.mark.parametrize(
    ("listing", "record"),
    [
        (None, applied()),
        (replace(LISTING, rest="other rules"), applied()),
        (replace(LISTING, targets={80: Target("10.0.0.2", 8080)}), applied()),
        (LISTING, None),
        (LISTING, applied().model_copy(update={"rest": None})),  # a kill before the end
        (LISTING, applied().model_copy(update={"ruleset": "of another mapping"})),
    ],
)
def test_rules_that_differ_from_the_record_are_applied_again(listing, record):
    assert plan(ASKED, listing, AFTER, record).ruleset == ruleset(MAPPING)


def test_original_values_stay_recorded_after_kills_and_reboots():
    first = applied()
    old = {setting.path: setting.old for setting in first.settings}
    assert old == BEFORE
    for values in (
        AFTER,  # applied again
        BEFORE,  # killed before any change, or the machine was started again
        {path: (BEFORE if number % 2 else AFTER)[path] for number, path in enumerate(BEFORE)},  # killed half-way
    ):
        assert plan(ASKED, None, values, first).record.settings == first.settings
    changed = BEFORE | {tuning(MAPPING)[3].path: "8\n"}  # by someone else, since
    assert dict(old, **{tuning(MAPPING)[3].path: "8\n"}) == {
        setting.path: setting.old for setting in plan(ASKED, None, changed, first).record.settings
    }


def test_settings_with_the_right_value_are_not_recorded():
    planned = plan(ASKED, None, AFTER, None)
    assert not planned.changes and not planned.record.settings


def test_settings_of_another_interface_stay_recorded():
    other = replace(ASKED, mapping=replace(MAPPING, inside="eth2"))
    values = AFTER | {path: "7\n" for path, _ in tuning(other.mapping) if "eth2" in path}
    paths = [setting.path for setting in plan(other, LISTING, values, applied()).record.settings]
    assert len(paths) == len(set(paths)) == len(BEFORE) + 2


def test_removal_restores_in_reverse_order():
    changes, foreign = restoring(applied(), AFTER)
    assert not foreign and [(change.path, change.then) for change in changes] == list(reversed(BEFORE.items()))
    assert restoring(applied(), BEFORE) == ((), ())


def test_removal_leaves_settings_of_others_alone():
    path = tuning(MAPPING)[3].path
    changes, foreign = restoring(applied(), AFTER | {path: "8\n"})
    assert [change.path for change in foreign] == [path] and path not in [change.path for change in changes]


def test_ports_of_earlier_mappings_stay_recorded():
    smaller = replace(ASKED, mapping=replace(MAPPING, targets={90: Target("10.0.0.2", 8080)}))
    planned = plan(smaller, LISTING, AFTER, applied())
    assert applied().ports == ("80-81",) and planned.record.ports == ("80-81", "90")


def test_limit_of_open_files_is_at_most_the_kernels():
    """A login under a limit above fs.nr_open fails."""
    assert plan(replace(ASKED, open_files=4096), None, BEFORE, None).record.settings[-1].new == "* - nofile 4096"


def test_commands_that_undo_an_apply():
    settings = KeptSetting(path="/a b", old="1\t2\n", new="3"), KeptSetting(path=UNIT, old=None, new="x")
    assert undo(applied().model_copy(update={"settings": settings})) == [
        "nft delete table ip tpuswarm_router", f"rm {UNIT}", "echo '1\t2' > '/a b'", "systemctl daemon-reload"
    ]  # fmt: skip


def test_step_of_a_long_file_names_only_the_file():
    assert str(Change(LIMITS, "a\n", "b")) == f"{LIMITS}: a -> b"
    assert str(Change(UNIT, "[Unit]\n[Service]\n", "[Unit]\n")) == f"rewrite {UNIT}"


def test_kernel_values_are_compared_without_regard_to_blanks():
    assert same("4096\t131072\t6291456\n", "4096 131072 6291456") and same(None, None)
    assert not same(None, "") and not same("1", "2")


def test_damaged_record_is_reported():
    with pytest.raises(InputError, match=r"router\.json is damaged .* apply again"):
        parse_record("router.json", applied().model_dump_json()[:50])


def test_unit_applies_the_file_at_boot():
    unit, link = at_boot(Path('/srv/50% "a $b/router.toml'), tune=True)
    assert unit.path == UNIT and link == (ENABLED, UNIT)
    assert "Type=oneshot" in unit.value and "WantedBy=multi-user.target" in unit.value
    assert ' -m tpuswarm router apply "/srv/50%% \\"a $$b/router.toml" --tune\n' in unit.value
    # No interface yet, or another apply at work: systemd tries again until it is done, and never gives up.
    assert {"StartLimitIntervalSec=0", "Restart=on-failure", "RestartSec=5"} < set(unit.value.splitlines())
    assert unit.value.index("StartLimit") < unit.value.index("[Service]") < unit.value.index("Restart")
    assert "--tune" not in at_boot(Path("/router.toml"), tune=False)[0].value


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


def test_output_of_nft_is_parsed():
    listing = parse_listing(TABLE % 3)
    assert listing.targets == {80: Target("10.0.0.2", 8080), 82: Target("10.0.0.3", 8080), 81: Target(None, 9090)}
    assert listing.attempts == {80: 3, 82: 0, 81: 1}
    assert listing.rest == parse_listing(TABLE % 99).rest and "10.0.0.0/8" in listing.rest
    assert parse_listing(TABLE.replace("10.0.0.0/8", "11.0.0.0/8") % 3).rest != listing.rest


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
    assert dropping(text) == ["ip filter FORWARD", "inet fire inside"]


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


def test_open_connections_are_counted_by_target():
    assert open_connections(CONNTRACK) == {
        (80, Target("10.0.0.2", 8080)): 1,
        (80, Target("10.0.0.7", 8080)): 1,
        (81, Target(None, 9090)): 1,
    }


def test_listening_ports_are_parsed():
    text = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0 3 1
"""
    assert listening_ports(text) == {22, 80}


def test_status_counts_attempts_and_connections():
    found = status(applied(), LISTING, MAPPING, AFTER, open_connections(CONNTRACK), (9, 100))
    rows = [(row.port, row.to, row.attempts, row.open) for row in found.rows]
    assert rows == [(80, "10.0.0.2:8080", 3, 1), (81, ":9090", 0, 1)]
    assert found.kept == 1 and found.followed == (9, 100) and not found.drift
    without_80 = Listing({81: Target(None, 9090)}, {81: 0}, "rules")
    assert status(applied(), without_80, MAPPING, AFTER, open_connections(CONNTRACK), None).kept == 2
    assert status(None, None, "", {}, Counter(), None).drift == ()


def with_ports(*ports: int) -> Mapping:
    return replace(MAPPING, targets=MAPPING.targets | dict.fromkeys(ports, Target("10.0.0.9", 1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"listing": None}, "the kernel has no rules"),
        ({"record": None}, "the record of settings is gone"),
        ({"record": applied().model_copy(update={"rest": None})}, "the last apply did not finish"),
        ({"listing": replace(LISTING, rest="x")}, "someone changed the rules in the kernel"),
        ({"asked": "there is no file /etc/router.toml"}, "there is no file /etc/router.toml"),
        ({"asked": replace(MAPPING, sources=("10.0.0.0/9",))}, "in /etc/router.toml changed since the last apply"),
        ({"asked": with_ports(90, 91)}, "in /etc/router.toml, not in the kernel: 2 ports (90-91)"),
        (
            {"listing": Listing(with_ports(90).targets, dict.fromkeys((80, 81, 90), 0), "rules")},
            "in the kernel, not in /etc/router.toml: 1 port (90)",
        ),
        ({"asked": with_ports(80)}, "1 port (80); 80 goes to 10.0.0.2:8080, not 10.0.0.9:1"),
        ({"values": AFTER | {LIMITS: None}}, f"{LIMITS} is gone: apply again"),
        ({"values": AFTER | {LIMITS: "x\n"}}, f"{LIMITS} is x, not * - nofile 1048576: apply again"),
        ({"values": AFTER | {LIMITS: "x\ny\n"}}, f"{LIMITS} was changed: apply again"),
    ],
)
def test_status_reports_each_drift(change, words):
    there = {"record": applied(), "listing": LISTING, "asked": MAPPING, "values": AFTER} | change
    [sentence] = status(**there, open_now=None, followed=None).drift
    assert words in sentence

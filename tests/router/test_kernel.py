"""Real packets through a real kernel: a client, a router and 256 targets in network namespaces."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.router.lab import ROUTER, STRANGER, TARGETS, identify

pytestmark = pytest.mark.slow
UNIT = "/etc/systemd/system/tpuswarm-router.service"
RULES = "/etc/tpuswarm-router.nft"
SYSCTL = "/etc/sysctl.d/60-tpuswarm-router.conf"
OTHER_RULES = """
table inet others {
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport 9 drop
	}
}
table ip nat {
	chain PREROUTING {
		type nat hook prerouting priority dstnat; policy accept;
		tcp dport 47000 dnat to 10.48.0.9:8470
	}
}
"""
DROPPING_RULES = """
table inet fire {
	chain in.side {
		type filter hook forward priority filter; policy drop;
	}
	chain input {
		type filter hook input priority filter; policy accept;
	}
}
"""
REPLACE_NFT = """
nft=$(command -v nft)
cp $nft /run/nft
printf '#!/bin/sh\n%s\n' '{}' > /run/replacement
chmod +x /run/replacement
mount --bind /run/replacement $nft
"""
REFUSE_RULES = REPLACE_NFT.format("""
[ "$1" = -f ] || exec /run/nft "$@"
echo "Error: Could not process rule: No such file or directory" >&2
exit 1
""")


def write(path: Path, network: int = 48, more: str = "") -> str:
    """Write a file with 256 targets and one port of the router itself."""
    path.write_text(f"""
outside = "eth0"
inside = "eth1"
sources = ["10.1.0.2"]

[[ranges]]
ports = "48000-48255"
to = "10.{network}.{{i}}.2:8470"

[[targets]]
port = 5002
to = ":5001"
{more}""")
    return str(path)


def load(lab, rules: str) -> None:
    lab.router.sh(f"nft -f - <<'END'\n{rules}END")


def test_each_port_reaches_its_target_and_other_sources_none(lab, tmp_path):
    out = lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune")
    assert "nft: table ip tpuswarm_router, 257 ports, in one transaction" in out
    assert [lab.target(48000 + i) for i in range(TARGETS)] == [f"10.48.{i}.2:8470" for i in range(TARGETS)]
    assert lab.target(5002) == f"{ROUTER}:5001"
    for port in (48000, 48255, 5002):
        with pytest.raises(ConnectionRefusedError):
            lab.connect(port, STRANGER)
    with pytest.raises(ConnectionRefusedError):
        lab.connect(48256)
    # Packets that are not for the router's own address are forwarded unchanged.
    lab.client.sh(f"ip route add 10.48.0.0/16 via {ROUTER}")
    lab.targets.sh("ip route add 10.1.0.0/24 via 10.9.0.1")
    with pytest.raises(ConnectionRefusedError):
        lab.connect(48004, address="10.48.3.2")
    with lab.connect(8470, address="10.48.3.2") as direct:
        assert identify(direct) == "10.48.3.2:8470"


def test_open_connections_survive_a_new_mapping(lab, tmp_path):
    file = Path(write(tmp_path / "r.toml"))
    lab.tpuswarm("apply", str(file), "--tune")
    with lab.connect(48007) as first, lab.connect(48008) as second, lab.connect(5002) as own:
        before = [identify(connection) for connection in (first, second, own)]
        assert before == ["10.48.7.2:8470", "10.48.8.2:8470", f"{ROUTER}:5001"]
        lab.tpuswarm("apply", write(file, 49))
        assert lab.target(48007) == "10.49.7.2:8470"
        assert [identify(connection) for connection in (first, second, own)] == before
        assert "1 open, 2 open to old targets" in lab.tpuswarm("status")
        text = file.read_text()
        file.write_text(text[: text.index("[[targets]]")])
        lab.tpuswarm("apply", str(file))  # port 5002 is no longer forwarded
        assert "0 open, 2 open to old targets" in lab.tpuswarm("status")
        lab.tpuswarm("remove")
        with pytest.raises(ConnectionResetError):  # no rule translates it now
            identify(first)


def test_apply_warns_of_dropping_chains_and_ports_in_use(lab, tmp_path):
    file = write(tmp_path / "r.toml", more='[[targets]]\nport = 5001\nto = "10.48.0.2:8470"\n')
    load(lab, DROPPING_RULES)
    lab.router.sh("iptables -P FORWARD DROP")
    ways_out = ["nft insert rule inet fire in.side ct status dnat accept"]
    ways_out += ["iptables -I FORWARD -m conntrack --ctstate DNAT -j ACCEPT"]
    with lab.connect(5001) as open_before:
        for words in (["--dry-run"], []):
            _, err = lab.start("apply", file, *words).communicate()
            assert "until this host forwards packets: /proc/sys/net/ipv4/conf/eth0/forwarding" in err
            assert "note: this host itself listens on 5001" in err and err.count("drops packets by default") == 2
            assert all(line in err for line in ways_out)
        assert identify(open_before) == f"{ROUTER}:5001"  # such as a person's SSH connection
    lab.router.sh(f"echo 1 > /proc/sys/net/ipv4/ip_forward; {'; '.join(ways_out)}; iptables -S")
    assert lab.target(5001) == "10.48.0.2:8470" and lab.target(48009) == "10.48.9.2:8470"
    assert "drops packets by default" not in lab.start("apply", file, "--dry-run").communicate()[1]


def test_translations_of_others_are_not_masqueraded(lab, tmp_path):
    load(lab, OTHER_RULES.replace("47000", "48007"))
    lab.targets.sh("ip route add 10.1.0.0/24 via 10.9.0.1")
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune")
    with lab.connect(48007, STRANGER) as theirs, lab.connect(48008) as ours:
        assert [identify(theirs), identify(ours)] == ["10.48.0.9:8470", "10.48.8.2:8470"]
        connections = lab.router.sh("cat /proc/net/nf_conntrack")
    assert f"src=10.48.0.9 dst={STRANGER} " in connections and "src=10.48.8.2 dst=10.9.0.1 " in connections


def test_open_connections_survive_removal_if_others_translate_too(lab, tmp_path):
    load(lab, OTHER_RULES)
    lab.router.sh("echo 1 > /proc/sys/net/ipv4/ip_forward")
    file = Path(write(tmp_path / "r.toml"))
    lab.tpuswarm("apply", str(file))
    with lab.connect(48007) as open_before:
        file.write_text(file.read_text().replace("10.1.0.2", "10.1.0.9"))
        lab.tpuswarm("apply", str(file))
        with pytest.raises(ConnectionRefusedError):
            lab.connect(48007)
        assert identify(open_before) == "10.48.7.2:8470"
        lab.tpuswarm("remove")
        assert identify(open_before) == "10.48.7.2:8470"


def test_one_interface_sends_no_redirects(lab, tmp_path):
    """Only the router can translate, so it must not tell clients a shorter route."""
    lab.router.sh("ip route replace 10.48.0.0/16 via 10.1.0.2 dev eth0")
    lab.client.sh("ip route add local 10.48.0.0/16 dev lo")
    lab.serve(lab.client, 8470)
    file = Path(write(tmp_path / "r.toml"))
    file.write_text(file.read_text().replace("eth1", "eth0"))
    lab.tpuswarm("apply", str(file), "--tune")
    assert [lab.target(48000 + i) for i in range(4)] == [f"10.48.{i}.2:8470" for i in range(4)]
    names, counts = (line.split() for line in lab.router.sh("grep Icmp: /proc/net/snmp").splitlines())
    assert counts[names.index("OutRedirects")] == "0"


def test_second_apply_changes_nothing(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    apply = f"{sys.executable} -m tpuswarm router apply"
    lab.router.sh(f"umask 077; {apply} {file} --tune --persist")
    modes = lab.router.sh(f"stat -c %a {RULES} {SYSCTL} {UNIT}")
    assert modes.split() == ["644"] * 3  # a dry run without root reads them
    lab.target(48001)

    def state() -> tuple[str, ...]:
        return lab.router.sh(f"nft -a list ruleset; ls -l --full-time {RULES} {SYSCTL} {UNIT}"), lab.settings()

    before = state()
    assert "counter packets 1 " in before[0]
    status = lab.tpuswarm("status")
    assert "1 attempt since" in status and "the kernel tracks " in status
    for words in (["--tune", "--persist"], [], ["--dry-run"]):
        assert "is already applied; nothing to do" in lab.tpuswarm("apply", file, *words)
    assert state() == before


def test_remove_deletes_rules_and_files_and_names_what_stays(lab, tmp_path):
    load(lab, OTHER_RULES)
    rules, files = lab.rules(), lab.files()
    file = Path(write(tmp_path / "r.toml"))
    assert "nothing was done" in lab.tpuswarm("apply", str(file), "--tune", "--persist", "--dry-run")
    assert (lab.rules(), lab.files()) == (rules, files)
    lab.tpuswarm("apply", str(file), "--tune", "--persist")
    assert set(lab.files()) - set(files) == {
        f"/run{RULES}", f"/run{SYSCTL}", f"/run{UNIT}",
        "/run/etc/systemd/system/multi-user.target.wants/tpuswarm-router.service",
    }  # fmt: skip
    values = lab.settings().splitlines()
    assert {
        "/proc/sys/net/ipv4/conf/eth0/forwarding:1",
        "/proc/sys/net/ipv4/conf/eth1/forwarding:1",
        "/proc/sys/net/ipv4/tcp_congestion_control:bbr",
        "/proc/sys/net/core/somaxconn:65535",
        "/proc/sys/net/core/netdev_max_backlog:100000",
        "/proc/sys/net/core/rmem_max:134217728",
    } < set(values)
    assert lab.rules().startswith(rules.rstrip())  # other rules are unchanged
    write(file, 49)
    lab.tpuswarm("apply", str(file))
    assert "nothing was done" in lab.tpuswarm("remove", "--dry-run") and "10.49.3.2" in lab.rules()
    lab.router.sh(f"touch {RULES}.part")  # left by a kill
    assert "forwarding included, stay until this machine restarts" in lab.tpuswarm("remove")
    assert (lab.rules(), lab.files()) == (rules, files)
    assert "nothing is applied to this machine" in lab.tpuswarm("remove", code=2)


def test_client_is_tuned_until_remove(lab):
    files = lab.files()
    planned = lab.tpuswarm("tune", "--dry-run")
    assert "/proc/sys/net/ipv4/tcp_tw_reuse: 1" in planned and "nothing was done" in planned and lab.files() == files
    assert planned.splitlines()[:-1] == lab.tpuswarm("tune").splitlines()[:-1]
    values = set(lab.settings().splitlines())
    assert {
        "/proc/sys/net/ipv4/tcp_tw_reuse:1",
        "/proc/sys/net/ipv4/tcp_congestion_control:bbr",
        "/proc/sys/net/core/wmem_max:134217728",
    } < values and "/proc/sys/net/ipv4/conf/eth0/forwarding:1" not in values
    limits = "/etc/security/limits.d/60-tpuswarm-client.conf"
    assert set(lab.files()) - set(files) == {"/run/etc/sysctl.d/60-tpuswarm-client.conf", f"/run{limits}"}
    assert "* hard nofile 1048576\n" in lab.router.sh(f"cat {limits}")
    assert lab.tpuswarm("tune") == "this machine is tuned already\n"
    lab.tpuswarm("remove")
    assert lab.files() == files


DRIFTS = [
    ("nft add rule ip tpuswarm_router prerouting tcp dport 1 accept", "someone changed the rules in the kernel"),
    ("nft delete element ip tpuswarm_router targets '{ 48003 }'", "r.toml, not in the kernel: 1 port (48003)"),
    ("echo 77 > /proc/sys/net/core/somaxconn", "/proc/sys/net/core/somaxconn is 77, not 65535: apply again"),
    (f"rm {RULES}", f"the rules are ours, but {RULES} is missing: apply again"),
]


def test_status_reports_each_drift_and_apply_mends_it(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    for change, sentence in [*DRIFTS, (None, None)]:
        lab.tpuswarm("apply", file, "--tune")
        status = json.loads(lab.tpuswarm("status", "--json"))
        assert len(status["rows"]) == TARGETS + 1 and status["drift"] == [], change
        if change:
            lab.router.sh(change)
            [drift] = json.loads(lab.tpuswarm("status", "--json"))["drift"]
            assert sentence in drift


def test_unit_loads_the_rules_after_a_reboot(lab, tmp_path):
    if systemctl := shutil.which("systemctl"):
        lab.router.sh(
            f"printf '#!/bin/sh\\necho $@ >> /run/calls' > /run/s; chmod +x /run/s; mount --bind /run/s {systemctl}"
        )
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    assert not systemctl or "daemon-reload" in lab.router.sh("cat /run/calls")
    lab.router.sh("nft flush ruleset; echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
    status = lab.tpuswarm("status")
    assert "the kernel has no rules" in status and "tcp_congestion_control is reno, not bbr: apply again" in status
    lab.router.sh(lab.router.sh(f"grep ExecStart= {UNIT}").partition("=")[2])
    lab.router.sh(f"sysctl --quiet -p {SYSCTL}" if shutil.which("sysctl") else
                  "echo bbr > /proc/sys/net/ipv4/tcp_congestion_control")  # fmt: skip
    assert lab.target(48003) == "10.48.3.2:8470" and "drift" not in lab.tpuswarm("status")


def test_nft_reads_what_show_prints(lab):
    golden = Path(__file__).with_name("golden") / "small"
    lab.router.sh(f"nft -f {golden}.nft")
    rules = lab.rules()
    assert "22001 counter : 10.0.0.12 . 22" in rules and "9000 counter : 7000" in rules
    lab.tpuswarm("apply", f"{golden}.toml")
    assert lab.rules() == rules


@pytest.mark.parametrize(
    ("damage", "words", "code"),
    [
        ("nft add table ip tpuswarm_router", "the table ip tpuswarm_router was not made by tpuswarm", 2),
        ("ip link set eth1 down; ip link set eth1 name eth9", "has no interface eth1; did you mean eth9?", 2),
        ("mount --bind /dev/null $(command -v nft)", "there is no nft on this machine", 2),
        (REFUSE_RULES, "changed nothing: Error: Could not process rule: No such file or directory; the rules need", 1),
        ("rm -r /run/systemd", "this machine does not run systemd", 2),
        ("rm /run/core/somaxconn", "has no /proc/sys/net/core/somaxconn; apply without --tune", 2),
        (
            "exec 9>/run/tpuswarm-router.lock; flock 9; sleep 300 >/dev/null 2>&1 &",  # returns once it holds the lock
            "another `tpuswarm router` is changing",
            2,
        ),
    ],
)
def test_failed_apply_names_the_cause_and_changes_nothing(lab, tmp_path, damage, words, code):
    def state() -> tuple[str, str]:
        return "" if "dev/null $(" in damage else lab.rules(), lab.settings()

    lab.router.sh(damage)
    before = state()
    process = lab.start("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    out, error = process.communicate()
    assert process.returncode == code and words in error
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    assert (". nft: table ip tpuswarm_router, 257 ports" in out) == (code == 1)  # the plan
    assert state() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "mount -o remount,ro,bind /proc/sys/net/core",
            "somaxconn cannot be set to 65535: Read-only file system; apply",
        ),
        (
            "mount -t tmpfs -o ro tmpfs /etc/sysctl.d",
            "60-tpuswarm-router.conf cannot be written: Read-only file system",
        ),
    ],
)
def test_rules_work_where_the_host_refuses_its_tuning(lab, tmp_path, damage, words):
    lab.router.sh("mkdir -p /etc/sysctl.d; " + damage)
    file = write(tmp_path / "r.toml")
    assert words in lab.tpuswarm("apply", file, "--tune", code=1)
    assert "is already applied; nothing to do" in lab.tpuswarm("apply", file)

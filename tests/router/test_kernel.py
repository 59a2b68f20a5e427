"""Real packets through a real kernel: a client, a router and 256 targets in network namespaces."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.router.lab import ROUTER, STRANGER, TARGETS, ask

UNIT = "/etc/systemd/system/tpuswarm-router.service"
LIMITS = "/etc/security/limits.d/tpuswarm-router.conf"
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
        assert ask(direct) == "10.48.3.2:8470"


def test_open_connections_survive_a_new_mapping(lab, tmp_path):
    file = Path(write(tmp_path / "r.toml"))
    lab.tpuswarm("apply", str(file), "--tune")
    with lab.connect(48007) as first, lab.connect(48008) as second, lab.connect(5002) as own:
        before = [ask(connection) for connection in (first, second, own)]
        assert before == ["10.48.7.2:8470", "10.48.8.2:8470", f"{ROUTER}:5001"]
        lab.tpuswarm("apply", write(file, 49))
        assert lab.target(48007) == "10.49.7.2:8470"
        assert [ask(connection) for connection in (first, second, own)] == before
        assert "1 open, 2 open to old targets" in lab.tpuswarm("status")
        text = file.read_text()
        file.write_text(text[: text.index("[[targets]]")])
        lab.tpuswarm("apply", str(file))  # port 5002 is no longer forwarded
        assert "0 open, 3 open to old targets" in lab.tpuswarm("status")
        lab.tpuswarm("remove")
        with pytest.raises(ConnectionResetError):  # nothing translates it any more
            ask(first)


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
        assert ask(open_before) == f"{ROUTER}:5001"  # a person's own SSH connection goes on
    lab.router.sh(f"echo 1 > /proc/sys/net/ipv4/ip_forward; {'; '.join(ways_out)}; iptables -S")
    assert lab.target(5001) == "10.48.0.2:8470" and lab.target(48009) == "10.48.9.2:8470"
    assert "drops packets by default" not in lab.start("apply", file, "--dry-run").communicate()[1]


def test_translations_of_others_are_not_masqueraded(lab, tmp_path):
    load(lab, OTHER_RULES.replace("47000", "48007"))
    lab.targets.sh("ip route add 10.1.0.0/24 via 10.9.0.1")
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune")
    with lab.connect(48007, STRANGER) as theirs, lab.connect(48008) as ours:
        assert [ask(theirs), ask(ours)] == ["10.48.0.9:8470", "10.48.8.2:8470"]
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
        assert ask(open_before) == "10.48.7.2:8470"
        lab.tpuswarm("remove")
        assert ask(open_before) == "10.48.7.2:8470"


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
    lab.router.sh(f"rm -r /etc/security/limits.d; umask 077; {apply} {file} --tune --persist")
    modes = lab.router.sh(f"stat -c %a /var/lib/tpuswarm /var/lib/tpuswarm/router.json {LIMITS} {UNIT}")
    assert modes.split() == ["755", "644", "644", "644"]  # a dry run without root reads them
    lab.target(48001)

    def state() -> tuple[str, ...]:
        return lab.router.sh("nft -a list ruleset; ls -l --full-time /var/lib/tpuswarm"), lab.settings()

    before = state()
    assert "counter packets 1 " in before[0]
    status = lab.tpuswarm("status")
    assert "1 attempt since" in status and "the kernel tracks " in status
    for words in (["--tune", "--persist"], [], ["--dry-run"]):
        assert "is already applied; nothing to do" in lab.tpuswarm("apply", file, *words)
    assert state() == before


def test_remove_restores_rules_and_settings_exactly(lab, tmp_path):
    load(lab, OTHER_RULES)
    lab.router.sh("echo 4096 > /run/nr_open; mount --bind /run/nr_open /proc/sys/fs/nr_open")
    rules, settings = lab.rules(), lab.settings()
    file = Path(write(tmp_path / "r.toml"))
    assert "nothing was done" in lab.tpuswarm("apply", str(file), "--tune", "--persist", "--dry-run")
    assert (lab.rules(), lab.settings()) == (rules, settings)
    lab.tpuswarm("apply", str(file), "--tune", "--persist")
    assert set(lab.settings().splitlines()) - set(settings.splitlines()) > {
        "/proc/sys/net/ipv4/conf/eth0/forwarding:1",
        "/proc/sys/net/ipv4/conf/eth1/forwarding:1",
        "/proc/sys/net/ipv4/tcp_congestion_control:bbr",
        "/proc/sys/net/core/somaxconn:65535",
        "/proc/sys/net/core/netdev_max_backlog:100000",
        "/proc/sys/net/core/rmem_max:134217728",
        "/sys/class/net/eth0/tx_queue_len:100000",
        f"/run{LIMITS}",
        "/run/etc/systemd/system/multi-user.target.wants/tpuswarm-router.service",
    }
    # Above fs.nr_open nobody could log in.
    assert lab.router.sh(f"cat {LIMITS}") == "* - nofile 4096\n"
    assert lab.rules().startswith(rules.rstrip())  # other rules are unchanged

    write(file, 49)
    file.write_text(file.read_text().replace("eth1", "eth0"))
    lab.tpuswarm("apply", str(file))
    assert "10.49.3.2" in lab.rules()
    assert "nothing was done" in lab.tpuswarm("remove", "--dry-run") and "10.49.3.2" in lab.rules()
    assert "everything was restored" in lab.tpuswarm("remove")
    assert (lab.rules(), lab.settings()) == (rules, settings)
    assert "nothing is applied to this machine" in lab.tpuswarm("remove", code=2)


def test_printed_commands_undo_an_apply_by_hand(lab, tmp_path):
    rules, settings = lab.rules(), lab.settings()
    out = lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    assert "to undo it: `tpuswarm router remove`, or these commands, which /var/lib/tpuswarm/router.json keeps:" in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ") and "systemctl" not in line]
    lab.router.sh("\n".join([*commands, "rm -r /var/lib/tpuswarm"]))
    assert (lab.rules(), lab.settings()) == (rules, settings)


DRIFTS = [
    ("nft add rule ip tpuswarm_router prerouting tcp dport 1 accept", "someone changed the rules in the kernel"),
    ("nft delete element ip tpuswarm_router targets '{ 48003 }'", "r.toml, not in the kernel: 1 port (48003)"),
    ("echo 77 > /proc/sys/net/core/somaxconn", "/proc/sys/net/core/somaxconn is 77, not 65535: apply again"),
    ("rm /var/lib/tpuswarm/router.json", "the rules are ours, but the record of settings is gone: apply again"),
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


def test_settings_changed_by_others_are_left_alone(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    lab.tpuswarm("apply", file, "--tune")
    lab.router.sh("echo 77 > /proc/sys/net/core/somaxconn; mount -o remount,ro,bind /proc/sys/net/core")
    assert "; remove, then apply without --tune" in lab.tpuswarm("apply", file, code=1)
    lab.router.sh("mount -o remount,rw,bind /proc/sys/net/core; echo 78 > /proc/sys/net/core/rmem_max")
    lab.tpuswarm("apply", file)  # these two are now the values to restore
    lab.router.sh("echo 79 > /proc/sys/net/core/wmem_max")
    assert "left alone: /proc/sys/net/core/wmem_max" in lab.tpuswarm("remove")
    assert lab.router.sh("cd /proc/sys/net/core; cat somaxconn rmem_max wmem_max").split() == ["77", "78", "79"]


def test_unit_applies_the_file_after_a_reboot(lab, tmp_path):
    """A reboot clears rules and kernel settings, but not the record and the unit."""
    settings = lab.settings()
    if systemctl := shutil.which("systemctl"):
        lab.router.sh(
            f"printf '#!/bin/sh\\necho $@ >> /run/calls' > /run/s; chmod +x /run/s; mount --bind /run/s {systemctl}"
        )
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    assert not systemctl or "daemon-reload" in lab.router.sh("cat /run/calls; rm /run/calls")
    lab.router.sh(
        "nft flush ruleset; echo 0 > /proc/sys/net/ipv4/conf/eth0/forwarding;"
        "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
    )
    assert "the kernel has no rules" in lab.tpuswarm("status")
    lab.router.sh(lab.router.sh(f"grep ExecStart= {UNIT}").partition("=")[2])
    assert lab.target(48003) == "10.48.3.2:8470" and "drift" not in lab.tpuswarm("status")
    lab.tpuswarm("remove")
    assert lab.settings() == settings
    assert not systemctl or "daemon-reload" in lab.router.sh("cat /run/calls")


def test_kill_before_every_effect_leaves_old_or_new_rules_and_can_be_undone(lab, tmp_path):
    settings = lab.settings()
    files = [write(tmp_path / f"{network}.toml", network) for network in (48, 49)]
    script = Path(__file__).with_name("kill_points.py")
    lines = lab.router.sh(f"{sys.executable} {script} {' '.join(files)}").splitlines()
    states = [re.fullmatch(r"(apply|remove), before .*: (old|new) rules, undone: True", line) for line in lines]
    assert all(states), "\n".join(lines)
    # The record, 14 files, the rules, the record; two more inside each of four writings. Then as many less one record.
    assert [f"{state[1]} {state[2]}" for state in states] == [
        *["apply old"] * 22, *["apply new"] * 4, "remove old", *["remove new"] * 16
    ]  # fmt: skip
    assert lab.settings() == settings


def test_kill_at_any_time_leaves_old_or_new_rules_and_can_be_undone(lab, tmp_path):
    """Kill the process, and its nft, at random times."""
    settings = lab.settings()
    files = [write(tmp_path / f"{network}.toml", network) for network in (48, 49)]
    states = []
    for file in (files[1], files[0]):
        start = time.perf_counter()
        lab.tpuswarm("apply", file)
        duration_s = time.perf_counter() - start
        states.append(lab.rules())
    fractions = random.Random(0)
    for number in range(12):
        process = lab.start("apply", files[number % 2], "--tune", "--persist")
        time.sleep(duration_s * fractions.uniform(0.3, 1.2))
        with suppress(ProcessLookupError):  # it has finished
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert lab.rules() in states
        if number % 3 == 2:
            lab.tpuswarm("remove")
            assert lab.settings() == settings and lab.rules() == ""
            lab.tpuswarm("apply", files[0])
    lab.tpuswarm("apply", files[1])
    assert lab.rules() == states[0] and "drift" not in lab.tpuswarm("status")
    lab.tpuswarm("remove")
    assert lab.settings() == settings and lab.rules() == ""


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
        ("rm /run/core/somaxconn", "has no /proc/sys/net/core/somaxconn: apply without --tune", 2),
        (
            "mount -t tmpfs -o ro tmpfs /etc/security/limits.d",
            "tpuswarm-router.conf cannot be set to * - nofile 1048576 on this machine: Read-only file system; "
            "apply without --tune",
            1,
        ),
        (
            "mount -t tmpfs -o ro tmpfs /etc/systemd/system",
            "tpuswarm-router.service cannot be written on this machine: Read-only file system; apply without --persist",
            1,
        ),
        ("mount -o remount,ro,bind /proc/sys/net/core", "/proc/sys/net/core/somaxconn cannot be set to 65535", 1),
        (
            "exec 9>/run/tpuswarm-router.lock; flock 9; sleep 300 >/dev/null 2>&1 &",  # it is held when this returns
            "another `tpuswarm router` is changing",
            2,
        ),
        ("mount -t tmpfs -o ro tmpfs /var/lib", "router.json cannot be written: Read-only file system; make", 1),
        ("mkdir /var/lib/tpuswarm; echo {} > /var/lib/tpuswarm/router.json", "router.json is damaged", 2),
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

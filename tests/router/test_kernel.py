"""Real packets through a real kernel: a client, a router and 256 targets in network namespaces."""

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.router.lab import DOOR, PROGRAM, STRANGER, TARGETS, ask
from tpuswarm.router.settings import LIMITS, UNIT

OTHERS = """
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

DROPPING = """
table inet fire {
	chain in.side {
		type filter hook forward priority filter; policy drop;
	}
	chain input {
		type filter hook input priority filter; policy accept;
	}
}
"""

REFUSING = """
nft=$(command -v nft)
cp $nft /run/nft
cat > /run/refuses <<'END'
#!/bin/sh
[ "$1" = -f ] || exec /run/nft "$@"
echo "Error: Could not process rule: No such file or directory" >&2
exit 1
END
chmod +x /run/refuses
mount --bind /run/refuses $nft
"""


def write(path: Path, network: int = 48, more: str = "") -> str:
    """A file for 256 targets and a port of the router's own."""
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


def test_every_port_reaches_its_own_target_and_other_sources_none(lab, tmp_path):
    out = lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune")
    assert "nft: table ip tpuswarm_router, 257 ports, in one transaction" in out
    assert "to undo it: `tpuswarm router remove`" in out and "nft delete table ip tpuswarm_router" in out
    assert [lab.reach(48000 + i) for i in range(TARGETS)] == [f"10.48.{i}.2:8470" for i in range(TARGETS)]
    assert lab.reach(5002) == f"{DOOR}:5001"
    for port in (48000, 48255, 5002):
        with pytest.raises(ConnectionRefusedError):
            lab.open(port, STRANGER)
    with pytest.raises(ConnectionRefusedError):
        lab.open(48256)
    # Not addressed to the router: only what it forwards, as it is.
    lab.client.sh(f"ip route add 10.48.0.0/16 via {DOOR}")
    lab.targets.sh("ip route add 10.1.0.0/24 via 10.9.0.1")
    with pytest.raises(ConnectionRefusedError):
        lab.client.call(lambda: socket.create_connection(("10.48.3.2", 48004), timeout=20))
    with lab.client.call(lambda: socket.create_connection(("10.48.3.2", 8470), timeout=20)) as direct:
        assert ask(direct) == "10.48.3.2:8470"


def test_a_change_of_mapping_keeps_open_connections(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    lab.tpuswarm("apply", file, "--tune")
    with lab.open(48007) as old, lab.open(48008) as kept, lab.open(5002) as own:
        before = [ask(each) for each in (old, kept, own)]
        write(tmp_path / "r.toml", 49)
        assert "forwarded elsewhere than in" in lab.tpuswarm("status") and lab.reach(48007) == "10.48.7.2:8470"
        lab.tpuswarm("apply", file)
        assert lab.reach(48007) == "10.49.7.2:8470"
        assert (
            [ask(each) for each in (old, kept, own)] == before == ["10.48.7.2:8470", "10.48.8.2:8470", f"{DOOR}:5001"]
        )
        assert "1 open, 2 open to old targets" in lab.tpuswarm("status")
        text = Path(file).read_text()
        Path(file).write_text(text[: text.index("[[targets]]")])
        lab.tpuswarm("apply", file)  # a port that leads nowhere now
        assert "0 open, 3 open to old targets" in lab.tpuswarm("status")
        lab.tpuswarm("remove")
        with pytest.raises(ConnectionResetError):  # nothing translates it any more
            ask(old)


def test_what_a_person_should_know(lab, tmp_path):
    file = write(tmp_path / "r.toml", more='[[targets]]\nport = 5001\nto = "10.48.0.2:8470"\n')
    lab.router.sh(f"nft -f - <<'END'\n{DROPPING}END\niptables -P FORWARD DROP")
    lines = ["nft insert rule inet fire in.side ct status dnat accept"]
    lines += ["iptables -I FORWARD -m conntrack --ctstate DNAT -j ACCEPT"]
    with lab.open(5001) as before:
        for words in (["--dry-run"], []):
            _, err = lab.popen("apply", file, *words).communicate()
            assert "until this host forwards packets: /proc/sys/net/ipv4/conf/eth0/forwarding" in err
            assert "note: this host itself listens on 5001" in err and err.count("drops packets by default") == 2
            assert all(line in err for line in lines)
        assert ask(before) == f"{DOOR}:5001"  # what the router itself serves goes on: a person's own SSH
    lab.router.sh(f"echo 1 > /proc/sys/net/ipv4/ip_forward; {'; '.join(lines)}; iptables -S")
    assert lab.reach(5001) == "10.48.0.2:8470" and lab.reach(48009) == "10.48.9.2:8470"
    assert "drops packets by default" not in lab.popen("apply", file, "--dry-run").communicate()[1]


def test_what_others_translate_is_not_masqueraded(lab, tmp_path):
    lab.router.sh(f"nft -f - <<'END'\n{OTHERS.replace('47000', '48007')}END")
    lab.targets.sh("ip route add 10.1.0.0/24 via 10.9.0.1")
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune")
    with lab.open(48007, STRANGER) as theirs, lab.open(48008) as ours:
        assert [ask(theirs), ask(ours)] == ["10.48.0.9:8470", "10.48.8.2:8470"]
        found = lab.router.sh("cat /proc/net/nf_conntrack")
    assert f"src=10.48.0.9 dst={STRANGER} " in found and "src=10.48.8.2 dst=10.9.0.1 " in found


def test_open_connections_outlive_their_rules_where_others_translate_too(lab, tmp_path):
    lab.router.sh(f"nft -f - <<'END'\n{OTHERS}END\necho 1 > /proc/sys/net/ipv4/ip_forward")
    file = write(tmp_path / "r.toml")
    lab.tpuswarm("apply", file)
    with lab.open(48007) as open_before:
        Path(file).write_text(Path(file).read_text().replace("10.1.0.2", "10.1.0.9"))
        lab.tpuswarm("apply", file)
        with pytest.raises(ConnectionRefusedError):
            lab.open(48007)
        assert ask(open_before) == "10.48.7.2:8470"
        lab.tpuswarm("remove")
        assert ask(open_before) == "10.48.7.2:8470"


def test_one_interface(lab, tmp_path):
    """Nobody is told to go to a target without the router, which only the router can translate for."""
    lab.router.sh("ip route replace 10.48.0.0/16 via 10.1.0.2 dev eth0")
    lab.client.sh("ip route add local 10.48.0.0/16 dev lo")
    lab.serve(lab.client, 8470)
    file = Path(write(tmp_path / "r.toml"))
    file.write_text(file.read_text().replace("eth1", "eth0"))
    lab.tpuswarm("apply", str(file), "--tune")
    assert [lab.reach(48000 + i) for i in range(4)] == [f"10.48.{i}.2:8470" for i in range(4)]
    names, counts = (line.split() for line in lab.router.sh("grep Icmp: /proc/net/snmp").splitlines())
    assert counts[names.index("OutRedirects")] == "0"


def test_apply_twice_changes_nothing(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    lab.router.sh(f"rm -r /etc/security/limits.d; umask 077; {PROGRAM} router apply {file} --tune --persist")
    modes = lab.router.sh(f"stat -c %a /var/lib/tpuswarm /var/lib/tpuswarm/router.json {LIMITS} {UNIT}")
    assert modes.split() == ["755", "644", "644", "644"]  # a dry run without rights reads them
    lab.reach(48001)
    before = lab.router.sh("nft -a list ruleset"), lab.settings(), lab.router.sh("ls -l --full-time /var/lib/tpuswarm")
    assert "counter packets 1 " in before[0]
    assert "1 attempt since" in (said := lab.tpuswarm("status")) and "the kernel tracks " in said
    for words in (["--tune", "--persist"], [], ["--dry-run"]):
        assert "is already applied; nothing to do" in lab.tpuswarm("apply", file, *words)
    after = lab.router.sh("nft -a list ruleset"), lab.settings(), lab.router.sh("ls -l --full-time /var/lib/tpuswarm")
    assert after == before


def test_remove_restores_rules_and_settings_exactly(lab, tmp_path):
    lab.router.sh(f"nft -f - <<'END'\n{OTHERS}END")
    rules, settings = lab.rules(), lab.settings()
    file = write(tmp_path / "r.toml")
    assert "nothing was done" in lab.tpuswarm("apply", file, "--tune", "--persist", "--dry-run")
    assert (lab.rules(), lab.settings()) == (rules, settings)
    lab.tpuswarm("apply", file, "--tune", "--persist")
    changed = set(lab.settings().splitlines()) - set(settings.splitlines())
    assert {
        "/proc/sys/net/ipv4/conf/eth0/forwarding:1",
        "/proc/sys/net/ipv4/conf/eth1/forwarding:1",
        "/proc/sys/net/ipv4/tcp_congestion_control:bbr",
        "/proc/sys/net/core/somaxconn:65535",
        "/proc/sys/net/core/netdev_max_backlog:100000",
        "/proc/sys/net/core/rmem_max:134217728",
        "/sys/class/net/eth0/tx_queue_len:100000",
        "/run/etc/security/limits.d/tpuswarm-router.conf",
        "/run/etc/systemd/system/multi-user.target.wants/tpuswarm-router.service",
    } < changed
    assert lab.rules().startswith(rules.rstrip())  # those of others are as they were
    enabled = lab.router.sh("cat /etc/systemd/system/multi-user.target.wants/tpuswarm-router.service")
    assert f"router apply {file} --tune\n" in enabled
    lab.tpuswarm("apply", write(tmp_path / "r.toml", 49))  # what a later one does is undone too
    assert "10.49.3.2" in lab.rules()
    assert "nothing was done" in lab.tpuswarm("remove", "--dry-run") and "10.49.3.2" in lab.rules()
    assert "everything was restored" in lab.tpuswarm("remove")
    assert (lab.rules(), lab.settings()) == (rules, settings)
    assert "nothing is applied to this machine" in lab.tpuswarm("remove", code=2)


def test_what_others_changed_since_is_seen_and_left_alone(lab, tmp_path):
    file = write(tmp_path / "r.toml")
    lab.tpuswarm("apply", file, "--tune")
    lab.router.sh(
        "echo 77 > /proc/sys/net/core/somaxconn;"
        "nft add rule ip tpuswarm_router prerouting tcp dport 1 accept;"
        "nft delete element ip tpuswarm_router targets '{ 48003 }'"
    )
    found = json.loads(lab.tpuswarm("status", "--json"))
    assert len(found["rows"]) == TARGETS and len(found["drift"]) == 3
    text = " ".join(found["drift"])
    assert (
        "not in the kernel: 1 port (48003)" in text
        and "someone changed the rules in the kernel" in text
        and "is 77, not 65535" in text
    )
    lab.router.sh("mount -o remount,ro,bind /proc/sys/net/core")
    assert "; remove, then apply without --tune" in lab.tpuswarm("apply", file, code=1)
    lab.router.sh("mount -o remount,rw,bind /proc/sys/net/core")
    assert "left alone: /proc/sys/net/core/somaxconn" in lab.tpuswarm("remove")
    assert lab.router.sh("cat /proc/sys/net/core/somaxconn") == "77\n"


def test_after_a_start_of_the_machine(lab, tmp_path):
    """Rules and settings of the kernel are gone then, the record and the unit are not."""
    settings = lab.settings()
    if systemctl := shutil.which("systemctl"):
        lab.router.sh(
            f"printf '#!/bin/sh\\necho $@ >> /run/asked' > /run/s; chmod +x /run/s; mount --bind /run/s {systemctl}"
        )
    lab.tpuswarm("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    if systemctl:
        assert lab.router.sh("cat /run/asked; rm /run/asked") == "daemon-reload\n" * 2
    lab.router.sh(
        "nft flush ruleset; echo 0 > /proc/sys/net/ipv4/conf/eth0/forwarding;"
        "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
    )
    assert "the kernel has no rules" in lab.tpuswarm("status")
    unit = lab.router.sh("grep ExecStart= /etc/systemd/system/tpuswarm-router.service")
    lab.router.sh(unit.partition("=")[2])
    assert lab.reach(48003) == "10.48.3.2:8470" and "drift" not in lab.tpuswarm("status")
    lab.tpuswarm("remove")
    assert lab.settings() == settings
    assert not systemctl or lab.router.sh("cat /run/asked") == "daemon-reload\n" * 2


def test_kill_9_before_every_effect(lab, tmp_path):
    settings = lab.settings()
    files = [write(tmp_path / f"{network}.toml", network) for network in (48, 49)]
    script = Path(__file__).with_name("kill_points.py")
    lines = lab.router.sh(f"{sys.executable} {script} {' '.join(files)}").splitlines()
    states = [re.fullmatch(r"(apply|remove), before .*: (old|new) rules, undone: True", line) for line in lines]
    assert all(states), "\n".join(lines)
    # The record, 14 files, the rules, the record; two more inside each of four writings. Then as many less one record.
    assert [f"{each[1]} {each[2]}" for each in states] == [
        *["apply old"] * 22, *["apply new"] * 4, "remove old", *["remove new"] * 16
    ]  # fmt: skip
    assert lab.settings() == settings


def test_kill_9_at_any_time(lab, tmp_path):
    """The whole process, and its nft, at points of time drawn by lot."""
    settings = lab.settings()
    files = [write(tmp_path / f"{network}.toml", network) for network in (48, 49)]
    states = []
    for file in (files[1], files[0]):
        start = time.perf_counter()
        lab.tpuswarm("apply", file)
        whole = time.perf_counter() - start
        states.append(lab.rules())
    draw = random.Random(0)
    for number in range(6):
        process = lab.popen("apply", files[number % 2], "--tune", "--persist")
        time.sleep(whole * draw.uniform(0.4, 1.1))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert lab.rules() in states
    lab.tpuswarm("apply", files[1])
    assert lab.rules() == states[0] and "drift" not in lab.tpuswarm("status")
    lab.tpuswarm("remove")
    assert lab.settings() == settings and lab.rules() == ""


def test_show_is_what_nft_reads_and_keeps(lab):
    golden = Path(__file__).with_name("golden") / "small"
    lab.tpuswarm("show", f"{golden}.toml")
    lab.router.sh(f"nft -f {golden}.nft")
    first = lab.rules()
    assert "22001 counter : 10.0.0.12 . 22" in first and "9000 counter : 7000" in first
    lab.tpuswarm("apply", f"{golden}.toml")
    assert lab.rules() == first


@pytest.mark.parametrize(
    ("damage", "words", "code"),
    [
        ("nft add table ip tpuswarm_router", "the table ip tpuswarm_router was not made by tpuswarm", 2),
        (
            "ip link set eth1 down; ip link set eth1 name eth9",
            "this machine has no interface eth1; did you mean eth9?",
            2,
        ),
        ("mount --bind /dev/null $(command -v nft)", "there is no nft on this machine", 2),
        (
            REFUSING,
            "nft -f failed and changed nothing: Error: Could not process rule: No such file or directory; "
            "the rules need nft 1.0.2 or newer",
            1,
        ),
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
            "exec 9>/run/tpuswarm-router.lock; flock 9; sleep 30 >/dev/null 2>&1 &",  # it is held when this returns
            "another `tpuswarm router` is changing",
            2,
        ),
        (
            "mount -t tmpfs -o ro tmpfs /var/lib",
            "router.json cannot be written: Read-only file system; make /var/lib/tpuswarm writable",
            1,
        ),
        ("mkdir /var/lib/tpuswarm; echo {} > /var/lib/tpuswarm/router.json", "router.json is damaged", 2),
    ],
)
def test_what_the_machine_lacks_is_one_sentence_and_nothing_changes(lab, tmp_path, damage, words, code):
    lab.router.sh(damage)
    before = lab.rules() if "dev/null" not in damage else "", lab.settings()
    process = lab.popen("apply", write(tmp_path / "r.toml"), "--tune", "--persist")
    out, error = process.communicate()
    assert process.returncode == code and words in error
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    assert (". nft: table ip tpuswarm_router, 257 ports" in out) == (code == 1)  # what it set out to do
    assert (lab.rules() if "dev/null" not in damage else "", lab.settings()) == before

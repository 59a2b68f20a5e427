"""Compare our router with none, with iptables rules and with HAProxy: new connections and throughput.

Client, routers and targets are network namespaces of one machine, wired by veth pairs. About 10 minutes; root only.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.router.namespaces import Space

from benchmarks.load import BACKLOG_SIZE, Address, answering, filled, opened, reading
from benchmarks.report import Settings, Skipped, Table, median, verdict
from tpuswarm.router.file import read_router
from tpuswarm.router.mapping import Mapping
from tpuswarm.router.ruleset import ruleset

EXAMPLE = Path(__file__).parents[1] / "examples" / "router-seed.toml"
PORT = 8470
OPEN_S, FILL_S = 0.25, 0.5
"""Length of one measurement; the arms take turns, in another order every round."""
DIRECT, PLAIN, OURS, IPTABLES, HAPROXY = "no router", "a router that translates nothing", "ours", "iptables", "HAProxy"
MIN_LAST_OVER_FIRST, MIN_OVER_IPTABLES, MIN_OVER_DIRECT = 0.95, 1.4, 0.9
"""New connections at the last target over the first and over iptables; throughput over no router."""

CLIENT = """
echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range
ip link set lo up
"""
DIRECT_LINK = """
ip link add d0 type veth peer name d1 netns $TARGETS
ip address add 10.2.0.1/24 dev d0
ip link set d0 up
"""
TARGETS = f"""
ip link set lo up
echo {BACKLOG_SIZE} > /proc/sys/net/core/somaxconn
echo {BACKLOG_SIZE} > /proc/sys/net/ipv4/tcp_max_syn_backlog
for net in $(seq 48 55); do ip route add local 10.$net.0.0/16 dev lo; done
"""
ROUTER = """
ip link set lo up
ip link add eth0 type veth peer name c$NUMBER netns $CLIENT
ip link add eth1 type veth peer name t$NUMBER netns $TARGETS
ip address add 10.1.$NUMBER.1/24 dev eth0
ip address add 10.9.$NUMBER.1/24 dev eth1
ip link set eth0 up
ip link set eth1 up
for net in $(seq 48 55); do ip route add 10.$net.0.0/16 via 10.9.$NUMBER.2; done
echo 1 > /proc/sys/net/ipv4/ip_forward
# Thousands of connections a second, each reset: their records must not pile up.
echo 1 > /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close
"""


def mapping(count: int) -> Mapping:
    """Return a mapping of the first machines in the example."""
    _, example = read_router(EXAMPLE)
    targets = [(port, target) for port, target in example.targets.items() if target.port == PORT]
    return replace(example, outside="eth0", inside="eth1", targets=dict(targets[:count]))


def iptables(mapping: Mapping) -> str:
    """Return a rule for each target, for iptables-restore."""
    lines = ["*nat"]
    for port, target in mapping.targets.items():
        lines.append(f"-A PREROUTING --src 10.0.0.0/8 -p tcp --dport {port} -j DNAT --to-destination {target}")
    return "\n".join([*lines, f"-A POSTROUTING -o {mapping.inside} -j MASQUERADE", "COMMIT", ""])


def haproxy(mapping: Mapping) -> str:
    """Return a configuration with a `listen` for each target."""
    text = ""
    for port, target in mapping.targets.items():
        text += f"listen tpu{port}\n  bind 0.0.0.0:{port}\n  mode tcp\n  timeout connect 4000\n"
        text += f"  timeout client 180000\n  timeout server 180000\n  server tpu{port} {target}\n"
    return text


class Arm(NamedTuple):
    """A way to reach the targets. targets: their number, 0 without translation; doors: their addresses."""

    name: str
    targets: int
    doors: tuple[Address, ...]

    def __str__(self) -> str:
        return f"{self.name}, {self.targets:,} targets" if self.targets else self.name


class Network:
    """A client and targets, with a router for each arm between them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._routers = stack, 0
        self.client, self.targets = self._space(), self._space()
        self._pids = {"CLIENT": str(self.client.pid), "TARGETS": str(self.targets.pid)}
        self.client.sh(CLIENT + DIRECT_LINK, **self._pids)
        self.targets.sh(f"{TARGETS}\nip address add 10.2.0.2/24 dev d1\nip link set d1 up")

    def _space(self) -> Space:
        space = Space("--net")
        self._stack.callback(space.close)
        return space

    def router(self) -> tuple[Space, str]:
        """Add a forwarding router; return it and its address."""
        self._routers += 1
        number = self._routers
        space = self._space()
        space.sh(ROUTER, NUMBER=str(number), **self._pids)
        self.client.sh(f"ip address add 10.1.{number}.2/24 dev c{number}; ip link set c{number} up")
        self.targets.sh(f"ip address add 10.9.{number}.2/24 dev t{number}; ip link set t{number} up")
        return space, f"10.1.{number}.1"

    def arms(self, counts: tuple[int, ...]) -> Iterator[Arm]:
        yield Arm(DIRECT, 0, (("10.2.0.2", PORT),))
        _, door = self.router()
        self.client.sh(f"ip route add 10.48.0.0/13 via {door}")
        self.targets.sh(f"ip route add 10.1.{self._routers}.0/24 via 10.9.{self._routers}.1")
        yield Arm(PLAIN, 0, (("10.48.5.2", PORT),))
        for name, start in (
            (OURS, self._start_ours), (IPTABLES, self._start_iptables), (HAPROXY, self._start_haproxy)
        ):  # fmt: skip
            for count in counts if name == OURS or shutil.which(name.lower()) else ():
                space, door = self.router()
                start(space, mapping(count))
                yield Arm(name, count, tuple((door, port) for port in mapping(count).targets))

    def _start_ours(self, space: Space, mapping: Mapping) -> None:
        space.sh("nft -f -", ruleset(mapping))

    def _start_iptables(self, space: Space, mapping: Mapping) -> None:
        space.sh("iptables-restore", iptables(mapping))

    def _start_haproxy(self, space: Space, mapping: Mapping) -> None:
        file = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "haproxy.cfg"
        file.write_text(haproxy(mapping))
        limit = "ulimit -n 20000; exec haproxy -db -f " + str(file)
        process = subprocess.Popen([*space.enter, "sh", "-c", limit], stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        last = max(mapping.targets)
        while f":{last:04X} 00000000:0000 0A" not in space.sh("cat /proc/net/tcp"):
            if process.poll() is not None:
                raise RuntimeError(f"HAProxy ended with {process.returncode}")
            time.sleep(0.1)


def run(settings: Settings) -> Iterator[Table]:
    if os.geteuid() != 0:
        raise Skipped("only root can make network namespaces")
    if missing := [name for name in ("ip", "nft", "unshare", "nsenter") if not shutil.which(name)]:
        raise Skipped(f"there is no {missing[0]} on this machine")
    counts, at_once, rounds = ((16,), (1, 127), 1) if settings.quick else ((16, 256, 2_048), (1, 127, 1_000), 12)
    with ExitStack() as stack:
        network = Network(stack)
        arms = list(network.arms(counts))
        results = _measure(network, arms, at_once, rounds)
    notes = [f"{name}: skipped, it is not installed" for name in (IPTABLES, HAPROXY) if not shutil.which(name.lower())]
    yield _table("A router: new connections per second", "opened together", OPENED, arms, at_once, results, [
        f"median (interval) of {rounds} rounds of {OPEN_S} s; a connection counts when its target has sent a byte",
        "at the last of the targets; the client resets each connection then",
        f"{_version('nft')}, {_version('iptables')}, {_version('haproxy', '-v')}",
        *notes,
    ])  # fmt: skip
    yield _table("A router: Gbit/s", "connections", FILLED, arms, at_once, results, [
        f"median (interval) of {rounds} rounds of {FILL_S} s; the connections go to all the targets in turn",
    ])  # fmt: skip
    yield _aims(arms, at_once, results)


OPENED, FIRST, FILLED = "opened", "opened at the first target", "filled"
Results = dict[tuple[str, Arm, int], list[float]]


def _measure(network: Network, arms: list[Arm], at_once: tuple[int, ...], rounds: int) -> Results:
    results: Results = {}
    client, most = network.client, max(arm.targets for arm in arms)
    for number in range(rounds):
        draw = random.Random(number)  # another order in every round
        turns = [(arm, at) for at in at_once for arm in draw.sample(arms, len(arms))]
        with answering(network.targets, PORT):
            for arm, at in turns:
                results.setdefault((OPENED, arm, at), []).append(opened(client, arm.doors[-1], at, OPEN_S))
                if arm.targets == most:
                    results.setdefault((FIRST, arm, at), []).append(opened(client, arm.doors[0], at, OPEN_S))
        with reading(network.targets, PORT) as count:
            for arm, at in turns:
                doors = [arm.doors[i % len(arm.doors)] for i in range(at)]
                results.setdefault((FILLED, arm, at), []).append(filled(client, doors, count, FILL_S))
    return results


def _table(
    title: str, what: str, kind: str, arms: list[Arm], at_once: tuple[int, ...], results: Results, notes: list[str]
) -> Table:
    form = ".1f" if kind == FILLED else ",.0f"
    rows = [(str(arm), *(median(results[kind, arm, at]).show(form) for at in at_once)) for arm in arms]
    return Table(title, (what, *(f"{at:,}" for at in at_once)), rows, notes)


def _aims(arms: list[Arm], at_once: tuple[int, ...], results: Results) -> Table:
    # medians of the rounds' ratios
    last = {arm.name: arm for arm in arms}  # the one with the most targets
    ours, rows = last[OURS], []
    compared = [
        (
            f"new connections, last of {ours.targets:,} targets over the first",
            MIN_LAST_OVER_FIRST,
            OPENED,
            (FIRST, ours),
        )
    ]
    if IPTABLES in last:
        what = f"new connections at the last of {ours.targets:,} targets, over iptables"
        compared.append((what, MIN_OVER_IPTABLES, OPENED, (OPENED, last[IPTABLES])))
    for direct in (DIRECT, PLAIN):
        compared.append(
            (f"Gbit/s, {ours.targets:,} targets, over {direct}", MIN_OVER_DIRECT, FILLED, (FILLED, last[direct]))
        )
    for what, aim, kind, other in compared:
        row = [what]
        for at in at_once:
            ratio = median([a / b for a, b in zip(results[kind, ours, at], results[*other, at], strict=True)])
            row.append(f"{ratio.show('.2f')} {verdict(ratio.middle >= aim)}")
        rows.append((*row, f"at least {aim}"))
    return Table("A router: the aims", ("connections at once", *(f"{at:,}" for at in at_once), "aim"), rows)


def _version(program: str, option: str = "--version") -> str:
    if not shutil.which(program):
        return f"no {program}"
    done = subprocess.run([program, option], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].partition(" - ")[0]

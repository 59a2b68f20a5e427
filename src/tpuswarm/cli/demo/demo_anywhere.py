"""`tpuswarm demo --anywhere`: two members behind a NAT join a head by its invites, and one of them vanishes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tpuswarm.cli.demo.folder import prepare_folder
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.anywhere.invites import INVITES
from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import EVENTS, read_rows

FOLDER = Path("runs/demo-anywhere")
RUN = "run"
"""The run's folder in it."""
HEAD, PORT = "198.51.100.1", 8443
HOMES = {"ada": "192.168.1.2", "bob": "192.168.2.2"}
VICTIM = "bob"
COMMITS_OF_EACH, COMMITS_ALONE = 2, 3
STEP_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.2
TRAINING = (
    "gpt2-tiny", "--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--batch", "8", "--cycle", "200",
    "--outer", "average", "--steps", "1000000", "--members", "0",
)  # fmt: skip
ROUTER = """
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link add wan type veth peer name wan netns {head}
ip address add 198.51.100.2/24 dev wan
ip link set wan up
nft add table ip nat
nft 'add chain ip nat out {{ type nat hook postrouting priority 100; }}'
nft add rule ip nat out oifname wan masquerade
nft 'add chain ip nat through {{ type filter hook forward priority 0; }}'
nft add rule ip nat through iifname wan ct state new drop
"""
"""A home's router: what comes from the internet enters only as an answer."""
LAN = """
ip link add lan{number} type veth peer name eth0 netns {home}
ip address add 192.168.{number}.1/24 dev lan{number}
ip link set lan{number} up
"""
INTERNET = f"ip link set lo up && ip address add {HEAD}/24 dev wan && ip link set wan up"
HOME = (
    "ip link set lo up && ip address add {address}/24 dev eth0 && ip link set eth0 up && ip route add default via {way}"
)


class Network:
    """A machine's own network, held by a process that ends with this one."""

    def __init__(self, stack: ExitStack):
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        stack.callback(self._holder.communicate)
        stack.callback(self._holder.kill)
        if not self._holder.stdout.readline():
            raise InputError(
                "this machine does not allow network namespaces (unshare --net), which the demo is made of"
            )
        self.pid = self._holder.pid
        self.enter = ("nsenter", "-t", str(self.pid), "--net")
        """The prefix of a command that runs there."""

    def run(self, script: str) -> None:
        done = subprocess.run([*self.enter, "sh", "-ec", script], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailed(f"the demo's network could not be made: {done.stderr.strip()}")


def demo_anywhere() -> None:
    """Run the demo and say what happens. Raise InputError where it cannot run, RunFailed if a step takes too long."""
    _require_namespaces()
    prepare_folder(FOLDER)
    start = time.monotonic()
    echo(
        f"A head at {HEAD}, on an internet of its own, and two homes behind a router that lets no connection in. Both\n"
        f"join by an invite and train one model; then {VICTIM}'s computer vanishes. Two to three minutes.",
        err=True,
    )
    with ExitStack() as stack:
        networks = _make_networks(stack)
        demo = Demo(stack, networks)
        demo.start_head()
        for person in HOMES:
            demo.join(person)
        demo.wait_until("both train", lambda: min(map(demo.count_commits, HOMES)) >= COMMITS_OF_EACH)
        demo.show_that_nothing_gets_in()
        demo.kill(VICTIM)
        demo.wait_until(f"the head misses {VICTIM}", lambda: demo.events("lost"))
        alone = len(demo.events("commit"))
        demo.wait_until("the run goes on", lambda: len(demo.events("commit")) >= alone + COMMITS_ALONE)
        demo.stop()
    demo.tpuswarm("status", RUN)
    demo.tpuswarm("ledger", "verify", RUN)
    echo(f"done in {time.monotonic() - start:.0f} s; the run is {FOLDER}/{RUN}")


def _require_namespaces() -> None:
    if missing := [program for program in ("ip", "nft", "nsenter", "unshare") if shutil.which(program) is None]:
        raise InputError(
            f"the demo makes networks with {', '.join(missing)}: install iproute2, nftables and util-linux"
        )
    if os.geteuid() != 0:
        raise InputError("the demo makes networks of its own, which needs root: sudo make demo-anywhere")


def _make_networks(stack: ExitStack) -> dict[str, Network]:
    networks = {name: Network(stack) for name in ("head", "router", *HOMES)}
    script = ROUTER.format(head=networks["head"].pid)
    for number, person in enumerate(HOMES, 1):
        script += LAN.format(number=number, home=networks[person].pid)
    networks["router"].run(script)
    networks["head"].run(INTERNET)
    for number, (person, address) in enumerate(HOMES.items(), 1):
        networks[person].run(HOME.format(address=address, way=f"192.168.{number}.1"))
    return networks


class Demo:
    """Runs commands in the networks, each with a cache of its own."""

    def __init__(self, stack: ExitStack, networks: dict[str, Network]):
        self._stack, self._networks = stack, networks
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._printed = 0
        """Events that were printed."""

    def start_head(self) -> None:
        words = ["train", *TRAINING, "--run", RUN, "--listen", f"{HEAD}:{PORT}", "--address", HEAD]
        self._start("head", words)
        self.wait_until("the head listens", (FOLDER / RUN / INVITES).exists)

    def join(self, person: str) -> None:
        """Join from a person's home, with nothing but an invite."""
        done = self.tpuswarm("invite", RUN, person, shows=False)
        process = self._start(person, ["join", "-", "--name", "home"])
        assert process.stdin is not None
        process.stdin.write(done)
        process.stdin.flush()

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[str]:
        where = HEAD if name == "head" else HOMES[name]
        echo(f"\n{name} ({where})$ tpuswarm {' '.join(words)}")
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        environment |= {"TPUSWARM_CACHE": str((FOLDER / name).absolute()), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            [*self._networks[name].enter, sys.executable, "-P", "-m", "tpuswarm", *words], cwd=FOLDER, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._processes[name] = process
        self._stack.callback(_kill_tree, process)
        threading.Thread(target=self._copy_output, args=(name, process), daemon=True).start()
        return process

    def _copy_output(self, name: str, process: subprocess.Popen[str]) -> None:
        """Write a log; show what members say until they train."""
        assert process.stdout is not None
        is_shown = name != "head"
        with (FOLDER / f"{name}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                is_shown = is_shown and not line.startswith("step ")
                if is_shown:
                    echo(f"{name}: {line.rstrip()}")

    def tpuswarm(self, *words: str, shows: bool = True) -> str:
        """Run a command here, beside the head, and show its output, or return it."""
        if shows:
            echo(f"\n$ tpuswarm {' '.join(words)}")
        command = [sys.executable, "-P", "-m", "tpuswarm", *words]
        done = subprocess.run(command, cwd=FOLDER, capture_output=not shows, text=True, check=False)
        if done.returncode:
            raise RunFailed(f"tpuswarm {' '.join(words)} ended with {done.returncode}: {done.stderr or ''}")
        return done.stdout or ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(FOLDER / RUN / EVENTS) if row["event"] == kind]

    def count_commits(self, person: str) -> int:
        """Return how many commits count work of a person."""
        contributors = [[part["member"] for part in event["contributors"]] for event in self.events("commit")]
        return sum(f"{person}-home" in members for members in contributors)

    def wait_until(self, goal: str, is_reached: Callable[[], Any]) -> None:
        """Print the run's events until a goal is reached."""
        echo(f"\nwaiting until {goal}")
        end = time.monotonic() + STEP_TIMEOUT_S
        while True:
            self._print_events()
            if is_reached():
                return
            head = self._processes["head"]
            if head.poll() is not None or time.monotonic() > end:
                log = (FOLDER / "head.log").read_text()[-1000:]
                raise RunFailed(f"{goal}: not within {STEP_TIMEOUT_S:.0f} s, or the head ended:\n{log}")
            time.sleep(POLL_INTERVAL_S)

    def _print_events(self) -> None:
        rows = list(read_rows(FOLDER / RUN / EVENTS))
        for row in rows[self._printed :]:
            if row["event"] in ("joined", "commit", "lost", "left"):
                echo(f"head: {sentence(row)}")
        self._printed = len(rows)

    def show_that_nothing_gets_in(self) -> None:
        address = HOMES[VICTIM]
        script = f"import socket; socket.create_connection(('{address}', 22), 3)"
        self._networks["head"].run(f"ip route replace {address} via 198.51.100.2")
        done = subprocess.run(
            [*self._networks["head"].enter, sys.executable, "-c", script], stderr=subprocess.PIPE, check=False
        )
        answer = "the head cannot connect" if b"timed out" in done.stderr else "the head CAN connect"
        echo(f"\n{answer} to {address}: members call, nobody calls them")

    def kill(self, person: str) -> None:
        echo(f"\nkill -9 everything of {person}'s")
        _kill_tree(self._processes[person])

    def stop(self) -> None:
        """Stop the run, as Ctrl-C does, and wait for its end."""
        echo("\nCtrl-C on the head: the last work is pushed")
        head = self._processes["head"]
        head.send_signal(signal.SIGINT)
        if head.wait(STEP_TIMEOUT_S) not in (0, 130):
            raise RunFailed(f"the head ended with {head.returncode}: {(FOLDER / 'head.log').read_text()[-1000:]}")
        self._print_events()


def _kill_tree(process: "subprocess.Popen[str]") -> None:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for child in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()

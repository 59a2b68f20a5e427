"""`ssh`: the user's own OpenSSH, in a terminal as a person has it."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace

from tests.processes import finish
from tests.remote.machines import start_machines
from tests.terminal import PROGRAM, terminal


def test_command_returns_its_exit_code_and_reads_a_pipe(fleet):
    out, _ = finish(fleet.start("ssh", "v5e/2", "--", "echo $TPUSWARM_REHEARSAL_MACHINE; exit 7"), 7)
    assert out.startswith("v5e-usc1a-0-2-")
    line = f"echo echo from a pipe | {PROGRAM} ssh v2"
    done = subprocess.run(line, shell=True, cwd=fleet.folder, env=fleet.environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "from a pipe\n", done


def test_command_has_the_environment_of_set_up(fleet):
    fleet.run("ssh", "v2", "--", "mkdir -p ~/.tpuswarm; echo export GREETING=hello >~/.tpuswarm/environment")
    try:
        assert finish(fleet.start("ssh", "v2", "--", "echo $GREETING"))[0] == "hello\n"
    finally:
        fleet.run("ssh", "v2", "--", "rm ~/.tpuswarm/environment")


LOG_IN = """
import json, sys, typer
from pathlib import Path
from types import SimpleNamespace
from tpuswarm.cli.machine import ssh
from tpuswarm.remote.host import Host

def hosts(name):
    about = json.loads(Path("route.json").read_text())
    return [Host(**{**about, "keys": tuple(about["keys"]), "known_hosts": Path(about["known_hosts"])})], ()

ssh.find_fleet = lambda fleet: (None, None)
ssh.open_routes = lambda fleet: SimpleNamespace(hosts=hosts, key=Path("key").absolute())
sys.argv = ["ssh", "node-0"]
typer.run(ssh.ssh)
"""


def test_shell_comes_back_to_the_same_tmux_after_a_lost_connection_at_another_address(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("m")  # the path of a socket is at most 107 bytes long
    with start_machines(tmp_path, 1) as machines:
        (host,) = machines.hosts

        def route(address: str) -> None:
            about = dataclasses.asdict(replace(host, address=address))
            (tmp_path / "route.json").write_text(json.dumps(about, default=str))

        route(host.address)
        with terminal([sys.executable, "-c", LOG_IN], tmp_path) as shown:
            shown.wait("[tpuswarm]")
            shown.send(b"answer=$((41 + 1)); echo it is $answer\n")
            shown.wait("it is 42")
            moved = host.address.removesuffix("1") + "77"
            machines.move(0, moved)
            shown.wait(lambda screen: b"lost; reconnecting" in b" ".join(screen.written.split()))
            route(moved)
            shown.wait(lambda screen: screen.written.count(b"[?1049h") == 2)  # tmux has begun
            shown.send(b"echo still $answer\n")
            shown.wait("still 42")
            shown.send(b"exit\n")
            shown.finish()


def test_plain_shell_where_tmux_does_not_know_the_terminal(fleet):
    with terminal(["ssh", "v2"], fleet.folder, env={**fleet.environment, "TERM": "unheard-of"}) as shown:
        shown.wait(lambda screen: "unsuitable terminal" in screen.flowing)
        shown.send(b"echo a $((41 + 2))\n")
        shown.wait("a 43")
        assert "getting ready" in shown.written.decode() and "getting ready" not in shown.text
        shown.send(b"exit\n")
        shown.finish()

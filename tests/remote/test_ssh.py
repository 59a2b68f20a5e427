"""`ssh`: the user's own OpenSSH, in a terminal as a person has it."""

import os
import signal
import subprocess
from pathlib import Path

from tests.terminal import PROGRAM, terminal


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_command_and_its_exit_code(fleet):
    out, _ = fleet.run("ssh", "v5e/2", "--", "echo $TPUSWARM_REHEARSAL_MACHINE; exit 7", code=7)
    assert out.startswith("v5e-usc1a-0-2-")
    done = subprocess.run(
        [PROGRAM, "ssh", "v2"], cwd=fleet.folder, env=fleet.environment, input="echo from a pipe\n",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "from a pipe\n", done
    assert "v5e-usc1a-0 has no worker '7'" in fleet.run("ssh", "v5e/7", code=2)[1]


def test_a_lost_connection_is_made_again(fleet):
    with terminal(["ssh", "v2"], fleet.folder, env=fleet.environment) as shown:
        shown.wait("#")
        shown.send(b"echo it is $((41 + 1))\n")
        shown.wait("it is 42")
        ssh = children(shown.process.pid)[0]
        os.kill(ssh, signal.SIGTERM)  # OpenSSH ends with 255 then, as where the network breaks
        shown.wait(lambda screen: "is lost; it is made again" in screen.flowing)
        shown.wait(lambda screen: screen.screen.count("#") >= 3)
        shown.send(b"echo still $((41 + 2))\n")
        shown.wait("still 43")
        shown.send(b"exit\n")
        shown.finish()

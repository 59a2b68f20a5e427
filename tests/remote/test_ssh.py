"""`ssh`: the user's own OpenSSH, in a terminal as a person has it."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.terminal import terminal


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_command_and_its_exit_code(fleet):
    out, _ = fleet.run("ssh", "v5e/2", "--", "echo $TPUSWARM_REHEARSAL_MACHINE; exit 7", code=7)
    assert out.startswith("v5e-usc1a-0-2-")
    done = subprocess.run(
        [*fleet.start("ssh", "v2").args], cwd=fleet.folder, env=fleet.environment, input="echo from a pipe\n",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "from a pipe\n", done
    assert "v5e-usc1a-0 has no worker '7'" in fleet.run("ssh", "v5e/7", code=2)[1]


def test_a_shell_outlives_its_connection(fleet):
    with terminal(["ssh", "v2"], fleet.folder, env=fleet.environment) as shown:
        shown.wait(lambda screen: "$" in screen.text or "#" in screen.text)
        shown.send(b"n=41; echo it is $((n + 1))\n")
        shown.wait("it is 42")
        end = time.monotonic() + 60
        while not (ssh := children(shown.process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(ssh[0], signal.SIGTERM)  # as a network that breaks
        shown.wait(lambda screen: "is lost; it is made again" in screen.flowing)
        shown.wait(lambda screen: "it is 42" in screen.screen)  # tmux draws again what was there
        shown.send(b"echo still $((n + 2))\n")
        shown.wait("still 43")
        shown.send(b"exit\n")
        shown.finish()

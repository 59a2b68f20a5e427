"""`forward` and `ssh-config`: ports that come back, and OpenSSH's own programs on machines that are found each time."""

import asyncio
import http.client
import signal
import socket
import subprocess
from contextlib import suppress

import pytest

from tests.cloud.rehearsal.conftest import until
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.errors import InputError
from tpuswarm.remote.forward import forward, ports


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(("text", "found"), [("8888", (8888, 8888)), ("8889:8888", (8889, 8888))])
def test_ports_are_given_once_or_twice(text, found):
    assert ports(text) == found


@pytest.mark.parametrize("text", ["0", "65536", "x", "1:", ":1", "1:2:3", ""])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(InputError, match=r"^a port here and one there are like 8888"):
        ports(text)


def test_a_forwarded_port_answers_and_comes_back_after_a_lost_connection(here):
    port, said = free_port(), []

    async def page() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"ping\n")
        answer = await reader.readline()
        writer.close()
        return answer.decode()

    async def answers() -> str:
        while True:
            with suppress(OSError):
                if found := await page():
                    return found
            await asyncio.sleep(0.05)

    async def echo(reader, writer):
        writer.write(b"pong " + await reader.readline())
        writer.close()

    async def work():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        there = server.sockets[0].getsockname()[1]

        asked = []

        async def find():
            asked.append(1)
            if len(asked) == 2:
                raise Unreachable("listing TPUs: Google Cloud cannot be reached; is this computer online?")
            if len(asked) == 3:
                raise InputError("node-0 is repairing, not ready")
            return here.hosts[0]

        async with here.connections() as connections:
            task = asyncio.create_task(forward(connections, find, port, there, said.append))
            assert await answers() == "pong ping\n"
            await asyncio.to_thread(here.cut, 0)
            while not any("was lost" in each for each in said):
                await asyncio.sleep(0.02)
            assert await answers() == "pong ping\n"
            with pytest.raises(InputError, match=rf"^port {port} of this computer is taken .*{port + 1}:{there}"):
                await forward(connections, find, port, there, said.append)
            task.cancel()
        server.close()

    asyncio.run(work())
    assert said[0] == said[4] and "Ctrl-C ends it" in said[0]
    assert "was lost" in said[1] and said[2].endswith("online?; retrying in 1 s") and "is repairing" in said[3]


def test_the_command_says_where_it_is_and_ends_with_ctrl_c(fleet):
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[1]
        process = fleet.start("forward", "v2-usc1f-0", f"{port}:{there}")
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port} is port {there} of v2-usc1f-0/0")
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("GET", "/")
        accepted, _ = server.accept()
        assert accepted.recv(5) == b"GET /"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        accepted.close()
        client.close()
    assert "name one" in fleet.run("forward", "all", "8888", code=2)[1]


@pytest.fixture
def config(fleet):
    out, _ = fleet.run("ssh-config")
    assert "has 5 hosts" in out and "Include ~/.ssh/tpuswarm.d/*.config" in out
    return fleet.folder / ".ssh/tpuswarm.d/trio.config"


def test_openssh_scp_and_rsync_know_every_machine(fleet, config, tmp_path):
    def run(*words):
        done = subprocess.run(words, env=fleet.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name in ("v2-usc1f-0", "v5e-usc1a-0/3", "v5e-usc1a-0.3"):
        machine = run("ssh", "-F", config, name, "echo $TPUSWARM_REHEARSAL_MACHINE").strip()
        assert machine.startswith(name.replace("/", "-").replace(".", "-"))
    (tmp_path / "file").write_text("text")
    run("scp", "-F", config, tmp_path / "file", "v5e-usc1a-0.2:copied")
    assert (fleet.user_home("v5e-usc1a-0-2") / "copied").read_text() == "text"
    run("rsync", "-a", "-e", f"ssh -F {config}", f"{tmp_path}/file", "v5e-usc1a-0.1:synced/")
    assert (fleet.user_home("v5e-usc1a-0-1") / "synced/file").read_text() == "text"


def test_a_machine_that_nobody_knows_is_refused_in_a_sentence(fleet, config):
    config.write_text(config.read_text().replace("v2-usc1f-0/0", "v2-usc1f-9/0"))
    done = subprocess.run(
        ["ssh", "-F", config, "v2-usc1f-0", "true"], env=fleet.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 255 and "there is no machine 'v2-usc1f-9'" in done.stderr


def machines_of(fleet) -> list[dict]:
    """As the cloud has them."""
    from tpuswarm.cloud.rehearsal.client import ask

    return ask(fleet.place, "status")["machines"]


def test_a_machine_made_again_is_known_at_once_by_its_new_keys(fleet, config):
    """As after a preemption: same name, other addresses, other keys."""
    known = until(lambda: subprocess.run(
        ["ssh", "-F", config, "v2-usc1f-0", "true"], env=fleet.environment, timeout=60).returncode == 0)  # fmt: skip
    assert known
    before = fleet.home("v2-usc1f-0-0").name
    config.write_text(
        config.read_text().replace("Host v2-usc1f-0/0 ", "Host v2-usc1f-9/0 ")
    )  # as of machines before it
    from tpuswarm.cloud.rehearsal.client import ask

    ask(fleet.place, "preempt", name="v2-usc1f-0")
    until(lambda: ("v2-usc1f-0", "READY") not in {(each["name"], each["state"]) for each in machines_of(fleet)})
    fleet.run("up", "--yes", "--paid")
    done = subprocess.run(
        ["ssh", "-F", config, "v2-usc1f-0", "echo $TPUSWARM_REHEARSAL_MACHINE"], env=fleet.environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() not in ("", before)
    assert (
        "Host v2-usc1f-0/0 v2-usc1f-0.0 v2-usc1f-0\n" in config.read_text() and "v2-usc1f-9" not in config.read_text()
    )

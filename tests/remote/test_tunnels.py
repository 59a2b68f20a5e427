"""`forward` and `ssh-config`: ports that come back, and OpenSSH's own programs on machines that are found each time."""

import asyncio
import http.client
import socket
import subprocess
from contextlib import suppress

import pytest

from tests.hosts import free_port
from tests.remote.conftest import HOSTS, ONE
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.errors import InputError
from tpuswarm.remote import forward as forwarding
from tpuswarm.remote.forward import forward, parse_ports


def test_ports_are_given_once_or_twice():
    assert parse_ports("8888") == (8888, 8888) and parse_ports("8889:8888") == (8889, 8888)
    for text in ("0", "65536", "x", "1:", ":1", "1:2:3", ""):
        with pytest.raises(InputError, match=r"^ports are like 8888"):
            parse_ports(text)


def test_forwarded_port_comes_back_after_a_lost_connection(machines, monkeypatch):
    monkeypatch.setattr(forwarding, "RETRY_S", 0.1)
    port, printed = free_port(), []

    async def answer() -> str:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"ping\n")
                line = await reader.readline()
                writer.close()
                if line:
                    return line.decode()
            await asyncio.sleep(0.05)

    async def echo(reader, writer):
        writer.write(b"pong " + await reader.readline())
        writer.close()

    async def work():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        there = server.sockets[0].getsockname()[1]
        errors = [None, Unreachable("is this computer online?"), InputError("node-0 is repairing, not ready"), None]

        async def find():
            if error := errors.pop(0):
                raise error
            return machines.hosts[0]

        async with machines.connections() as connections:
            task = asyncio.create_task(forward(connections, find, port, there, printed.append))
            assert await answer() == "pong ping\n"
            await asyncio.to_thread(machines.disconnect, 0)
            while not any("was lost" in text for text in printed):
                await asyncio.sleep(0.02)
            assert await answer() == "pong ping\n" and not errors
            errors.append(None)
            with pytest.raises(InputError, match=rf"^another program .* {port}; .*{port + 1}:{there}"):
                await forward(connections, find, port, there, printed.append)
            task.cancel()
        server.close()

    asyncio.run(work())
    assert printed[0] == printed[4] and "Ctrl-C ends it" in printed[0]
    assert "was lost" in printed[1] and "online?; retrying in 0.1 s" in printed[2] and "is repairing" in printed[3]


def test_forward_says_where_it_is_and_ends_with_ctrl_c(fleet):
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[1]
        process = fleet.start("forward", ONE, f"{port}:{there}")
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port} is port {there} of {HOSTS[0]}")
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("GET", "/")
        accepted, _ = server.accept()
        assert accepted.recv(5) == b"GET /"
        fleet.interrupt(process)
        accepted.close()
        client.close()
    assert "name one" in fleet.run("forward", "all", "8888", code=2)[1]


def test_ssh_scp_and_rsync_know_every_machine_and_refuse_others_in_a_sentence(fleet, tmp_path):
    out, _ = fleet.run("ssh-config")
    assert "with 5 hosts" in out and "Include ~/.ssh/tpuswarm.d/*.config" in out
    config = fleet.folder / ".ssh/tpuswarm.d/trio.config"

    def run(*words, code=0):
        done = subprocess.run(words, env=fleet.environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    line = "echo $TPUSWARM_REHEARSAL_MACHINE"
    assert "v5e-usc1a-0-3-" in run("ssh", "-F", config, "v5e-usc1a-0/3", line)
    (tmp_path / "file").write_text("text")
    run("scp", "-F", config, tmp_path / "file", "v5e-usc1a-0.2:copied")
    assert (fleet.user_home("v5e-usc1a-0-2") / "copied").read_text() == "text"
    run("rsync", "-a", "-e", f"ssh -F {config}", f"{tmp_path}/file", f"{ONE}:synced/")
    assert (fleet.user_home(f"{ONE}-0") / "synced/file").read_text() == "text"
    config.write_text(config.read_text().replace(HOSTS[0], "v2-usc1f-9/0"))
    assert "there is no machine 'v2-usc1f-9'" in run("ssh", "-F", config, ONE, "true", code=255)

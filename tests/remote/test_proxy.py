"""Hosts without an external address: through a VM of the fleet by `ssh -W`, or by Google's tunnel."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tpuswarm.cloud.protocol import Machine, Worker
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.targets import Target
from tpuswarm.remote.connect import run_shell
from tpuswarm.remote.copy import upload
from tpuswarm.remote.host import Host, openssh_command

GCLOUD = """\
#!{python}
import os, shutil, socket, sys, threading
with open("{log}", "a") as log:
    print(*sys.argv[1:], file=log)
port = socket.create_connection(("{address}", {port}))
threading.Thread(target=shutil.copyfileobj, args=(port.makefile("rb", 0), open(1, "wb", 0)), daemon=True).start()
while data := os.read(0, 65536):
    port.sendall(data)
"""
"""A stand-in for Google's tunnel: the machine's port at standard input and output."""


def proxy(key: Path, kind: str, jump: Host | None) -> str:
    machine = Machine("node-1", "us-central1-a", kind, "t", "ready", "READY", workers=(Worker("10.0.0.2", None),))  # type: ignore[arg-type]
    fleet = cast(Any, SimpleNamespace(key=key, _cloud=SimpleNamespace(project="mine")))
    return Routes._proxy_command(fleet, Target(machine, 0), jump)


def check_route(machines, host: Host, tmp_path: Path) -> None:
    (tmp_path / "python.tar").write_bytes(os.urandom(300_000))

    line, name = "echo $TPUSWARM_REHEARSAL_MACHINE", machines[1].id
    machines.run(lambda connections: upload(connections, host, tmp_path / "python.tar", "python.tar"))
    assert (machines[1].home / "python.tar").read_bytes() == (tmp_path / "python.tar").read_bytes()
    assert machines.run(lambda connections: run_shell(connections, host, line))[1].decode().strip() == name
    words = [*openssh_command(host, machines.key), f"{host.user}@{host.address}", line]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == name, done.stderr


def test_connection_through_a_vm_of_the_fleet(machines, tmp_path):
    jump, target = machines.hosts[:2]
    check_route(machines, replace(target, proxy=proxy(machines.key, "tpu", jump)), tmp_path)


def test_connection_through_googles_tunnel(machines, tmp_path, monkeypatch):
    target = machines.hosts[1]
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gcloud").write_text(
        GCLOUD.format(python=sys.executable, log=tmp_path / "calls", address=target.address, port=target.port)
    )
    (folder / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    # Only the tunnel leads to this address.
    check_route(machines, replace(target, address="127.255.255.254", proxy=proxy(machines.key, "vm", None)), tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert set(calls) == {
        f"compute start-iap-tunnel node-1 {target.port} --listen-on-stdin --zone us-central1-a --project mine"
    }


def test_fleet_without_a_route_says_what_to_add(tmp_path):
    with pytest.raises(InputError, match=r"^node-1 has no external address, and no \[\[vm\]\] or \[head\]"):
        proxy(tmp_path / "key", "tpu", None)

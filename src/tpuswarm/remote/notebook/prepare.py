"""Write a notebook's files on this host; print the packages that it lacks. Python 3.10, sent as a program's text.

Standard input is JSON: `needs`, packages; `files`, texts by path below ~/.tpuswarm/notebook; `server`, the
configuration of a server that starts now and its earlier port, or null.
"""

import importlib.util
import json
import os
import secrets
import socket
import sys
from pathlib import Path

FOLDER = Path.home().joinpath(".tpuswarm/notebook")


def write(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(path.name + ".new")
    new.touch(0o600)
    new.write_text(text)
    new.replace(path)


def free_port(wanted: int) -> int:
    """Return this port of the loopback if it is free, else another one."""
    try:
        with socket.create_server(("127.0.0.1", wanted)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return free_port(0)


request = json.load(sys.stdin)
lacks = [package for package in request["needs"] if importlib.util.find_spec(package) is None]
secret = FOLDER / "secret"
if not lacks:
    os.umask(0o077)
    if not secret.exists():
        write(secret, secrets.token_hex(32))
    for name, text in request["files"].items():
        write(FOLDER / name, text)
    if server := request["server"]:
        server["config"]["ServerApp"]["port"] = free_port(server["port"] or 0)
        write(FOLDER / "config" / "jupyter_server_config.json", json.dumps(server["config"]))
sys.stdout.write(json.dumps({"lacks": lacks, "secret": "" if lacks else secret.read_text()}) + "\n")

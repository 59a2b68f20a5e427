"""On a host: looks whether it has what a notebook needs, and writes the files of one. Says what it found as JSON.

This file is sent to the host as a program's text and needs nothing but Python 3.10 there. On standard input: `needs`,
packages; `files`, by their paths below ~/.tpuswarm/notebook; `begins`, the configuration of a server that begins now,
and the port that it had before, if any; null where none begins.
"""

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

OURS = Path.home() / ".tpuswarm" / "notebook"
SERVER = OURS / "config" / "jupyter_server_config.json"


def write(path: Path, text: str) -> None:
    """A file for its owner alone, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(path.name + ".new")
    new.touch(0o600)
    new.write_text(text)
    new.replace(path)


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def say(what: "dict[str, Any]") -> None:
    """The answer."""
    sys.stdout.write(json.dumps(what) + "\n")


def main() -> None:
    """All of it."""
    asked = json.load(sys.stdin)
    lacks = [each for each in asked["needs"] if importlib.util.find_spec(each) is None]
    if lacks:
        say({"lacks": lacks})
        return
    os.umask(0o077)
    for name, text in asked["files"].items():
        write(OURS / name, text)
    if (begins := asked["begins"]) is not None:
        port = begins["port"]
        if port is None or not is_free(port):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        server = json.loads(begins["config"])
        server["ServerApp"]["port"] = port
        write(SERVER, json.dumps(server))
    say({"lacks": []})


main()

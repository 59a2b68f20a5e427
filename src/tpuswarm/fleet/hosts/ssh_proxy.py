"""The ProxyCommand of `tpuswarm ssh-config`: find a host's current address, store its host keys, and connect.

python -m tpuswarm.fleet.hosts.ssh_proxy FLEET-FOLDER NAME/WORKER
"""

import json
import os
import socket
import sys
import threading
from pathlib import Path

from tpuswarm.errors import TpuswarmError
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.hosts.ssh_config import host_alias, known_hosts_file
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.train.process.atomic import write_atomically

CONNECT_TIMEOUT_S = 20.0
CHUNK_BYTES = 1 << 16


def main() -> None:
    folder, label = sys.argv[1:]
    try:
        fleet = Fleet(**json.loads((Path(folder) / "fleet.json").read_text(encoding="utf-8")))
        (host,), _ = open_routes(fleet).hosts(label)
        file = known_hosts_file(fleet, label)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(f"{host_alias(label)} {key}\n" for key in host.keys), is_shared=True)
        if host.proxy:
            command = host.proxy.replace("%h", host.address).replace("%p", str(host.port))
            os.execvp("sh", ["sh", "-c", f"exec {command}"])
        _forward(socket.create_connection((host.address, host.port), CONNECT_TIMEOUT_S))
    except (TpuswarmError, OSError) as error:
        sys.stderr.write(f"tpuswarm: {label}: {error}\n")
        sys.exit(255)


def _forward(connection: socket.socket) -> None:
    connection.settimeout(None)

    def send() -> None:
        while data := os.read(0, CHUNK_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while data := connection.recv(CHUNK_BYTES):
        os.write(1, data)


if __name__ == "__main__":
    main()

"""Run the local cloud's server: `python -m tpuswarm.cloud.rehearsal.server FOLDER`.

It ends with SIGTERM, with its folder, or with the process in $TPUSWARM_REHEARSAL_OWNER: killed tests leave none behind.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

from tpuswarm.cloud.rehearsal.accounts import Accounts
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE, CloudFolder
from tpuswarm.cloud.rehearsal.control import Control
from tpuswarm.cloud.rehearsal.machines.folders import Folders
from tpuswarm.cloud.rehearsal.machines.machines import Backend, Machines
from tpuswarm.cloud.rehearsal.storage.bucket_faults import BucketFaults
from tpuswarm.cloud.rehearsal.storage.objects import Objects
from tpuswarm.cloud.rehearsal.storage.service import Storage
from tpuswarm.cloud.rehearsal.wire import rpc
from tpuswarm.cloud.rehearsal.wire.application import application
from tpuswarm.cloud.rehearsal.wire.http import Guard, HttpServer
from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.train.process.locks import lock

OWNER_VARIABLE = "TPUSWARM_REHEARSAL_OWNER"
OWNER_CHECK_INTERVAL_S = 2.0
BLOCK_PORT = 2220
FIRST_BLOCK, LAST_BLOCK = 16, 250
MakeBackend = Callable[[CloudFolder, Cloud, HttpServer, str], Backend]
"""Gets the URL of the cloud's buckets last."""


async def serve(folder: CloudFolder, make_backend: MakeBackend, network: str | None) -> None:
    """Serve until SIGTERM, or until the folder or the owner is gone."""
    should_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, should_end.set)
    address = folder.read_address() or {}
    block, block_listener = reserve_block(folder.path, address.get("block"))
    token = folder.token()
    cloud = Cloud(folder.state, network or f"127.{block}")
    listener = _listen(address.get("http", 0))
    storage_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    faults = BucketFaults(cloud.records)
    objects = Objects(cloud.records, folder.objects, faults.check_write)
    storage = Storage(objects, faults, cloud.policies)
    accounts = Accounts(cloud.policies, objects.bucket, token)
    control = Control(cloud, folder, storage_url, objects, faults)
    http = HttpServer(Guard(application(cloud, storage, [*control.routes(), *accounts.routes(cloud.answer)]), token))
    machines = Machines(cloud, make_backend(folder, cloud, http, storage_url))
    rpc_server, rpc_port = await rpc.serve(cloud, token, address.get("rpc", 0))
    await http.start(listener)
    await machines.start()
    timetable = asyncio.create_task(cloud.timetable.run())
    address_file = folder.write_address(
        pid=os.getpid(), rpc=rpc_port, http=listener.getsockname()[1], block=block, started=time.time()
    )
    owner = Path("/proc", os.environ.get(OWNER_VARIABLE) or "self")
    while not should_end.is_set() and folder.address.exists() and owner.exists():
        try:
            await asyncio.wait_for(should_end.wait(), OWNER_CHECK_INTERVAL_S)
        except TimeoutError:
            continue
    timetable.cancel()
    await machines.stop()
    await asyncio.gather(http.stop(), rpc_server.stop(1))
    cloud.records.close()
    block_listener.close()
    address_file.close()


def reserve_block(folder: Path, block: int | None) -> tuple[int, socket.socket]:
    """Reserve a block B of addresses 127.B.0.0/16; the returned socket holds it until it is closed.

    None: any block that no other local cloud holds. Raises RunFailed if there is none.
    """
    count = LAST_BLOCK - FIRST_BLOCK + 1
    first = zlib.crc32(str(folder).encode()) % count
    blocks = [FIRST_BLOCK + (first + step) % count for step in range(count)] if block is None else [block]
    for candidate in blocks:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((f"127.{candidate}.0.1", BLOCK_PORT))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return candidate, listener
    blocks_taken = f"127.{block}.0.0/16" if block is not None else "127.16.0.0 to 127.250.255.255"
    raise RunFailed(f"other local clouds use {blocks_taken}, which {folder} needs for its machines; stop one")


def _listen(port: int) -> socket.socket:
    """Listen on `port` of 127.0.0.1, or on another one if that is taken."""
    for candidate in (port, 0):
        # asyncio turns off Nagle's algorithm, which delays answers by 40 ms, only if the protocol number says TCP.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", candidate))
        except OSError:
            listener.close()
            continue
        return listener
    raise OSError("127.0.0.1 has no free port")


def main(folder_path: str, make_backend: MakeBackend = Folders, network: str | None = None) -> int:
    """Serve unless another process does; write an error at the start as the log's last line.

    network: the first two numbers of the machines' addresses; None: some on loopback.
    """
    folder = CloudFolder(Path(folder_path))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    # asyncssh drops coroutines when a connection breaks.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Each machine listens on three addresses.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.version_info < (3, 12):  # otherwise a thread waits for each process
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    with folder.lock.open("w") as file:
        try:
            lock(file, f"set {FOLDER_VARIABLE} to a folder on a local disk")
            asyncio.run(serve(folder, make_backend, network))
        except BlockingIOError:  # another process serves
            return 0
        except (TpuswarmError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

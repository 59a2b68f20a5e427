"""The server: `python -m tpuswarm.cloud.rehearsal.server FOLDER`. It ends when it is told to, or with its folder.

Where $TPUSWARM_REHEARSAL_OWNER has the id of a process, it also ends when that one is gone, however it ended: a run of
tests that was killed leaves nothing behind.
"""

import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

from tpuswarm.cloud.rehearsal import block
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.control import Control
from tpuswarm.cloud.rehearsal.machines.machines import Machines
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.cloud.rehearsal.web.bucket_faults import BucketFaults
from tpuswarm.cloud.rehearsal.web.objects import Objects
from tpuswarm.cloud.rehearsal.web.storage import Storage
from tpuswarm.cloud.rehearsal.wire import rpc
from tpuswarm.cloud.rehearsal.wire.application import application
from tpuswarm.cloud.rehearsal.wire.guard import Guard
from tpuswarm.cloud.rehearsal.wire.web import Web
from tpuswarm.errors import TpuswarmError

OWNER = "TPUSWARM_REHEARSAL_OWNER"
LOOK_S = 2.0
"""Between two looks whether the folder and the owner are still there."""


async def serve(place: Place) -> None:
    """Until SIGTERM."""
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    known = place.read_address() or {}
    addresses, held = block.hold(place.folder, known.get("block"))
    token = place.token()
    cloud = Cloud(place.state, addresses)
    listener = _listen(known.get("http", 0))
    port = listener.getsockname()[1]
    faults = BucketFaults(cloud.records)
    objects = Objects(cloud.records, place.objects, faults.check_write)
    storage = Storage(objects, faults)
    control = Control(cloud, lambda: machines, objects, faults)
    web = Web(Guard(application(cloud, storage, control.routes()), token))
    machines = Machines(place, cloud, web, f"http://127.0.0.1:{port}", cloud.facts)
    rpc_server, rpc_port = await rpc.serve(cloud, token, known.get("rpc", 0))
    await web.start(listener)
    await machines.start()
    timetable = asyncio.create_task(cloud.timetable.run())
    place.write_address(pid=os.getpid(), rpc=rpc_port, http=port, block=addresses, started=time.time())
    owner = Path("/proc", os.environ.get(OWNER) or "self")
    while not over.is_set() and place.address.exists() and owner.exists():
        try:
            await asyncio.wait_for(over.wait(), LOOK_S)
        except TimeoutError:
            continue
    timetable.cancel()
    await machines.stop()
    await asyncio.gather(web.stop(), rpc_server.stop(1))
    cloud.records.close()
    held.close()


def _listen(port: int) -> socket.socket:
    """On `port` of 127.0.0.1, or on another one if that is taken."""
    for each in (port, 0):
        # asyncio turns off Nagle's algorithm, which delays answers by 40 ms, only where the protocol number says TCP.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", each))
        except OSError:
            listener.close()
            continue
        return listener
    raise OSError("127.0.0.1 has no free port")


def main(folder: str) -> int:
    """Serve, unless another process does; what goes wrong at the start is the log's last line."""
    place = Place(Path(folder))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    # asyncssh leaves behind what it would have waited for when a connection is cut.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Each machine listens on three addresses.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.version_info < (3, 12):  # else a thread waits for each process
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    with place.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        try:
            asyncio.run(serve(place))
        except (TpuswarmError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

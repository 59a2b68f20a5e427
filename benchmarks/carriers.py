"""Measure what a heartbeat and a push cost the head, carried by Ray and by HTTPS, for 200 members. About 2 minutes.

The gateway, its certificate and its invites, Ray and its actors, and the messages are the product's; coordinator and
aggregator only answer, and the members are threads of this process.
"""

import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.report import Settings, Table
from tpuswarm.swarm.anywhere import wire
from tpuswarm.swarm.anywhere.client import HttpsCalls, NoSwarm
from tpuswarm.swarm.anywhere.gateway import GATEWAY
from tpuswarm.swarm.anywhere.invites import InviteBook, prepare_listening
from tpuswarm.swarm.core.messages import Accepted, Granted, Heartbeat
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation
from tpuswarm.swarm.engines.ray import Calls, Cluster
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.swarm.processes.run_plan import COORDINATOR
from tpuswarm.swarm.storage import tensors

MEMBERS, THREADS = 200, 16
BEATS, PUSHES = 20, 2
"""Of each member."""
ELEMENTS = 2**20
"""Of a payload, in int8."""
SHARD = "aggregator-0"
ROWS = Rows(((0, 6400), (12_800, 19_200)))
DIGESTS = Digests(*("d" * 64,) * 4)


class StandIn:
    """A coordinator or an aggregator that answers at once."""

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return Granted(ROWS, 6400, 7, 10**9, (), None, False, 2.0, False) if method == "beat" else Accepted()

    def run(self) -> str:
        while True:
            time.sleep(60)

    def report(self, since: int) -> None: ...

    def leave(self) -> None: ...


def stand_in(**arguments: Any) -> StandIn:
    return StandIn()


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a core on the head, for each message."""

    beat: float
    push: float


def run(settings: Settings) -> Table:
    members, beats, pushes = (8, 3, 1) if settings.quick else (MEMBERS, BEATS, PUSHES)
    payload = {
        "codes": np.random.default_rng(0).integers(0, 256, (ELEMENTS // 256, 256), np.uint8),
        "scales": np.ones(ELEMENTS // 256, np.float32),
    }
    with tempfile.TemporaryDirectory() as name, Cluster("run", Path(name) / "token", None, largest=ELEMENTS * 4) as ray:
        folder, port = Path(name), _free_port()
        address = f"127.0.0.1:{port}"
        prepare_listening(folder, address, address)
        gateway = {"store": name, "listen": ("127.0.0.1", port), "largest": ELEMENTS * 4}
        actors = {
            COORDINATOR: ray.start(COORDINATOR, "benchmarks.carriers:stand_in", {}, {}, folder / "c.log", None),
            SHARD: ray.start(SHARD, "benchmarks.carriers:stand_in", {}, {}, folder / "s.log", None),
            GATEWAY: ray.start(
                GATEWAY, "tpuswarm.swarm.supervision.entry:gateway", gateway, {}, folder / "g.log", None
            ),
        }
        pids = {each: _pid(actor) for each, actor in actors.items()}
        https = HttpsCalls(InviteBook(folder).invite("ada"))
        _until(https.connect)
        costs = {
            carrier: _measure(calls, pids, members, beats, pushes, payload)
            for carrier, calls in (("Ray", Calls("run", ELEMENTS * 4)), ("HTTPS", https))
        }
        https.close()
    sizes = [len(wire.encode(Call(COORDINATOR, *call))) for call in (("beat", (_beat(0),)), ("push", (_header(0),)))]
    return Table(
        f"A message of one of {members} members: ms of a core on the head",
        ("carrier", "a heartbeat", "a push of 1 M elements in int8"),
        [(carrier, f"{cost.beat:.2f}", f"{cost.push:.2f}") for carrier, cost in costs.items()],
        [
            f"HTTPS: {sizes[0]:,} bytes a heartbeat, {sizes[1]:,} a header, {len(wire.encode((payload,))):,} a payload",
            "gateway, coordinator, aggregator and Ray's own processes together; with HTTPS, Ray is behind the gateway",
        ],
    )


def _measure(
    calls: Callable[[Call], Any], pids: dict[str, int], members: int, beats: int, pushes: int, payload: Any
) -> Cost:
    digest = tensors.digest(payload)

    def beat(number: int) -> None:
        for _ in range(beats):
            assert isinstance(calls(Call(COORDINATOR, "beat", (_beat(number),))), Granted)

    def push(number: int) -> None:
        for _ in range(pushes):
            calls(Call(SHARD, "put", (_identity(number), 0, payload, digest)))
            calls(Call(COORDINATOR, "push", (_header(number),)))

    beat(0)
    spent = []
    for work, count in ((beat, members * beats), (push, members * pushes)):
        before = _cpu_seconds(pids)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(members)))
        spent.append((_cpu_seconds(pids) - before) / count * 1e3)
    return Cost(*spent)


def _identity(number: int) -> Identity:
    return Identity(Incarnation(f"ada-{number}", f"{number:032x}"), 3)


def _beat(number: int) -> Heartbeat:
    return Heartbeat(_identity(number).incarnation, DIGESTS, True, 7, ROWS, ROWS, _identity(number), 120.5, 10**8)


def _header(number: int) -> Header:
    return Header(_identity(number), "run", 7, ROWS, 6_553_600, 100, "int8", 0.25, True, ("d" * 64,))


def _cpu_seconds(pids: dict[str, int]) -> float:
    """Return the processor time of these processes and of Ray's servers."""
    servers = [child for child in psutil.Process().children() if child.name() in ("raylet", "gcs_server")]
    times = [process.cpu_times() for process in (*map(psutil.Process, pids.values()), *servers)]
    return sum(each.user + each.system for each in times)


def _pid(actor: Any) -> int:
    while (answer := actor.report(0, 1.0)) is None:
        pass
    return int(answer[0])


def _until(action: Callable[[], None]) -> None:
    for _ in range(100):
        try:
            action()
        except (NoSwarm, Unreachable):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the gateway does not listen")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

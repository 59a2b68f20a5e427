"""What libtpu says of its chips while a program has them, for machines whose chips are this computer's processors.

A program that has loaded JAX, or that holds a chip's file, has all chips of its machine: they are as busy as it keeps a
processor busy, and as full as it is large.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import proto

from tpuswarm.catalog import accelerators
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE

SERVICE = "tpu.monitoring.runtime.RuntimeMetricService"
DUTY, USED, TOTAL = (
    "tpu.runtime.tensorcore.dutycycle.percent",
    "tpu.runtime.hbm.memory.usage.bytes",
    "tpu.runtime.hbm.memory.total.bytes",
)
OLD_S = 1.0
"""How old figures may be: one look at all processes serves all machines."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class AttrValue(proto.Message):
    """As https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info/proto) numbers the fields."""

    int_attr = proto.Field(proto.INT64, number=3, oneof="attr")


class Attribute(proto.Message):
    """What a value is of."""

    key = proto.Field(proto.STRING, number=1)
    value = proto.Field(AttrValue, number=2)


class Gauge(proto.Message):
    """A value."""

    as_double = proto.Field(proto.DOUBLE, number=1, oneof="value")
    as_int = proto.Field(proto.INT64, number=2, oneof="value")


class Metric(proto.Message):
    """The value of a device, or of a chip: tpu-info says that duty cycles are of chips."""

    attribute = proto.Field(Attribute, number=1)
    gauge = proto.Field(Gauge, number=3)


class TPUMetric(proto.Message):
    """Those of all devices."""

    name = proto.Field(proto.STRING, number=1)
    metrics = proto.RepeatedField(Metric, number=3)


class MetricRequest(proto.Message):
    """Which one is wanted."""

    metric_name = proto.Field(proto.STRING, number=1)


class MetricResponse(proto.Message):
    """The answer."""

    metric = proto.Field(TPUMetric, number=1)


class Used(NamedTuple):
    """Of the programs that have a machine's chips."""

    seconds: float
    """Of processors so far."""
    memory: int
    """Bytes."""


class Usage:
    """Of all machines of this cloud."""

    def __init__(self, machines: Path):
        """machines: the folder with theirs."""
        self._machines = machines
        self._at, self._before = -OLD_S, 0.0
        self._used: dict[str, Used] = {}
        self._last: dict[str, Used] = {}
        self._has: dict[tuple[int, int], bool] = {}
        """Whether a process, by its number and its start, has chips."""

    def of(self, machine: str) -> tuple[float, int] | None:
        """How busy a processor was kept since the look before, 0 to 1, and bytes; None: no program has the chips."""
        now = time.monotonic()
        if now - self._at >= OLD_S:
            self._last, self._before, self._at = self._used, self._at, now
            self._used = self._look()
        if (used := self._used.get(machine)) is None:
            return None
        last = self._last.get(machine)
        passed = self._at - self._before
        busy = (used.seconds - last.seconds) / passed if last and passed > 0 else 0.0
        return min(1.0, max(0.0, busy)), used.memory

    def _look(self) -> dict[str, Used]:
        found: dict[str, Used] = {}
        mark, had = f"{MACHINE}=".encode(), self._has
        self._has = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # it has ended, or is another user's
                stat = (place / "stat").read_text().rpartition(")")[2].split()
                key = int(place.name), int(stat[19])
                entries = (place / "environ").read_bytes().split(b"\0")
                machine = next(each for each in [*entries, b""] if each.startswith(mark) or not each)
                if not machine:
                    continue
                name = machine[len(mark) :].decode()
                if not (has := had.get(key, False)):
                    has = _has_chips(place, self._machines / name)
                self._has[key] = has
                if has:
                    before = found.get(name, Used(0.0, 0))
                    seconds = (int(stat[11]) + int(stat[12])) / TICKS
                    found[name] = Used(before.seconds + seconds, before.memory + int(stat[21]) * PAGE)
        return found


def _has_chips(process: Path, machine: Path) -> bool:
    if "/jaxlib/" in (process / "maps").read_text():
        return True
    devices = str(machine / "dev")
    for each in (process / "fd").iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith(f"{devices}/"):
                return True
    return False


async def serve(host: Callable[[], RehearsedHost | None], port: int, usage: Usage) -> Any:
    """A running server on 127.0.0.1: `port` is where libtpu would listen."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    async def answer(request: MetricRequest, context: Any) -> MetricResponse:
        here = host()
        if here is None or (used := usage.of(here.id)) is None:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, "no program has the chips")
        busy, memory = used
        count = here.devices
        values = {
            DUTY: Gauge(as_double=100.0 * busy),
            USED: Gauge(as_int=memory // count),
            TOTAL: Gauge(as_int=_hbm(here.type)),
        }
        if request.metric_name not in values:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no metric {request.metric_name}")
        devices = [
            Metric(
                attribute=Attribute(key="device-id", value=AttrValue(int_attr=number)),
                gauge=values[request.metric_name],
            )
            for number in range(here.chips if request.metric_name == DUTY else count)
        ]
        return MetricResponse(metric=TPUMetric(name=request.metric_name, metrics=devices))

    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=MetricRequest.deserialize, response_serializer=MetricResponse.serialize
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"GetRuntimeMetric": handler})])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


@cache
def _hbm(type_: str) -> int:
    """Bytes of a device of a slice, by the TPU API's name for it."""
    return next(each.generation.hbm_bytes_per_device for each in accelerators() if each.api_name == type_)

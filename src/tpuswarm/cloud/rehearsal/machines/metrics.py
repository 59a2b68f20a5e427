"""Serve libtpu's metrics for machines whose chips are this computer's processors.

A program that has loaded JAX, or that holds a chip's file, has all chips of its machine. Its processor time is their
duty cycle, and its memory is theirs.
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
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE_VARIABLE

SERVICE = "tpu.monitoring.runtime.RuntimeMetricService"
DUTY_CYCLE = "tpu.runtime.tensorcore.dutycycle.percent"
MEMORY_USAGE = "tpu.runtime.hbm.memory.usage.bytes"
MEMORY_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
MAX_AGE_S = 1.0
"""How old figures may be: one scan of all processes serves all machines."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Messages of https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info/proto).


class AttrValue(proto.Message):
    int_attr = proto.Field(proto.INT64, number=3, oneof="attr")


class Attribute(proto.Message):
    key = proto.Field(proto.STRING, number=1)
    value = proto.Field(AttrValue, number=2)


class Gauge(proto.Message):
    as_double = proto.Field(proto.DOUBLE, number=1, oneof="value")
    as_int = proto.Field(proto.INT64, number=2, oneof="value")


class Metric(proto.Message):
    """The value of a device; of a chip for duty cycles."""

    attribute = proto.Field(Attribute, number=1)
    gauge = proto.Field(Gauge, number=3)


class TPUMetric(proto.Message):
    name = proto.Field(proto.STRING, number=1)
    metrics = proto.RepeatedField(Metric, number=3)


class MetricRequest(proto.Message):
    metric_name = proto.Field(proto.STRING, number=1)


class MetricResponse(proto.Message):
    metric = proto.Field(TPUMetric, number=1)


class Used(NamedTuple):
    """Usage of the programs with a machine's chips."""

    processor_s: float
    memory_bytes: int


class Usage:
    """Usage of all machines of a cloud."""

    def __init__(self, machines: Path):
        """`machines`: the folder with the machines' folders."""
        self._machines = machines
        self._scanned_at, self._last_scanned_at = -MAX_AGE_S, 0.0
        self._used: dict[str, Used] = {}
        self._last_used: dict[str, Used] = {}
        self._has_chips: dict[tuple[int, int], bool] = {}
        """By a process's pid and start time."""

    def measure(self, machine: str) -> tuple[float, int] | None:
        """Return the load (0 to 1) since the last scan and the memory in bytes; None: no program has the chips."""
        now = time.monotonic()
        if now - self._scanned_at >= MAX_AGE_S:
            self._last_used, self._last_scanned_at, self._scanned_at = self._used, self._scanned_at, now
            self._used = self._scan()
        if (used := self._used.get(machine)) is None:
            return None
        last = self._last_used.get(machine)
        elapsed_s = self._scanned_at - self._last_scanned_at
        load = (used.processor_s - last.processor_s) / elapsed_s if last and elapsed_s > 0 else 0.0
        return min(1.0, max(0.0, load)), used.memory_bytes

    def _scan(self) -> dict[str, Used]:
        used: dict[str, Used] = {}
        mark, last_has_chips = f"{MACHINE_VARIABLE}=".encode(), self._has_chips
        self._has_chips = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # it has ended, or belongs to another user
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                key = int(process.name), int(stat[19])
                entries = (process / "environ").read_bytes().split(b"\0")
                # The first empty entry ends the environment.
                entry = next(entry for entry in [*entries, b""] if entry.startswith(mark) or not entry)
                if not entry:
                    continue
                machine = entry[len(mark) :].decode()
                has_chips = last_has_chips.get(key, False) or _has_chips(process, self._machines / machine)
                self._has_chips[key] = has_chips
                if has_chips:
                    before = used.get(machine, Used(0.0, 0))
                    processor_s = (int(stat[11]) + int(stat[12])) / TICKS_PER_S
                    memory_bytes = int(stat[21]) * PAGE_BYTES
                    used[machine] = Used(before.processor_s + processor_s, before.memory_bytes + memory_bytes)
        return used


def _has_chips(process: Path, machine: Path) -> bool:
    if "/jaxlib/" in (process / "maps").read_text():
        return True
    devices = str(machine / "dev")
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith(f"{devices}/"):
                return True
    return False


async def serve(get_host: Callable[[], RehearsedHost | None], port: int, usage: Usage) -> Any:
    """Start a server at libtpu's port on 127.0.0.1 and return it."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    async def answer(request: MetricRequest, context: Any) -> MetricResponse:
        host = get_host()
        if host is None or (used := usage.measure(host.id)) is None:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, "no program has the chips")
        load, memory_bytes = used
        gauges = {
            DUTY_CYCLE: Gauge(as_double=100.0 * load),
            MEMORY_USAGE: Gauge(as_int=memory_bytes // host.devices),
            MEMORY_TOTAL: Gauge(as_int=_device_memory_bytes(host.type)),
        }
        name = request.metric_name
        if name not in gauges:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no metric {name}")
        metrics = [
            Metric(attribute=Attribute(key="device-id", value=AttrValue(int_attr=number)), gauge=gauges[name])
            for number in range(host.chips if name == DUTY_CYCLE else host.devices)
        ]
        return MetricResponse(metric=TPUMetric(name=name, metrics=metrics))

    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=MetricRequest.deserialize, response_serializer=MetricResponse.serialize
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"GetRuntimeMetric": handler})])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


@cache
def _device_memory_bytes(type_name: str) -> int:
    return next(tpu.generation.hbm_bytes_per_device for tpu in accelerators() if type_name in (tpu.api_name, tpu.name))

"""Print the state of a host's chips as lines of JSON, until its output is closed. Runs with only Python 3.6 or later.

While a program uses the chips, libtpu serves their metrics by gRPC on loopback, as RuntimeMetricService:
https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info/proto). A host may have no gRPC library, but
it has curl, which set-up uses too.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from glob import glob
from typing import Any

from tpuswarm.doctor.collect import METADATA, metadata_host, read_metadata_value
from tpuswarm.doctor.processes import find_holders, list_devices

METRICS = {
    "duty": "tpu.runtime.tensorcore.dutycycle.percent",
    "used": "tpu.runtime.hbm.memory.usage.bytes",
    "total": "tpu.runtime.hbm.memory.total.bytes",
}
METRICS_PORTS = os.environ.get("TPU_RUNTIME_METRICS_PORTS", "8431")
"""Ports of libtpu's service, separated by commas."""
CURL = ("curl", "-q", "--silent", "--max-time", "1", "--noproxy", "*", "--http2-prior-knowledge", "--data-binary", "@-")
HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
URL = "http://localhost:%d/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"
ROW_SEARCH_BYTES = 1 << 14
"""At the end of a metrics file."""
SAMPLES_PER_OWNER_SEARCH = 5
"""The search reads all processes."""
SAMPLES_PER_NOTICE = 30
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def request_metrics(port: str) -> "dict[str, dict[int, float]]":
    """Return each metric of libtpu by device; unknown metrics are missing."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(port))):
            return {}
    calls = {}
    for name, metric in METRICS.items():
        message = b"\x0a" + bytes([len(metric)]) + metric.encode()
        call = subprocess.Popen([*CURL, *HEADERS, URL % int(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        calls[name] = call, b"\0" + struct.pack(">I", len(message)) + message
    answers = {name: call.communicate(request)[0] for name, (call, request) in calls.items()}
    return {name: parse_gauges(answer[5:]) for name, answer in answers.items() if len(answer) > 5}


def parse_gauges(response: bytes) -> "dict[int, float]":
    """Parse a MetricResponse: the value by device."""
    gauges = {}
    for metric in parse_fields(first_field(response, 1)).get(3, []):
        gauge, attribute = parse_fields(first_field(metric, 3)), first_field(metric, 1)
        device = parse_fields(first_field(attribute, 2)).get(3, [0])[0]
        value = [*gauge.get(1, []), *gauge.get(2, [])]
        if value:
            gauges[int(device)] = float(value[0])
    return gauges


def parse_fields(message: bytes) -> "dict[int, list[Any]]":
    """Parse a protobuf message: values (int, float or bytes) by field number."""
    fields = {}  # type: dict[int, list[Any]]
    at = 0
    while at < len(message):
        key, at = parse_varint(message, at)
        value = b""  # type: Any
        if key & 7 == VARINT:
            value, at = parse_varint(message, at)
        elif key & 7 == FIXED64:
            value, at = struct.unpack("<d", message[at : at + 8])[0], at + 8
        elif key & 7 == FIXED32:
            value, at = struct.unpack("<f", message[at : at + 4])[0], at + 4
        else:
            size, at = parse_varint(message, at)
            value, at = message[at : at + size], at + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def parse_varint(message: bytes, at: int) -> "tuple[int, int]":
    """Parse a number; return it and the offset after it."""
    value = shift = 0
    while True:
        value, has_more = value | (message[at] & 127) << shift, message[at] & 128
        at, shift = at + 1, shift + 7
        if not has_more:
            return value, at


def first_field(message: bytes, number: int) -> bytes:
    """Return the value of a field; empty if it is missing."""
    values = parse_fields(message).get(number)
    return values[0] if values else b""


def describe_libtpu(pid: int) -> "dict[str, str]":
    """Return the libtpu that a program has loaded, and the variables that select it."""
    facts = {}
    try:
        with open("/proc/%d/maps" % pid) as file:  # noqa: PTH123, UP031
            facts["loaded"] = next((line.split()[-1] for line in file if "libtpu" in line and ".so" in line), "")
        with open("/proc/%d/environ" % pid, "rb") as file:  # noqa: PTH123, UP031
            for entry in file.read().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name in (b"TPU_LOAD_LIBRARY", b"TPU_LIBRARY_PATH", b"TPU_RUNTIME_METRICS_PORTS"):
                    facts[name.decode()] = value.decode(errors="replace")
    except OSError:  # it has ended, or belongs to another user
        pass
    return facts


def find_metrics_file(pid: int) -> str:
    """Return the metrics.jsonl that a program writes, if any."""
    try:
        files = [os.readlink(link) for link in glob("/proc/%d/fd/*" % pid)]  # noqa: PTH115, PTH207, UP031
    except OSError:  # it has ended, or belongs to another user
        return ""
    return next((path for path in files if os.path.basename(path) == "metrics.jsonl"), "")  # noqa: PTH119


def read_last_row(path: str) -> "dict[str, Any]":
    """Return step, loss and tokens_per_s of the last update."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(max(0, os.path.getsize(path) - ROW_SEARCH_BYTES))  # noqa: PTH202
            lines = file.read().split(b"\n")[:-1]  # the last one may be incomplete
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line.decode())
        except ValueError:  # the first one may be incomplete
            continue
        if isinstance(row, dict) and "loss" in row:
            return {name: row[name] for name in ("step", "loss", "tokens_per_s") if row.get(name) is not None}
    return {}


def read_metrics(owners: "list[dict[str, Any]]") -> "dict[str, Any]":
    """Read libtpu's metrics from all ports of its programs; unknown values are missing."""
    metrics = {"duty": {}, "used": {}, "total": {}}  # type: dict[str, Any]
    owner_ports = [owner["libtpu"].get("TPU_RUNTIME_METRICS_PORTS", "") for owner in owners]
    for port in sorted({port.strip() for ports in [METRICS_PORTS, *owner_ports] for port in ports.split(",")} - {""}):
        try:
            for name, values in request_metrics(port).items():
                metrics[name].update(values)
        except (OSError, ValueError, IndexError, struct.error):
            continue  # no curl, or another server answers
    return metrics


def read_maintenance() -> str:
    """Return the answer of the metadata key upcoming-maintenance; empty if there is none."""
    host = metadata_host()
    try:
        return read_metadata_value(host, METADATA["upcoming"]) if host else ""
    except (OSError, ValueError):
        return ""


def main() -> None:
    """Print a line every `interval` (the first argument) seconds."""
    interval, number, maintenance = float(sys.argv[1]), 0, ""
    owners = []  # type: list[dict[str, Any]]
    while True:
        start = time.time()
        if number % SAMPLES_PER_OWNER_SEARCH == 0:
            owners = [
                dict(holder, libtpu=describe_libtpu(holder["pid"]), metrics=find_metrics_file(holder["pid"]))
                for holder in find_holders(list_devices())
            ]
        if number % SAMPLES_PER_NOTICE == 0:
            maintenance = read_maintenance()
        number += 1
        for owner in owners:
            owner["row"] = read_last_row(owner["metrics"]) if owner["metrics"] else {}
        data = dict(read_metrics(owners), owners=owners, chips=len(list_devices()), maintenance=maintenance)
        try:
            sys.stdout.write(json.dumps(data) + "\n")
            sys.stdout.flush()
        except OSError:  # its output is closed
            os._exit(0)
        time.sleep(max(0.0, interval - (time.time() - start)))

"""Print the state of a host's chips as lines of JSON, until its output is closed. Runs with only Python 3.6 or later.

While a program uses the chips, libtpu serves their metrics by gRPC on loopback, as RuntimeMetricService:
https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info/proto). A host may have no gRPC library, so
this module speaks the needed part of HTTP/2 (RFC 9113) and HPACK (RFC 7541).
"""

import json
import os
import socket
import struct
import sys
import time
from glob import glob
from typing import Any

from tpuswarm.doctor.processes import find_holders, list_devices

METRICS = {
    "duty": "tpu.runtime.tensorcore.dutycycle.percent",
    "used": "tpu.runtime.hbm.memory.usage.bytes",
    "total": "tpu.runtime.hbm.memory.total.bytes",
}
METRICS_PORTS = os.environ.get("TPU_RUNTIME_METRICS_PORTS", "8431")
"""Ports of libtpu's service, separated by commas."""
RPC_PATH = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"
ANSWER_TIMEOUT_S = 1.0
ROW_SEARCH_BYTES = 1 << 14
"""At the end of a metrics file."""
OWNERS_INTERVAL = 5
"""Samples between two searches for owners, which read all processes."""
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS, PADDED = 4, 8
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def make_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Make a frame of HTTP/2."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def make_headers(port: str) -> bytes:
    """Make the uncompressed headers of a call."""
    names = {
        ":method": "POST", ":scheme": "http", ":path": RPC_PATH, ":authority": "localhost:" + port, "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    pairs = [(name.encode(), value.encode()) for name, value in names.items()]
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)


def request_metrics(port: str) -> "dict[str, dict[int, float]]":
    """Return each metric of libtpu by device; raise OSError if nothing answers."""
    streams = dict(zip(range(1, 2 * len(METRICS), 2), METRICS))  # noqa: B905  # Python 3.6
    answers = dict.fromkeys(streams, b"")
    with socket.create_connection(("localhost", int(port)), ANSWER_TIMEOUT_S) as connection:
        out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + make_frame(SETTINGS, 0, 0)
        for stream, name in streams.items():
            text = METRICS[name].encode()
            message = b"\x0a" + bytes([len(text)]) + text
            out += make_frame(HEADERS, END_HEADERS, stream, make_headers(port))
            out += make_frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
        connection.sendall(out)
        left = set(streams)
        while left:
            head = read_exactly(connection, 9)
            kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0] & 0x7FFFFFFF
            body = read_exactly(connection, int.from_bytes(head[:3], "big"))
            if kind == DATA and stream in answers:
                answers[stream] += body[1 : len(body) - body[0]] if flags & PADDED else body
            elif kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(make_frame(kind, ACK, 0, body if kind == PING else b""))
            elif kind == GOAWAY:
                break
            if kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM):
                left.discard(stream)
    return {streams[stream]: parse_gauges(data[5:]) for stream, data in answers.items() if len(data) > 5}


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def parse_gauges(response: bytes) -> "dict[int, float]":
    """Parse a MetricResponse: the value by device."""
    found = {}
    for metric in repeated_field(first_field(response, 1), 3):
        gauge, attribute = parse_fields(first_field(metric, 3)), first_field(metric, 1)
        device = parse_fields(first_field(attribute, 2)).get(3, [0])[0]
        value = [*gauge.get(1, []), *gauge.get(2, [])]
        if value:
            found[int(device)] = float(value[0])
    return found


def parse_fields(message: bytes) -> "dict[int, list[Any]]":
    """Parse a protobuf message: values (int, float or bytes) by field number."""
    found = {}  # type: dict[int, list[Any]]
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
        found.setdefault(key >> 3, []).append(value)
    return found


def parse_varint(message: bytes, at: int) -> "tuple[int, int]":
    """Parse a number; return it and the offset after it."""
    value = shift = 0
    while True:
        value, more = value | (message[at] & 127) << shift, message[at] & 128
        at, shift = at + 1, shift + 7
        if not more:
            return value, at


def repeated_field(message: bytes, number: int) -> "list[bytes]":
    """Return the values of a repeated field."""
    return parse_fields(message).get(number, [])


def first_field(message: bytes, number: int) -> bytes:
    """Return the value of a field; empty if it is missing."""
    found = repeated_field(message, number)
    return found[0] if found else b""


def describe_libtpu(pid: int) -> "dict[str, str]":
    """Return the libtpu that a program has loaded, and the variables that select it."""
    found = {}
    try:
        with open("/proc/%d/maps" % pid) as file:  # noqa: PTH123, UP031
            found["loaded"] = next((line.split()[-1] for line in file if "libtpu" in line and ".so" in line), "")
        with open("/proc/%d/environ" % pid, "rb") as file:  # noqa: PTH123, UP031
            for entry in file.read().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name in (b"TPU_LOAD_LIBRARY", b"TPU_LIBRARY_PATH", b"TPU_RUNTIME_METRICS_PORTS"):
                    found[name.decode()] = value.decode(errors="replace")
    except OSError:  # ended, or another user's
        pass
    return found


def find_metrics_file(pid: int) -> str:
    """Return the metrics.jsonl that a program writes, if any."""
    try:
        found = [os.readlink(link) for link in glob("/proc/%d/fd/*" % pid)]  # noqa: PTH115, PTH207, UP031
    except OSError:  # ended, or another user's
        return ""
    return next((path for path in found if os.path.basename(path) == "metrics.jsonl"), "")  # noqa: PTH119


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
    found = {"duty": {}, "used": {}, "total": {}}  # type: dict[str, Any]
    given = [owner["libtpu"].get("TPU_RUNTIME_METRICS_PORTS", "") for owner in owners]
    for port in sorted({port.strip() for ports in [METRICS_PORTS, *given] for port in ports.split(",")} - {""}):
        try:
            for name, values in request_metrics(port).items():
                found[name].update(values)
        except (OSError, ValueError, IndexError, struct.error):
            continue  # no program uses the chips, or something else answers
    return found


def main() -> None:
    """Print a line every `interval` seconds."""
    interval, number = float(sys.argv[1]), 0
    owners = []  # type: list[dict[str, Any]]
    while True:
        start = time.time()
        if number % OWNERS_INTERVAL == 0:
            owners = [
                dict(one, libtpu=describe_libtpu(one["pid"]), metrics=find_metrics_file(one["pid"]))
                for one in find_holders(list_devices())
            ]
        number += 1
        for owner in owners:
            owner["row"] = read_last_row(owner["metrics"]) if owner["metrics"] else {}
        data = dict(read_metrics(owners), owners=owners, chips=len(list_devices()))
        try:
            sys.stdout.write(json.dumps(data) + "\n")
            sys.stdout.flush()
        except OSError:  # its output was closed
            os._exit(0)
        time.sleep(max(0.0, interval - (time.time() - start)))

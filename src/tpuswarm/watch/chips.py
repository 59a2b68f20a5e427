"""Runs on a host, with its own Python (3.6 or later): what its chips are at, a line of JSON again and again.

It ends when nobody reads what it prints. libtpu tells how busy chips are to whoever asks its RuntimeMetricService, by
gRPC on loopback, as long as a program has them: https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics
(tpu_info/proto). A host has no library for that, so the three calls are spoken here, as RFC 9113 and 7541 have them.
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
PORTS = os.environ.get("TPU_RUNTIME_METRICS_PORTS", "8431")
"""Of libtpu's service, with commas between those of several programs."""
CALL = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"
PATIENCE = 1.0
"""Seconds that libtpu has to answer."""
LAST = 1 << 14
"""Bytes of a file in which its last rows are looked for."""
OWNERS_EVERY = 5
"""Samples: who has the chips changes seldom, and all processes have to be looked at."""
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS, PADDED = 4, 8
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def headers(port: str) -> bytes:
    """Of a call, none of them compressed."""
    wanted = {
        ":method": "POST", ":scheme": "http", ":path": CALL, ":authority": "localhost:" + port, "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    pairs = [(name.encode(), value.encode()) for name, value in wanted.items()]
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)


def ask(port: str) -> "dict[str, dict[int, float]]":
    """Of each metric that libtpu has, its value for each device; OSError where nobody answers."""
    streams = dict(zip(range(1, 2 * len(METRICS), 2), METRICS))  # noqa: B905  # Python 3.6
    said = dict.fromkeys(streams, b"")
    with socket.create_connection(("localhost", int(port)), PATIENCE) as there:
        out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
        for stream, name in streams.items():
            text = METRICS[name].encode()
            message = b"\x0a" + bytes([len(text)]) + text
            out += frame(HEADERS, END_HEADERS, stream, headers(port))
            out += frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
        there.sendall(out)
        left = set(streams)
        while left:
            head = exactly(there, 9)
            kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0] & 0x7FFFFFFF
            body = exactly(there, int.from_bytes(head[:3], "big"))
            if kind == DATA and stream in said:
                said[stream] += body[1 : len(body) - body[0]] if flags & PADDED else body
            elif kind in (SETTINGS, PING) and not flags & ACK:
                there.sendall(frame(kind, ACK, 0, body if kind == PING else b""))
            elif kind == GOAWAY:
                break
            if kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM):
                left.discard(stream)
    return {streams[stream]: gauges(data[5:]) for stream, data in said.items() if len(data) > 5}


def exactly(there: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < count:
        more = there.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def gauges(response: bytes) -> "dict[int, float]":
    """Of a MetricResponse, the value for each device."""
    found = {}
    for metric in each(first(response, 1), 3):
        gauge, attribute = fields(first(metric, 3)), first(metric, 1)
        device = fields(first(attribute, 2)).get(3, [0])[0]
        value = [*gauge.get(1, []), *gauge.get(2, [])]
        if value:
            found[int(device)] = float(value[0])
    return found


def fields(message: bytes) -> "dict[int, list[Any]]":
    """Of a message of protobuf, by number: int, float or bytes."""
    found = {}  # type: dict[int, list[Any]]
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        value = b""  # type: Any
        if key & 7 == VARINT:
            value, at = varint(message, at)
        elif key & 7 == FIXED64:
            value, at = struct.unpack("<d", message[at : at + 8])[0], at + 8
        elif key & 7 == FIXED32:
            value, at = struct.unpack("<f", message[at : at + 4])[0], at + 4
        else:
            size, at = varint(message, at)
            value, at = message[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def varint(message: bytes, at: int) -> "tuple[int, int]":
    """A number, and where what follows it begins."""
    value = shift = 0
    while True:
        value, more = value | (message[at] & 127) << shift, message[at] & 128
        at, shift = at + 1, shift + 7
        if not more:
            return value, at


def each(message: bytes, number: int) -> "list[bytes]":
    """The messages of a field that repeats."""
    return fields(message).get(number, [])


def first(message: bytes, number: int) -> bytes:
    """The message of a field; empty where it is not there."""
    found = each(message, number)
    return found[0] if found else b""


def libtpu(pid: int) -> "dict[str, str]":
    """Which library a program has loaded, and what told it to."""
    found = {}
    try:
        with open("/proc/%d/maps" % pid) as file:  # noqa: PTH123, UP031
            found["loaded"] = next((line.split()[-1] for line in file if "libtpu" in line and ".so" in line), "")
        with open("/proc/%d/environ" % pid, "rb") as file:  # noqa: PTH123, UP031
            for entry in file.read().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name in (b"TPU_LOAD_LIBRARY", b"TPU_LIBRARY_PATH", b"TPU_RUNTIME_METRICS_PORTS"):
                    found[name.decode()] = value.decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        pass
    return found


def metrics_of(pid: int) -> str:
    """The metrics.jsonl that a program writes; empty where it writes none."""
    try:
        found = [os.readlink(each) for each in glob("/proc/%d/fd/*" % pid)]  # noqa: PTH115, PTH207, UP031
    except OSError:  # it has ended, or is another user's
        return ""
    return next((each for each in found if os.path.basename(each) == "metrics.jsonl"), "")  # noqa: PTH119


def last_row(path: str) -> "dict[str, Any]":
    """Of what it trains: step, loss and tokens_per_s of the last update, as far as they are there."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(max(0, os.path.getsize(path) - LAST))  # noqa: PTH202
            lines = file.read().split(b"\n")[:-1]  # what is being written is no row yet
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line.decode())
        except ValueError:  # the first one may be half a row
            continue
        if isinstance(row, dict) and "loss" in row:
            return {name: row[name] for name in ("step", "loss", "tokens_per_s") if row.get(name) is not None}
    return {}


def sample(owners: "list[dict[str, Any]]") -> "dict[str, Any]":
    """What libtpu says at this moment, at the ports that its programs were given; what it does not say is not there."""
    found = {"duty": {}, "used": {}, "total": {}}  # type: dict[str, Any]
    given = [one["libtpu"].get("TPU_RUNTIME_METRICS_PORTS", "") for one in owners]
    for port in sorted({port.strip() for each in [PORTS, *given] for port in each.split(",")} - {""}):
        try:
            for name, values in ask(port).items():
                found[name].update(values)
        except (OSError, ValueError, IndexError, struct.error):
            continue  # no program has the chips, or what answers is no libtpu
    return found


def main() -> None:
    """A line every so many seconds."""
    every, number = float(sys.argv[1]), 0
    owners = []  # type: list[dict[str, Any]]
    while True:
        began = time.time()
        if number % OWNERS_EVERY == 0:
            owners = [
                dict(one, libtpu=libtpu(one["pid"]), metrics=metrics_of(one["pid"]))
                for one in find_holders(list_devices())
            ]
        number += 1
        for one in owners:
            one["row"] = last_row(one["metrics"]) if one["metrics"] else {}
        said = dict(sample(owners), owners=owners, chips=len(list_devices()))
        try:
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
        except OSError:  # nobody reads it any longer
            os._exit(0)
        time.sleep(max(0.0, every - (time.time() - began)))

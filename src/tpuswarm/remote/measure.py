"""Measure throughput and latency between two hosts with iperf3."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tpuswarm.errors import RunFailed
from tpuswarm.remote.connect import Connections, run_shell
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import APT

PORT = 5201
SECONDS, QUIET_SECONDS = 5, 2
STREAMS = 8
"""One TCP connection does not fill a fast network."""
QUIET_BITS_PER_S = 1_000_000
"""Leaves the network idle enough for its latency."""
CONNECT_TRIES, RETRY_S = 20, 0.25
TIME_LIMIT_S = 60
TIMEOUT_CODE = 124
"""Of timeout(1)."""
INSTALL_IPERF3 = Step("iperf3", f"{APT}apt_install iperf3", "iperf3 --version >/dev/null 2>&1")


@dataclass(frozen=True)
class Flow:
    """What one iperf3 client sent to a server."""

    gbps: float
    """As received, in Gbit/s."""
    round_trip_ms: float
    """Mean of the streams."""
    retransmits: int


@dataclass(frozen=True)
class Measurement:
    """The network from one host to another, and back."""

    there: Flow
    back: Flow
    quiet: Flow
    """With little traffic: its round trip is the latency."""


async def measure(connections: Connections, hosts: Sequence[Host], addresses: Sequence[str]) -> Measurement:
    """Measure between two hosts, given their internal addresses. Raises RunFailed and HostUnreachable."""
    (first, second), (first_address, second_address) = hosts, addresses
    quiet = await _send(connections, first, second, second_address, f"-t {QUIET_SECONDS} -b {QUIET_BITS_PER_S}")
    busy = f"-t {SECONDS} -P {STREAMS}"
    there = await _send(connections, first, second, second_address, busy)
    return Measurement(there, await _send(connections, second, first, first_address, busy), quiet)


async def _send(connections: Connections, sender: Host, receiver: Host, address: str, options: str) -> Flow:
    line = f"timeout {TIME_LIMIT_S} iperf3 -s -1 -J -B {address} -p {PORT}"
    server = asyncio.ensure_future(run_shell(connections, receiver, line))
    line = f"timeout {TIME_LIMIT_S} iperf3 -c {address} -p {PORT} -J {options}"
    try:
        for _ in range(CONNECT_TRIES):
            client = asyncio.ensure_future(run_shell(connections, sender, line))
            await asyncio.wait({server, client}, return_when=asyncio.FIRST_COMPLETED)
            if server.done() and (reason := _find_error(*server.result())):
                client.cancel()
                raise RunFailed(f"iperf3 on {receiver.label}: {reason}")
            code, output, errors = await client
            if b"Connection refused" not in output:
                break
            await asyncio.sleep(RETRY_S)  # the server is starting
        return parse_flow(code, output, errors, f"iperf3 from {sender.label} to {receiver.label}")
    finally:
        server.cancel()


def parse_flow(code: int, output: bytes, errors: bytes, what: str) -> Flow:
    """Parse the JSON of an iperf3 client, version 3.7 or newer. Raises RunFailed with its error."""
    if reason := _find_error(code, output, errors):
        raise RunFailed(f"{what}: {reason}")
    end = json.loads(output)["end"]
    round_trips = [stream["sender"]["mean_rtt"] for stream in end["streams"]]  # microseconds
    return Flow(
        end["sum_received"]["bits_per_second"] / 1e9,
        sum(round_trips) / len(round_trips) / 1000,
        end["sum_sent"].get("retransmits", 0),
    )


def _find_error(code: int, output: bytes, errors: bytes) -> str | None:
    """Return why iperf3 failed; with -J it may exit with 0 all the same."""
    if code == TIMEOUT_CODE:
        return f"no answer within {TIME_LIMIT_S} s"
    try:
        error = json.loads(output).get("error")
    except ValueError:
        error = (errors or output).decode(errors="replace").strip().rpartition("\n")[2][:300] or f"exit {code}"
    return None if error is None else str(error)

"""`tpuswarm measure`: throughput and latency between two machines, beside the catalogue's figures."""

import json
import socket

import pytest

from tests.remote.conftest import ONE, SLICE
from tpuswarm.cli.look.measure import describe, network_gbps
from tpuswarm.cloud.protocol import Machine
from tpuswarm.errors import RunFailed
from tpuswarm.remote.host import Host
from tpuswarm.remote.measure import Flow, Measurement, parse_flow

IPERF_3_12 = """{"start": {"version": "iperf 3.12"}, "intervals": [], "end": {"streams": [
{"sender": {"socket": 5, "bytes": 208404480, "retransmits": 1, "max_rtt": 3932, "min_rtt": 3932, "mean_rtt": 3932},
 "receiver": {"socket": 5, "bytes": 207355904}},
{"sender": {"socket": 7, "bytes": 205783040, "retransmits": 3, "max_rtt": 2082, "min_rtt": 2082, "mean_rtt": 2082},
 "receiver": {"socket": 7, "bytes": 204734464}}],
"sum_sent": {"seconds": 1.000026, "bytes": 414187520, "bits_per_second": 3313414011.2357078, "retransmits": 4},
"sum_received": {"seconds": 1.031072, "bytes": 412090368, "bits_per_second": 3197374134.880978}}}"""
"""Of `iperf3 -c 127.0.0.5 -J -t 1 -P 2` with Debian 12's iperf3, without what is not read."""
REFUSED = '{"start": {}, "intervals": [], "end": {}, "error": "unable to connect to server: Connection refused"}'


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("tpuswarm.remote.measure.SECONDS", 1)
    monkeypatch.setattr("tpuswarm.remote.measure.QUIET_SECONDS", 1)


def test_figures_are_those_of_iperf3():
    assert parse_flow(0, IPERF_3_12.encode(), b"", "x") == Flow(pytest.approx(3.19737, abs=1e-4), 3.007, 4)


@pytest.mark.parametrize(
    ("code", "output", "errors", "words"),
    [
        (0, REFUSED, "", "x: unable to connect to server: Connection refused"),
        (127, "", "bash: line 1: iperf3: command not found\n", "x: bash: line 1: iperf3: command not found"),
        (124, "", "", "x: no answer within 60 s"),
    ],
)
def test_failure_of_iperf3_is_reported_in_its_words(code, output, errors, words):
    with pytest.raises(RunFailed) as failed:
        parse_flow(code, output.encode(), errors.encode(), "x")
    assert str(failed.value) == words


def test_measurement_is_shown_beside_the_catalogue():
    def machine(name: str, type_: str, zone: str) -> Machine:
        return Machine(name, zone, "vm" if name == "head" else "tpu", type_, "ready", "READY")

    targets = [machine("v6e-usc1-0", "v6e-8", "us-central1-a"), machine("head", "n2-highmem-8", "us-east1-b")]
    assert [network_gbps(target) for target in targets] == [800, 16]
    assert network_gbps(machine("small", "v5e-8", "us-central1-a")) == 200
    assert network_gbps(machine("old", "v2-8", "us-central1-f")) is None
    hosts = [Host(f"{target.name}/0", "10.0.0.2", 22, "me", "alias", (), targets, None, "") for target in targets]
    found = Measurement(Flow(15.5, 1.25, 7), Flow(9.0, 3.5, 0), Flow(0.001, 0.25, 0))
    assert describe(hosts, targets, [None, 16.0], found) == [
        "v6e-usc1-0/0 to head/0: 15.50 Gbit/s (the catalogue has no figure for v6e-8; 7 packets sent again)",
        "head/0 to v6e-usc1-0/0: 9.00 Gbit/s (the catalogue has at most 16 for a host of n2-highmem-8)",
        "round trip: 0.25 ms, 3.50 ms under this load",
        "distance: same continent; what v6e-usc1-0/0 sends there costs $0.02 a GiB",
    ]


def test_two_workers_are_measured_after_iperf3_was_installed(fleet, short):
    refused = fleet.run("measure", ONE, f"{SLICE}/1", code=2)
    assert f"{ONE}/0 and {SLICE}/1 will get the Debian package iperf3" in refused[0] and "add --yes" in refused[1]
    out = fleet.run("measure", ONE, f"{SLICE}/1", "--yes")[0]
    assert f"{ONE}/0: iperf3: done" in out and f"{ONE}/0 to {SLICE}/1: " in out and "round trip: " in out
    found = json.loads(fleet.run("measure", f"{SLICE}/1", ONE, "--json")[0])
    assert found["there"]["gbps"] > 0 and found["back"]["gbps"] > 0 and found["quiet"]["round_trip_ms"] > 0


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(SLICE, ONE, f"hosts; name one, such as {SLICE}/0"), (ONE, f"{ONE}/0", "are the same host: name two")],
)
def test_measure_needs_two_hosts(fleet, first, second, words):
    assert words in fleet.run("measure", first, second, code=2)[1]


def test_port_in_use_is_reported(fleet, short):
    fleet.run("measure", ONE, f"{SLICE}/1", "--yes")
    address = fleet.exec(f"{SLICE}/1", "echo $GCE_METADATA_HOST").split("│")[1].strip().partition(":")[0]
    with socket.create_server((address, 5201)):
        assert f"iperf3 on {SLICE}/1: unable to start listener" in fleet.run("measure", ONE, f"{SLICE}/1", code=1)[1]

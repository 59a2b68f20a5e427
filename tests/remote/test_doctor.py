"""`doctor` on machines: planted faults are found and fixed, a healthy machine has none. Facts: tests/doctor."""

import asyncio
import json
import re

import pytest

from tests.remote.conftest import HOSTS, ONE
from tests.waiting import until
from tpuswarm.cloud.protocol import Machine
from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS
from tpuswarm.doctor import examine
from tpuswarm.doctor.finding import Finding
from tpuswarm.fleet.hosts.routes import ReachableHosts

pytestmark = pytest.mark.slow

HOST = f"{ONE}/0"
CHECKS = {
    "lock": "lock", "holder": "held", "missing-device": "devices", "tpu-logs": "tpu-logs", "preload": "preload",
    "apt": "apt", "worker-id": "worker", "read-only": "bucket", "maintenance": "notice",
    "upcoming-maintenance": "notice", "symptom": "symptom", "unhealthy": "health",
}  # fmt: skip
"""Fault → the check that finds it. Their sentences: doctor/test_checks.py."""
TOGETHER = [
    ["lock", "missing-device", "tpu-logs", "preload", "apt", "worker-id", "maintenance", "symptom"],
    ["holder", "read-only", "unhealthy", "upcoming-maintenance"],
]
"""Faults that can be planted on one machine at the same time."""
NOT_FOUND = {"chatty-shell", "dpkg-interrupted", "repository"}
"""Set-up and commands cope with them (test_setup.py, test_sync.py)."""


def findings(fleet, where: str = "v2", code: int = 1) -> list[dict]:
    return fleet.run_json("doctor", where, code=code)["found"]


@pytest.mark.parametrize("faults", TOGETHER, ids=["without-holder", "with-holder"])
def test_planted_faults_are_found_and_fixed_and_gone_when_repaired(fleet, faults):
    planted = {fault for faults in TOGETHER for fault in faults}
    assert planted | NOT_FOUND == MACHINE_FAULTS.keys() | NODE_FAULTS.keys()
    with fleet.broken(ONE, *faults):
        where = {CHECKS[fault]: ONE if fault in NODE_FAULTS else HOST for fault in faults}
        found = until(lambda: len(found := findings(fleet)) == len(faults) and found, 120)
        assert {finding["check"]: finding["host"] for finding in found} == where
        out, _ = fleet.run("doctor", "all", code=1)
        assert all(f"{where[check]}  {check}: " in out for check in where) and out.count("    why: ") == len(faults)
        assert out.endswith(f"5 hosts: {len(faults)} wrong\n")
        if fixes := {finding["check"]: finding["fix"] for finding in found if finding["fix"]}:
            out, err = fleet.run("doctor", "v2", "--fix", code=1)
            assert all(fix in out and f"{HOST}: {check} is fixed" in err for check, fix in fixes.items())
            assert {finding["check"] for finding in findings(fleet)} == where.keys() - fixes.keys()
        if "holder" in faults:
            assert f"{HOST}: held is fixed" in fleet.run("doctor", "v2", "--fix", "--kill", "--yes", code=1)[1]
    assert fleet.run("doctor", "all")[0] == "5 hosts: nothing is wrong\n"


def test_cloud_is_checked_as_before_the_first_machine(fleet):
    """What machines cost without use: fleet/test_commands.py."""
    with fleet.broken(fleet.run_json("list")["project"], "no-billing"):
        (finding,) = findings(fleet, "cloud")
    assert finding["check"] == "billing" and "billing projects link" in finding["mend"]


def test_machine_at_work_is_healthy_and_one_that_does_nothing_is_idle(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.doctor.checks.IDLE_AFTER_S", 0.0)
    (finding,) = findings(fleet)
    assert finding["check"] == "idle" and re.match(r".*, costs \$\d+\.\d+ an hour, and runs nothing", finding["what"])
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; touch "$TPUSWARM_ROOT/tmp/libtpu_lockfile"; echo begun; sleep infinity'
    try:
        with fleet.job("v2", "trains", line, prints="begun"):
            assert findings(fleet, code=0) == [], "libtpu's lock file is no fault while its process runs"
    finally:
        fleet.run("rehearsal", "break", ONE, "lock", "--mend")


IMITATED = {
    "worker-number", "worker-endpoints", "accelerator-type", "instance-id", "preempted", "maintenance-event", "scopes",
    "device-files", "chips-per-host", "jax-devices", "process-index", "preload",
}  # fmt: skip
"""Assumptions that a report of machines of the local cloud confirms."""
SET_UP = (
    "mkdir -p ~/.tpuswarm/venv/bin; cd ~/.tpuswarm/venv/bin; "
    """printf '#!/bin/sh\\nexec $TPUSWARM_PYTHON "$@"\\n' >python; chmod +x python"""
)
"""Leaves the Python of set-up."""


def test_report_says_which_assumptions_the_machines_confirm_and_contradict(fleet):
    def write_report(where: str, code: int = 0) -> tuple[dict, str]:
        out, err = fleet.run("doctor", where, "--report", code=code)
        return json.loads((fleet.folder / "tpuswarm-report.json").read_text()), out + err

    fleet.exec("all", SET_UP)
    try:
        report, said = write_report("all")
        assert report["contradicted"] == {} and report["confirmed"].keys() == IMITATED
        assert f"{len(IMITATED)} confirmed, 0 contradicted" in said
        hosts = {host["host"]: host for host in report["hosts"]}
        assert sorted(hosts) == HOSTS and all(host["is_rehearsed"] and not host["lost"] for host in hosts.values())
        slice_processes = [host["jax"]["process"] for label, host in sorted(hosts.items()) if label != HOST]
        assert slice_processes == [3, 2, 1, 0] and hosts[HOST]["jax"]["kinds"] == ["cpu"] * 8
        assert "attributes/ssh-keys" in hosts[HOST]["metadata_keys"]
        text = str(report)
        assert "ssh-ed25519" not in text and not re.search(r"\b127\.\d+\.\d+\.\d+", text)
        out, _ = fleet.run("doctor", "all", "--run")
        assert re.fullmatch(r"(\S+: JAX adds on all (8|16|32) devices \(cpu\)\n){2}5 hosts: nothing is wrong\n", out), (
            out
        )
        with fleet.broken(ONE, "missing-device", "holder"):
            report, said = write_report("v2", code=1)
        assert report["contradicted"] == {"chips-per-host": f"{HOST}: 3, expected 4"}
        assert "contradicted  chips-per-host" in said and "a process uses the chips" in said
    finally:
        fleet.exec("all", "rm -r ~/.tpuswarm/venv")


def run_connected(machines, work):
    """Open the connections first: no time-out counts that."""

    async def connect(connections):
        await asyncio.gather(*map(connections.to, machines.hosts))
        return await work(connections)

    return machines.run(connect)


def test_fixes_that_were_done_failed_and_hung_are_reported(machines, monkeypatch):
    monkeypatch.setattr(examine, "HOST_TIMEOUT_S", 8.0)
    host = machines.hosts[0]
    fixes = {"lock": "echo done >fixed", "preload": "echo no, not today >&2; exit 3", "tpu-logs": "sleep 1000"}
    found = [Finding(host.label, check, "", "", "", fix) for check, fix in fixes.items()]
    done, failed, hung = run_connected(
        machines, lambda connected: examine.fix_hosts(connected, {host.label: host}, found)
    )
    assert done == "node-0/0: lock is fixed" and (machines[0].home / "fixed").exists()
    assert failed == "node-0/0: preload is not fixed (exit 3): no, not today"
    assert re.search(r"node-0/0 .* 8 s.*; tpu-logs may or may not be fixed", hung), hung


def test_hosts_that_hang_or_have_no_python_are_reported(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(examine, "HOST_TIMEOUT_S", 8.0)
    hung, lacking = (machine.root for machine in machines[:2])
    stand_in = tmp_path / "cloud" / "bin" / "python3"
    stand_in.write_text(
        f"#!/bin/bash\ncase $TPUSWARM_ROOT in {hung}) sleep 1000;; {lacking}) exit 127;; esac\n"
        "echo it is broken >&2; exit 4\n"
    )
    stand_in.chmod(0o755)
    by_label = {
        host.label: Machine(host.label.partition("/")[0], "us-central1-f", "tpu", "v2-8", "ready", "READY")
        for host in machines.hosts
    }

    def unreachable(hosts) -> dict[str, str]:
        reached = ReachableHosts(hosts, (), True, by_label)
        found = run_connected(machines, lambda connected: examine.examine(connected, reached))
        assert {finding.check for finding in found} == {"reach"}
        return {finding.subject: finding.problem for finding in found}

    found = unreachable(machines.hosts)
    assert "was not done within 8 s" in found["node-0/0"]
    assert "has no python3, which doctor and jobs need" in found["node-1/0"]
    assert "cannot be checked (exit 4): it is broken" in found["node-2/0"]
    stand_in.write_text("#!/bin/bash\n")
    assert "cannot be checked (exit 0): no output" in unreachable(machines.hosts[2:])["node-2/0"]

"""`doctor` on machines: planted faults are found, named and mended, and a healthy machine has none."""

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cloud.rehearsal.conftest import until
from tests.remote.conftest import ONE, SLICE
from tpuswarm.cloud.protocol import Machine
from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS
from tpuswarm.doctor import examine
from tpuswarm.doctor.check import Wrong
from tpuswarm.fleet.hosts.routes import ReachableHosts

pytestmark = pytest.mark.slow

HOST = f"{ONE}/0"
WELL = "1 host: nothing is wrong\n"
FINDINGS = {
    "lock": ("lock", "/tmp/libtpu_lockfile is your own, of mode 400, so a program of .*, and no process has it"),
    "holder": ("held", r"process \d+ of .* holds /dev/accel0, and began .* ago: python3 train.py"),
    "missing-device": ("devices", "a host of a v2-8 has 4 chips, and it shows 3: "),
    "tpu-logs": ("tpu-logs", "/tmp/tpu_logs is .* with mode 555, and .* cannot write there"),
    "preload": ("preload", "/etc/environment preloads /usr/lib/.*libtcmalloc.so.4, which is not there"),
    "apt": ("apt", r".* \(process \d+, which began .* ago\) has apt's lock$"),
    "worker-id": ("worker", "it is worker 0, and TPU_WORKER_ID says '7'"),
    "read-only": ("bucket", "its access scopes let it write to no bucket: .*devstorage.read_only"),
    "maintenance": ("notice", "its metadata announces a maintenance: MIGRATE"),
    "symptom": ("symptom", r"the cloud reports of it LOW_MEMORY on worker 0 at 20\d\d-"),
    "unhealthy": ("health", "the cloud calls it unhealthy: The TPU's runtime does not answer."),
}
"""Of each fault that the local cloud can plant: the check that finds it, and its sentence."""
TOGETHER = [
    ["lock", "missing-device", "tpu-logs", "preload", "apt", "worker-id", "maintenance", "symptom"],
    ["holder", "read-only", "unhealthy"],
]
"""Faults that can be planted on one machine at the same time."""


def findings(fleet, where: str = "v2", code: int = 1) -> list[dict]:
    return fleet.run_json("doctor", where, code=code)["found"]


def checks(found: list[dict]) -> list[tuple[str, str]]:
    return sorted((finding["host"], finding["check"]) for finding in found)


def test_healthy_machines_have_nothing_wrong(fleet):
    assert fleet.run("doctor", "all")[0] == "5 hosts: nothing is wrong\n"
    assert fleet.run_json("doctor", f"{SLICE}/2") == {"hosts": 1, "found": []}
    assert "there is no machine 'v9'" in fleet.run("doctor", "v9", code=2)[1]


@pytest.mark.parametrize("faults", TOGETHER, ids=["without-holder", "with-holder"])
def test_planted_faults_are_found_where_they_are_fixed_and_gone_when_mended(fleet, faults):
    assert {fault for faults in TOGETHER for fault in faults} == MACHINE_FAULTS.keys() | NODE_FAULTS.keys()
    with fleet.broken(ONE, *faults):
        wanted = {FINDINGS[fault][0]: FINDINGS[fault][1] for fault in faults}
        found = until(lambda: len(found := findings(fleet)) == len(faults) and found, 120)
        where = {FINDINGS[fault][0]: ONE if fault in NODE_FAULTS else HOST for fault in faults}
        assert {finding["check"]: finding["host"] for finding in found} == where
        for finding in found:
            assert re.match(wanted[finding["check"]], finding["what"]), finding["what"]
        out, _ = fleet.run("doctor", "all", code=1)
        assert all(f"{where[check]}  {check}: " in out for check in wanted) and out.count("    why: ") == len(faults)
        assert out.endswith(f"5 hosts: {len(faults)} wrong\n")
        if fixes := {finding["check"]: finding["fix"] for finding in found if finding["fix"]}:
            out, err = fleet.run("doctor", "v2", "--fix", code=1)
            assert all(fix in out and f"{HOST}: {check} is mended" in err for check, fix in fixes.items())
            assert {finding["check"] for finding in findings(fleet)} == wanted.keys() - fixes.keys()
    assert fleet.run("doctor", "v2")[0] == WELL


def test_cloud_is_checked_for_costs_and_as_before_the_first_machine(fleet):
    found = fleet.run_json("doctor", "cloud", code=1)["found"]
    assert [(finding["of"], finding["check"]) for finding in found] == [("trio", "keeper")]
    assert "2 machines cost $" in found[0]["what"]
    assert "no keeper runs" in fleet.run("doctor", "cloud", code=1)[0]
    project = fleet.run_json("list")["project"]
    with fleet.broken(project, "no-billing"):
        (finding,) = findings(fleet, "cloud")
        assert finding["check"] == "billing" and "billing projects link" in finding["mend"]
    assert "--fix mends machines only" in fleet.run("doctor", "cloud", "--fix", code=2)[1]


def test_machine_at_work_is_healthy_and_one_that_costs_and_does_nothing_is_not(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.doctor.checks.idle.IDLE_S", 0.0)
    (finding,) = findings(fleet)
    assert finding["check"] == "idle" and re.match(r".*, costs \$\d+\.\d+ an hour, and nothing runs", finding["what"])
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; touch "$TPUSWARM_ROOT/tmp/libtpu_lockfile"; echo begun; sleep infinity'
    with fleet.job("v2", "computes", "echo begun; sleep infinity", prints="begun"):
        assert findings(fleet, code=0) == [], "a job without a chip"
    try:
        with fleet.job("v2", "trains", line, prints="begun"):
            assert findings(fleet, code=0) == []
        assert checks(findings(fleet)) == [(HOST, "idle")], "libtpu leaves its file, and takes it again"
    finally:
        fleet.run("rehearsal", "break", ONE, "lock", "--mend")


def test_process_left_by_exec_holds_a_chip_and_that_of_a_running_one_does_not(fleet):
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; setsid -f sleep 98765 >/dev/null 2>&1; echo begun; '
    runs = fleet.start("exec", "v2", "--", f"{line} sleep 98765")
    assert "begun" in runs.stdout.readline()
    assert findings(fleet, code=0) == []
    fleet.interrupt(runs)
    fleet.wait_until_gone("sleep 98765")
    fleet.exec("v2", line)
    try:
        (finding,) = findings(fleet)
        assert finding["check"] == "held"
        what = r"process \d+ of .*, left by an `exec` or a job that is over holds /dev/accel0"
        assert re.match(what, finding["what"]), finding["what"]
    finally:
        fleet.exec("v2", "pkill -f 'sleep 9876[5]'")
    assert findings(fleet, code=0) == []


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print('has it', flush=True)"


def test_held_lock_is_no_fault_and_is_not_removed(fleet):
    fleet.run("rehearsal", "break", ONE, "lock")
    (finding,) = findings(fleet)
    lock = fleet.home(f"{ONE}-0") / "tmp" / "libtpu_lockfile"

    def fix() -> tuple[int, str]:
        environment = {**os.environ, "TPUSWARM_ROOT": str(lock.parents[1])}
        done = subprocess.run(["/bin/bash", "-c", finding["fix"]], env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    lock.chmod(0o600)
    words = [sys.executable, "-c", f"{HOLD}; time.sleep(1e6)", str(lock)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "has it\n"
            lock.chmod(0o400)
            assert findings(fleet, code=0) == []
            assert fix() == (1, "a process has locked it now\n") and lock.exists()
        finally:
            holder.kill()
    with ThreadPoolExecutor(2) as pool:  # two `doctor --fix` at the same time
        assert [*pool.map(lambda _: fix(), range(2))] == [(0, "")] * 2 and not lock.exists()


def test_log_of_a_job_tells_about_its_machine(fleet):
    error = "E0101 tpu: Failed to initialize TPU system: /dev/accel0 does not answer"
    line = (
        "python3 -c \"print('50%|###   | step 1 of 2 ' * 3000, end=chr(13))\"; "
        f"echo {error} >&2; "
        "echo 'RuntimeWarning: os.fork() was called. os.fork() is incompatible with multithreaded code'; "
        "echo done; sleep 5670"
    )
    with fleet.job("v2", "speaks", line, prints="done"):
        bad, fork = sorted(findings(fleet, "all"), key=lambda finding: finding["check"])
        assert checks([bad, fork]) == [(HOST, "bad-node"), (HOST, "fork")]
        assert bad["what"] == f"job speaks says: {error}" and "replace the machine" in bad["mend"]
        assert "job speaks forks" in fork["what"]
    try:
        fleet.exec("v2", "touch -d '2 days ago' ~/.tpuswarm/jobs/speaks/log")
        assert fleet.run("doctor", "v2")[0] == WELL
    finally:
        fleet.exec("v2", "rm -r ~/.tpuswarm/jobs/speaks")


def findings_after(fleet, preparation: str, code: int = 1) -> list[dict]:
    """Findings on a machine where a shell runs that first, in mounts that end with doctor's program."""
    stand_in = fleet.place.stand_ins / "python3"
    stand_in.write_text(
        f"""#!/bin/bash
case $TPUSWARM_ROOT in *{ONE}*) ;; *) exec {sys.executable} "$@";; esac
exec unshare -m bash -c {shlex.quote(preparation + '; exec "$0" -c "${RUN}$2" "${@:3}"')} \\
  {sys.executable} "$@" 2>/dev/null
"""
    )
    stand_in.chmod(0o755)
    try:
        return findings(fleet, code=code)
    finally:
        stand_in.unlink()


SCARCE = {
    "files": ("ulimit -n 1024", "a process may have 1,024 files open at most, fewer than 4,096"),
    "clock": (
        "RUN='import time; t = time.time; time.time = lambda: t() - 3000; '",
        "its clock is (2,9..|3,000) s behind",
    ),
    "memory": (
        "sed 's/^MemAvailable: .*/MemAvailable: 9 kB/' /proc/meminfo >~/low; /bin/mount --bind ~/low /proc/meminfo",
        r"0.0 of \d+ GiB of memory are free",
    ),
    "disk": (
        "/bin/mount -t tmpfs -o size=64k tmpfs $TPUSWARM_ROOT/tmp; cat /dev/zero >$TPUSWARM_ROOT/tmp/all",
        "nothing can be written in .*/tmp: No space left on device",
    ),
}
"""Of a check: what makes a machine fail it, and its sentence."""


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are made by root alone")
def test_machine_that_is_full_or_late_is_found(fleet):
    found = findings_after(fleet, "; ".join(preparation for preparation, _ in SCARCE.values()))
    assert checks(found) == [(HOST, check) for check in sorted(SCARCE)]
    for finding in found:
        assert re.match(SCARCE[finding["check"]][1], finding["what"]), finding["what"]
    (finding,) = findings_after(fleet, "/bin/mount -t tmpfs -o ro tmpfs $TPUSWARM_ROOT/tmp")
    assert finding["check"] == "disk"
    assert re.match("nothing can be written in .*/tmp: Read-only file system", finding["what"]), finding["what"]
    assert findings(fleet, code=0) == []


LATE = """RUN='import time, urllib.request as r; o = r.urlopen
def late(asked, timeout):
    if timeout < 3: raise TimeoutError("timed out")
    return o(asked, timeout=timeout)
r.urlopen = late
'"""
SILENT = """RUN='import os, urllib.request as r
def silent(asked, timeout): raise TimeoutError("timed out")
r.urlopen = silent
os.statvfs = None
'"""


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are made by root alone")
def test_late_metadata_is_no_fault_and_what_cannot_be_looked_at_hides_nothing_else(fleet):
    assert findings_after(fleet, LATE, code=0) == []
    with fleet.broken(ONE, "lock"):
        found = findings_after(fleet, SILENT)
    assert {finding["what"] for finding in found if finding["check"] == "reach"} == {
        "disks could not be looked at: TypeError: 'NoneType' object is not callable",
        "metadata could not be looked at: TimeoutError: timed out",
        "bucket could not be looked at: TimeoutError: timed out",
    }
    assert {finding["check"] for finding in found} == {"reach", "lock"}


def test_jax_on_the_cpu_beside_idle_chips_is_found_unless_it_was_asked_for(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.doctor.checks.on_cpu.YOUNG_S", 0.0)
    program = "import jax, time; jax.devices(); print('computes', flush=True); time.sleep(1e6)"
    lines = [
        f'exec env {change} {sys.executable} -c "{program}"' for change in ("-u JAX_PLATFORMS", "JAX_PLATFORMS=cpu")
    ]
    with fleet.job("v2", "astray", lines[0], "computes"), fleet.job("v2", "asked", lines[1], "computes"):
        (finding,) = findings(fleet)
    assert finding["check"] == "on-cpu"
    assert re.match(r"process \d+ has run JAX for .*, and holds no chip: ", finding["what"])


def test_missing_bucket_and_unreachable_head_are_found_from_a_machine(fleet, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("tpuswarm.cli.look.doctor._head_address", lambda: address)
        assert findings(fleet, code=0) == []
    monkeypatch.setattr("tpuswarm.cli.look.doctor._bucket_name", lambda meant: "rehearsal-gone")
    found = {finding["check"]: finding["what"] for finding in findings(fleet)}
    assert found.keys() == {"bucket", "head"}
    assert found["bucket"] == "gs://rehearsal-gone does not answer from here: there is no such bucket"
    assert f"(Ray, {address}) cannot be reached from here: Connection refused" in found["head"]


def test_versions_that_differ_or_do_not_fit_are_found_on_the_machines(fleet):
    fleet.exec("v5e", "mkdir -p ~/.tpuswarm")
    sites = []
    for worker in range(4):
        site = fleet.user_home(f"{SLICE}-{worker}") / ".tpuswarm" / "venv" / "lib" / "python3.11" / "site-packages"
        jax = "0.9.0" if worker == 2 else "0.10.2"
        for name in (f"jax-{jax}", "libtpu-0.0.42" if worker != 1 else "libtpu-0.0.17"):
            (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"jax-{jax}.dist-info" / "METADATA").write_text('Requires-Dist: libtpu==0.0.42.*; extra == "tpu"\n')
        sites.append(site)
    try:
        assert {(finding["host"], finding["check"], finding["what"]) for finding in findings(fleet, "v5e")} == {
            (f"{SLICE}/1", "libtpu", "libtpu is 0.0.17, and jax 0.10.2 asks for libtpu==0.0.42.*"),
            (f"{SLICE}/1", "versions", "libtpu is 0.0.17 here, and 0.0.42 on most hosts"),
            (f"{SLICE}/2", "versions", "jax is 0.9.0 here, and 0.10.2 on most hosts"),
        }
    finally:
        for site in sites:
            shutil.rmtree(site.parents[2])


def run_connected(machines, work):
    """Open the connections first: no time-out counts that."""

    async def connect(connections):
        await asyncio.gather(*map(connections.to, machines.hosts))
        return await work(connections)

    return machines.run(connect)


def test_fixes_that_were_done_failed_and_hung_are_reported(machines, monkeypatch):
    monkeypatch.setattr(examine, "PATIENCE", 8.0)
    host = machines.hosts[0]
    fixes = {"lock": "echo done >fixed", "preload": "echo no, not today >&2; exit 3", "tpu-logs": "sleep 1000"}
    found = [examine.Found(host.label, check, Wrong("", "", fix)) for check, fix in fixes.items()]
    done, failed, hung = run_connected(machines, lambda connected: examine.fix(connected, {host.label: host}, found))
    assert done == "node-0/0: lock is mended" and (machines[0].home / "fixed").exists()
    assert failed == "node-0/0: preload is not mended (exit 3): no, not today"
    assert re.search(r"node-0/0 .* 8 s.*; nobody knows whether tpu-logs is mended", hung), hung


def test_hosts_that_hang_or_have_no_python_are_reported(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(examine, "PATIENCE", 8.0)
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
        return {finding.host: finding.wrong.what for finding in found}

    found = unreachable(machines.hosts)
    assert "was not done within 8 s" in found["node-0/0"]
    assert "has no python3, with which doctor looks at a host" in found["node-1/0"]
    assert "cannot be looked at (exit 4): it is broken" in found["node-2/0"]
    stand_in.write_text("#!/bin/bash\n")
    assert "cannot be looked at (exit 0): it said nothing" in unreachable(machines.hosts[2:])["node-2/0"]

"""`doctor`: every fault that can be planted is found, named and mended; a machine that is well has none."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS

PLANTED = {
    "lock": (
        "lock",
        "/tmp/libtpu_lockfile is your own, of mode 400, so a program of .* cannot open it, and no process has it",
    ),
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
"""Fault, the check that finds it, and what that says."""


def doctor(fleet, *words: str, code: int) -> dict:
    return json.loads(fleet.run("doctor", *words, "--json", code=code)[0])


def test_machines_that_are_well_have_nothing_wrong(fleet):
    out, _ = fleet.run("doctor", "all")
    assert out == "5 hosts: nothing is wrong\n"
    assert doctor(fleet, "v5e-usc1a-0/2", code=0) == {"hosts": 1, "found": []}


@pytest.mark.parametrize("fault", [*MACHINE_FAULTS, *NODE_FAULTS])
def test_a_fault_is_found_where_it_is_and_nowhere_else(fleet, fault):
    check, says = PLANTED[fault]
    where = "v2-usc1f-0" if fault in NODE_FAULTS else "v2-usc1f-0/0"
    fleet.run("rehearsal", "break", "v2-usc1f-0", fault)
    try:
        end = time.monotonic() + 60
        while not (found := json.loads(fleet.start("doctor", "v2", "--json").communicate()[0])["found"]):
            assert time.monotonic() < end, "what was planted takes a moment to begin"
        assert [(each["host"], each["check"]) for each in found] == [(where, check)]
        assert re.match(says, found[0]["what"]), found[0]["what"]
        out, _ = fleet.run("doctor", "all", code=1)
        assert f"{where}  {check}: " in out and "    why: " in out and out.endswith("5 hosts: 1 wrong\n")
        if found[0]["fix"]:
            out, _ = fleet.run("doctor", "v2", "--fix")
            assert found[0]["fix"] in out and out.endswith("1 host: nothing is wrong\n")
    finally:
        fleet.run("rehearsal", "break", "v2-usc1f-0", fault, "--mend")
    assert fleet.run("doctor", "v2")[0] == "1 host: nothing is wrong\n"


def test_a_cloud_is_looked_at_as_before_the_first_machine_and_for_what_costs(fleet):
    (found,) = json.loads(fleet.run("doctor", "cloud", "--json", code=1)[0])["found"]
    assert (found["of"], found["check"]) == ("trio", "keeper") and "2 machines cost $" in found["what"]
    assert "no keeper runs" in fleet.run("doctor", "cloud", code=1)[0]
    project = json.loads(fleet.run("list", "--json")[0])["project"]
    fleet.run("rehearsal", "break", project, "no-billing")
    try:
        found = json.loads(fleet.run("doctor", "cloud", "--json", code=1)[0])["found"]
        assert [each["check"] for each in found] == ["billing"] and "billing projects link" in found[0]["mend"]
    finally:
        fleet.run("rehearsal", "break", project, "no-billing", "--mend")
    assert "leave --fix out" in fleet.run("doctor", "cloud", "--fix", code=2)[1]


def test_a_job_that_trains_is_nothing_wrong(fleet):
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; touch "$TPUSWARM_ROOT/tmp/libtpu_lockfile"; echo begun; sleep infinity'
    fleet.run("exec", "v2", "--detach", "--name", "trains", "--", line)
    try:
        end = time.monotonic() + 60
        while "begun" not in fleet.run("logs", "trains")[0]:
            assert time.monotonic() < end
        assert fleet.run("doctor", "v2")[0] == "1 host: nothing is wrong\n"
    finally:
        fleet.run("stop", "trains")
    assert doctor(fleet, "v2", code=0)["found"] == [], "libtpu leaves its file, and takes it again"
    fleet.run("rehearsal", "break", "v2-usc1f-0", "lock", "--mend")


def test_what_an_exec_has_left_running_holds_a_chip_for_nobody(fleet):
    """Its command has ended, and what it began has its mark still; while it runs the same is somebody's."""
    line = 'exec 9<>"$TPUSWARM_ROOT/dev/accel0"; setsid sleep 98765 >/dev/null 2>&1 & echo begun; '
    runs = fleet.start("exec", "v2", "--", f"{line} wait")
    assert "begun" in runs.stdout.readline()
    assert doctor(fleet, "v2", code=0)["found"] == []
    runs.send_signal(signal.SIGINT)
    runs.communicate()
    end = "pkill -f 'sleep 9876[5]'"  # what ignores SIGINT is ended 5 s later: not waited for here
    fleet.run("exec", "v2", "--", f"{end} || true")
    fleet.run("exec", "v2", "--", line)
    try:
        (found,) = doctor(fleet, "v2", code=1)["found"]
        assert found["check"] == "held"
        assert re.match(r"process \d+ of .*, left by an `exec` or a job that is over holds /dev/accel0", found["what"])
    finally:
        fleet.run("exec", "v2", "--", end)
    assert doctor(fleet, "v2", code=0)["found"] == []


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print('has it', flush=True)"


def test_a_lock_that_somebody_has_is_not_removed(fleet):
    """Also where it is taken between the look and the fix."""
    fleet.run("rehearsal", "break", "v2-usc1f-0", "lock")
    (found,) = doctor(fleet, "v2", code=1)["found"]
    lock = fleet.home("v2-usc1f-0-0") / "tmp" / "libtpu_lockfile"
    lock.chmod(0o600)
    words = [sys.executable, "-c", f"{HOLD}; time.sleep(1e6)", str(lock)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "has it\n"
            lock.chmod(0o400)
            assert doctor(fleet, "v2", code=0)["found"] == []
            environment = {**os.environ, "TPUSWARM_ROOT": str(lock.parents[1])}
            done = subprocess.run(["/bin/bash", "-c", found["fix"]], env=environment, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (1, "a process has locked it now\n") and lock.exists()
        finally:
            holder.kill()
            fleet.run("rehearsal", "break", "v2-usc1f-0", "lock", "--mend")


def test_a_progress_bar_is_read_as_fast_as_lines(fleet):
    """Its log has no line's end: 64 KiB of it, and a mark at the end."""
    bar = "python3 -c \"print('50%|###   | step 1 of 2 ' * 3000, end=chr(13))\""
    line = f"{bar}; echo TPU initialization failed: x; echo said"
    fleet.run("exec", "v2", "--detach", "--name", "bar", "--", line)
    end = time.monotonic() + 60
    while "said" not in fleet.run("logs", "bar")[0]:
        assert time.monotonic() < end
    try:
        (found,) = doctor(fleet, "v2", code=1)["found"]
        assert found["what"] == "job bar says: TPU initialization failed: x"
    finally:
        fleet.run("exec", "v2", "--", "rm -r ~/.tpuswarm/jobs/bar")


SAYS = (
    "echo E0101 tpu: Failed to initialize TPU system: /dev/accel0 does not answer >&2; "
    "echo 'RuntimeWarning: os.fork() was called. os.fork() is incompatible with multithreaded code'; echo said"
)


def test_what_a_jobs_log_says_of_its_machine_is_heard(fleet):
    fleet.run("exec", "v2", "--detach", "--name", "speaks", "--", SAYS)
    end = time.monotonic() + 60
    while "said" not in fleet.run("logs", "speaks")[0]:
        assert time.monotonic() < end
    found = doctor(fleet, "all", code=1)["found"]
    assert [(each["host"], each["check"]) for each in found] == [("v2-usc1f-0/0", "bad-node"), ("v2-usc1f-0/0", "fork")]
    said = "E0101 tpu: Failed to initialize TPU system: /dev/accel0 does not answer"
    assert found[0]["what"] == f"job speaks says: {said}"
    assert "replace the machine" in found[0]["mend"] and "job speaks forks" in found[1]["what"]
    fleet.run("exec", "v2", "--", "touch -d '2 days ago' ~/.tpuswarm/jobs/speaks/log")
    assert fleet.run("doctor", "v2")[0] == "1 host: nothing is wrong\n"


MADE_WRONG = {
    "files": ("ulimit -n 1024", "a process may have 1,024 files open at most, fewer than 4,096"),
    "clock": (
        "RUN='import time; t = time.time; time.time = lambda: t() - 3000; '",
        r"its clock is (2,9\d\d|3,000) s behind",
    ),
    "memory": (
        "sed 's/^MemAvailable: .*/MemAvailable: 9 kB/' /proc/meminfo >~/low; /bin/mount --bind ~/low /proc/meminfo",
        r"0.0 of \d+ GiB of memory are free",
    ),
    "disk": (
        "/bin/mount -t tmpfs -o size=64k tmpfs $TPUSWARM_ROOT/tmp; cat /dev/zero >$TPUSWARM_ROOT/tmp/all",
        "nothing can be written in .*/tmp: No space left on device",
    ),
    "disk, read-only": (
        "/bin/mount -t tmpfs -o ro tmpfs $TPUSWARM_ROOT/tmp",
        "nothing can be written in .*/tmp: Read-only file system",
    ),
}
"""Check: what is done to a machine before the look, in mounts that end with it; what is said."""


def looked_at_after(fleet, make: str, code: int = 1) -> list[dict]:
    """What is found on a machine where a shell does that first, in mounts that end with the look."""
    stand_in = fleet.place.stand_ins / "python3"
    stand_in.write_text(
        f"""#!/bin/bash
case $TPUSWARM_ROOT in *v2-usc1f-0*) ;; *) exec {sys.executable} "$@";; esac
exec unshare -m bash -c {shlex.quote(make + '; exec "$0" -c "${RUN}$2" "${@:3}"')} \\
  {sys.executable} "$@" 2>/dev/null
"""
    )
    stand_in.chmod(0o755)
    try:
        return doctor(fleet, "v2", code=code)["found"]
    finally:
        stand_in.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are made by root alone")
@pytest.mark.parametrize("check", MADE_WRONG)
def test_a_machine_that_is_full_slow_or_late_is_found(fleet, check):
    make, says = MADE_WRONG[check]
    found = looked_at_after(fleet, make)
    assert [(each["host"], each["check"]) for each in found] == [("v2-usc1f-0/0", check.partition(",")[0])]
    assert re.match(says, found[0]["what"]), found[0]["what"]
    assert doctor(fleet, "v2", code=0)["found"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are made by root alone")
def test_what_cannot_be_looked_at_is_said_and_the_rest_is_looked_at(fleet):
    fleet.run("rehearsal", "break", "v2-usc1f-0", "lock")
    try:
        found = looked_at_after(fleet, "RUN='import os; os.statvfs = None; '")
    finally:
        fleet.run("rehearsal", "break", "v2-usc1f-0", "lock", "--mend")
    assert [each["check"] for each in found] == ["reach", "lock"]
    assert found[0]["what"] == "disks could not be looked at: TypeError: 'NoneType' object is not callable"


LATE = """RUN='import time, urllib.request as r; o = r.urlopen
def late(asked, timeout):
    if timeout < 3: raise TimeoutError("timed out")
    return o(asked, timeout=timeout)
r.urlopen = late
'"""
SILENT = """RUN='import urllib.request as r
def silent(asked, timeout): raise TimeoutError("timed out")
r.urlopen = silent
'"""


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are made by root alone")
def test_a_machine_that_is_answered_late_is_well_and_one_that_is_not_has_no_other_fault(fleet):
    """As on a busy one: its metadata take 3 s; or never come, which says nothing of its service account."""
    assert looked_at_after(fleet, LATE, code=0) == []
    found = looked_at_after(fleet, SILENT)
    assert {each["check"] for each in found} == {"reach"}
    assert {each["what"] for each in found} == {
        f"{what} could not be looked at: TimeoutError: timed out" for what in ("metadata", "bucket")
    }


JAX = "import jax, time; jax.devices(); print('computes', flush=True); time.sleep(1e6)"


def test_a_program_that_computes_on_the_cpu_beside_its_chips_is_found(fleet, monkeypatch):
    """A real JAX, which finds no libtpu that it could use, and one that was told to use the CPU."""
    monkeypatch.setattr("tpuswarm.doctor.checks.on_cpu.YOUNG_S", 0.0)
    for name, told in (("astray", "env -u JAX_PLATFORMS"), ("asked", "env JAX_PLATFORMS=cpu")):
        fleet.run("exec", "v2", "--detach", "--name", name, "--", f'exec {told} {sys.executable} -c "{JAX}"')
        try:
            end = time.monotonic() + 120
            while "computes" not in fleet.run("logs", name)[0]:
                assert time.monotonic() < end
            found = doctor(fleet, "v2", code=name == "astray")["found"]
            assert [each["check"] for each in found] == ["on-cpu"] * (name == "astray"), found
            assert not found or re.match(r"process \d+ has run JAX for .*, and holds no chip: ", found[0]["what"])
        finally:
            fleet.run("stop", name)


def test_a_machine_that_costs_and_does_nothing_is_found(fleet, monkeypatch):
    assert doctor(fleet, "v2", code=0)["found"] == []
    monkeypatch.setattr("tpuswarm.doctor.checks.idle.IDLE_S", 0.0)
    (found,) = doctor(fleet, "v2", code=1)["found"]
    assert found["check"] == "idle" and re.match(r".*, costs \$\d+\.\d+ an hour, and nothing runs", found["what"])
    fleet.run("exec", "v2", "--detach", "--name", "at-work", "--", "echo begun; sleep infinity")
    try:
        end = time.monotonic() + 60
        while "begun" not in fleet.run("logs", "at-work")[0]:
            assert time.monotonic() < end
        assert doctor(fleet, "v2", code=0)["found"] == []
    finally:
        fleet.run("stop", "at-work")


def test_a_bucket_that_is_not_there_is_found_from_a_machine(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.cli.doctor._bucket", lambda meant: "rehearsal-gone")
    (found,) = doctor(fleet, "v2", code=1)["found"]
    assert (found["check"], found["what"]) == (
        "bucket",
        "gs://rehearsal-gone does not answer from here: there is no such bucket",
    )


def test_versions_that_differ_or_do_not_fit_are_found_on_the_machines(fleet):
    """What pip would have left there, in the environment that set-up makes."""
    fleet.run("exec", "v5e", "--", "mkdir -p ~/.tpuswarm")
    sites = []
    for worker in range(4):
        site = fleet.user_home(f"v5e-usc1a-0-{worker}") / ".tpuswarm" / "venv" / "lib" / "python3.11" / "site-packages"
        jax = "0.9.0" if worker == 2 else "0.10.2"
        for name in (f"jax-{jax}", "libtpu-0.0.42" if worker != 1 else "libtpu-0.0.17"):
            (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"jax-{jax}.dist-info" / "METADATA").write_text('Requires-Dist: libtpu==0.0.42.*; extra == "tpu"\n')
        sites.append(site)
    try:
        found = doctor(fleet, "v5e", code=1)["found"]
        assert {(each["host"], each["check"], each["what"]) for each in found} == {
            ("v5e-usc1a-0/1", "libtpu", "libtpu is 0.0.17, and jax 0.10.2 asks for libtpu==0.0.42.*"),
            ("v5e-usc1a-0/1", "versions", "libtpu is 0.0.17 here, and 0.0.42 on most hosts"),
            ("v5e-usc1a-0/2", "versions", "jax is 0.9.0 here, and 0.10.2 on most hosts"),
        }
    finally:
        for site in sites:
            shutil.rmtree(site.parents[2])
    assert doctor(fleet, "v5e", code=0)["found"] == []


def test_a_head_that_a_host_cannot_reach_is_found_from_there(fleet, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("tpuswarm.cli.doctor._head", lambda: address)
        assert doctor(fleet, "v2", code=0)["found"] == []
    (found,) = doctor(fleet, "v2", code=1)["found"]
    assert (
        found["check"] == "head"
        and f"(Ray, {address}) cannot be reached from here: Connection refused" in found["what"]
    )


def test_a_fix_that_cannot_be_done_is_said_and_stays_wrong(fleet, monkeypatch):
    fleet.run("rehearsal", "break", "v2-usc1f-0", "lock")
    monkeypatch.setattr("tpuswarm.doctor.checks.lock.REMOVE", "echo no, not today >&2; exit 3; true")
    try:
        out, err = fleet.run("doctor", "v2", "--fix", code=1)
        assert "v2-usc1f-0/0: lock is not mended (exit 3): no, not today" in err and "1 host: 1 wrong\n" in out
    finally:
        fleet.run("rehearsal", "break", "v2-usc1f-0", "lock", "--mend")


def test_of_a_fix_that_ends_half_way_it_is_said_what_was_done(fleet, monkeypatch):
    """The first one works, the second never ends."""
    for fault in ("lock", "tpu-logs"):
        fleet.run("rehearsal", "break", "v2-usc1f-0", fault)
    monkeypatch.setattr("tpuswarm.doctor.checks.tpu_logs.FILE", '/tmp/tpu_logs"; sleep 1000; : "')
    monkeypatch.setattr("tpuswarm.doctor.examine.PATIENCE", 8.0)
    try:
        _, err = fleet.run("doctor", "v2", "--fix")  # its chmod was done, and is found to be
    finally:
        for fault in ("lock", "tpu-logs"):
            fleet.run("rehearsal", "break", "v2-usc1f-0", fault, "--mend")
    assert "v2-usc1f-0/0: lock is mended\n" in err
    assert re.search("v2-usc1f-0/0 .* 8 s.*; nobody knows whether tpu-logs is mended", err), err


def test_a_host_without_python_or_with_one_that_fails_is_said(fleet):
    stand_in = fleet.place.stand_ins / "python3"
    for body, says in (
        ("exit 127", "has no python3, with which doctor looks at a host"),
        ("echo it is broken >&2; exit 4", "cannot be looked at (exit 4): it is broken"),
        ("echo Segmentation fault; exit 0", "cannot be looked at (exit 0): it said nothing"),
    ):
        stand_in.write_text(f"#!/bin/bash\n{body}\n")
        stand_in.chmod(0o755)
        try:
            (found,) = doctor(fleet, "v2", code=1)["found"]
        finally:
            stand_in.unlink()
        assert found["check"] == "reach" and says in found["what"], found


def test_a_host_that_hangs_is_given_up_and_the_others_are_looked_at(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.doctor.examine.PATIENCE", 5.0)
    stand_in = fleet.place.stand_ins / "python3"
    stand_in.write_text(
        f'#!/bin/bash\ncase $TPUSWARM_ROOT in *v2-usc1f-0*) sleep 1000;; esac\nexec {sys.executable} "$@"\n'
    )
    stand_in.chmod(0o755)
    try:
        (found,) = doctor(fleet, "all", code=1)["found"]
    finally:
        stand_in.unlink()
    assert (found["host"], found["check"]) == ("v2-usc1f-0/0", "reach") and "5" in found["what"], found


def test_two_at_once_find_and_mend_the_same(fleet):
    fleet.run("rehearsal", "break", "v2-usc1f-0", "lock")
    both = [fleet.start("doctor", "v2", "--fix") for _ in range(2)]
    assert all(fleet.finish(each)[0].endswith("1 host: nothing is wrong\n") for each in both)


def test_wrong_words(fleet):
    assert "there is no" in fleet.run("doctor", "v9", code=2)[1]

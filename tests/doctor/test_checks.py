"""The findings of facts, and the programs for hosts, without a machine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tpuswarm.doctor import collect, processes, report
from tpuswarm.doctor.checks import BUSY, CHECKS, VERSIONS
from tpuswarm.doctor.examine import MODULES, judge
from tpuswarm.doctor.finding import CheckedHost
from tpuswarm.remote.modules import bootstrap, pack_modules
from tpuswarm.watch import follow

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_every_command_in_an_advice_exists():
    from tpuswarm.cli.app import make_app

    root = typer.main.get_command(make_app())
    commands = [command for check in (*CHECKS, VERSIONS) for command in re.findall(r"`(tpuswarm [^`]+)`", check.advice)]
    assert len(commands) > 6
    for command in commands:
        name, *words = shlex.split(command)[1:]
        context = root.commands[name].make_context(name, words, resilient_parsing=True)
        assert name != "setup" or context.params["target"] is None, command


def test_documentation_lists_every_check():
    cells = [(check.id, check.looks_at, check.why, check.advice) for check in (*CHECKS, VERSIONS)]
    rows = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)
    head = "| check | looks at | why it matters | how to fix it |\n|---|---|---|---|\n"
    before, _, after = PAGE.read_text().partition(head)
    documented, end, after = after.partition("\n## ")
    if os.environ.get("TPUSWARM_GOLDEN") == "write":
        PAGE.write_text(before + head + rows + end + after)
    else:
        assert documented == rows


def test_root_sees_who_has_a_device_open():
    """The line that runs with sudo, on a device of this computer."""
    line = processes.LIST_OPEN_CHIPS.replace("/dev/accel[0-9]*", "/dev/zer[o]*")
    with open("/dev/zero", "rb") as file:  # noqa: PTH123
        done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0 and f"/proc/{os.getpid()}/fd/{file.fileno()}" in done.stdout.split()


def test_this_computer_is_checked_and_fixed_without_a_fleet(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUSWARM_ROOT", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "libtpu_lockfile").touch(0o400)
    code, out, _ = typed("doctor")
    assert code == 1 and out.startswith("here  lock: /tmp/libtpu_lockfile belongs to you with mode 400: ")
    assert "or `tpuswarm doctor --fix`" in out and out.endswith("\nthis computer: 1 wrong\n")
    code, out, _ = typed("doctor", "--fix")
    assert code == 0 and out.endswith("this computer: nothing is wrong\n") and not list((tmp_path / "tmp").iterdir())


def test_process_with_a_chip_is_ended_on_request_alone(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUSWARM_ROOT", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "tmp").mkdir()
    (chip := tmp_path / "dev" / "accel0").touch()
    line = 'exec 9<>"$1"; echo open; exec sleep infinity'
    with subprocess.Popen(["bash", "-c", line, "holder", chip], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            code, out, _ = typed("doctor")
            assert code == 1 and f"process {process.pid} of" in out and "`tpuswarm doctor --fix --kill`" in out
            assert typed("doctor", "--fix")[0] == 1
            assert "there is no terminal to ask on: add --yes" in typed("doctor", "--fix", "--kill")[2]
            assert process.poll() is None
            code, out, err = typed("doctor", "--fix", "--kill", "--yes")
            assert code == 0 and "here: held is fixed" in err, out
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()


def test_machine_without_jax_is_told_how_to_install_it():
    host = {"host": "v2-0", "type": "v2-8", "jax": {"error": "ModuleNotFoundError: No module named 'jax'"}}
    (finding,) = report.check_jax([host])
    assert finding.advice == "`tpuswarm setup --on v2-0` installs it"


def test_jax_adds_on_all_devices_of_this_computer(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    code, out, err = typed("doctor", "--run")
    assert (code, out) == (0, "here: JAX adds on all 3 devices (cpu)\n1 host: nothing is wrong\n"), err
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    code, out, _ = typed("doctor", "--run")
    assert code == 1 and "here  run: JAX did not add on all chips: exit 1: " in out


HEALTHY = {
    "time": 0.0, "user": "me", "devices": ["/dev/accel0"], "holders": [], "lock": None, "logs": None, "preload": {},
    "is_blind": False, "locker": None, "lost": {},
    "disks": [{"path": "/home/me", "free": 50e9, "size": 100e9, "inodes": 1000, "error": None}],
    "memory": {"MemTotal": 300e9, "MemAvailable": 200e9, "SwapTotal": 0, "SwapFree": 0}, "files": 4096, "apt": None,
    "packages": {"jax": "0.10.2"}, "wanted_libtpu": None, "worker_id": None, "accelerator": None, "messages": [],
    "head": None, "bucket": None, "on_cpu": [], "is_attended": True,
    "metadata": {"worker": "3", "type": "v4-32", "preempted": "FALSE", "maintenance": "NONE", "scopes": None},
}  # fmt: skip


def checked_host(label="a/3", clock_skew_s=0.0, age_s=None, **facts) -> CheckedHost:
    """A worker of a v4-32; each fact replaces a healthy one, or some values of it."""
    merged = dict(HEALTHY)
    for name, fact in facts.items():
        healthy = HEALTHY[name]
        first = healthy[0] if isinstance(healthy, list) and healthy else healthy
        changed = {**first, **fact} if isinstance(fact, dict) and isinstance(first, dict) else fact
        merged[name] = [changed] if isinstance(healthy, list) and isinstance(fact, dict) else changed
    return CheckedHost(label, merged, clock_skew_s, "v4-32", 1, int(label[-1]), age_s, 3.5)


def process(**values) -> dict:
    return {
        "pid": 7, "user": "me", "command": "python3 train.py", "age_s": 90.0, "path": "/dev/accel0",
        "is_requested": False, "is_leftover": False, "job": "", **values,
    }  # fmt: skip


def entry(**values) -> dict:
    return {"user": "root", "mode": "600", "is_writable": False, "is_mine": False, **values}


def message(mark: str, text: str = "") -> dict:
    return {"job": "j", "mark": mark, "text": text or mark}


NO_PRELOAD = {"/usr/lib/libtcmalloc.so.4": "does not exist"}
UPCOMING = '{"type": "SCHEDULED", "window_start_time": "2", "window_end_time": "6"}'
READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"


@pytest.mark.parametrize(
    ("facts", "check", "sentence"),
    [
        ({"devices": []}, "devices", "a host of a v4-32 has 1 chips, but this one shows none"),
        ({"holders": [process()]}, "held", "process 7 of me holds /dev/accel0, started 1 min ago: python3 train.py"),
        ({"holders": [process(is_leftover=True)]}, "held", "left over from an `exec` or a job that ended holds"),
        ({"holders": [process(job="j")]}, "held", "job j (process 7 of me) holds /dev/accel0"),
        ({"holders": [process(job="j", is_requested=True)]}, None, ""),
        ({"holders": [process(command="/usr/bin/tpu-runtime")]}, None, ""),
        ({"lock": entry()}, "lock", "/tmp/libtpu_lockfile belongs to root with mode 600: me cannot open it"),
        ({"lock": entry(is_writable=True)}, None, ""),
        ({"lock": entry(), "locker": process()}, None, ""),
        ({"logs": entry(mode="555")}, "tpu-logs", "/tmp/tpu_logs belongs to root with mode 555: me cannot write"),
        ({"messages": [message("Falling back to cpu")]}, "on-cpu", "log of job j: Falling back to cpu"),
        ({"on_cpu": [process()]}, "on-cpu", "process 7 has run JAX for 1 min without a chip: python3 train.py"),
        ({"on_cpu": [process(age_s=59.0)]}, None, ""),
        ({"messages": [message("TPU initialization failed")]}, "bad-node", "log of job j: TPU initialization failed"),
        ({"messages": [message("open(/dev/vfio", "open(/dev/vfio/0): busy")]}, None, ""),
        ({"messages": [message("os.fork() was called")]}, "fork", "job j forks while JAX's threads run: os.fork()"),
        ({"messages": [message("cannot be preloaded")]}, "preload", "log of job j: cannot be preloaded"),
        ({"preload": NO_PRELOAD}, "preload", "preloads /usr/lib/libtcmalloc.so.4, which does not exist"),
        ({"worker_id": "7"}, "worker", "the cloud calls it worker 3, but TPU_WORKER_ID says '7'"),
        ({"metadata": {"worker": "1"}}, "worker", "the cloud calls it worker 3, but its metadata says '1'"),
        ({"accelerator": "v4-16"}, "worker", "the cloud calls it a v4-32, but TPU_ACCELERATOR_TYPE says 'v4-16'"),
        ({"metadata": {"type": "v9"}}, "worker", "the cloud calls it a v4-32, but its metadata says 'v9'"),
        (
            {"packages": {"libtpu": "0.0.17"}, "wanted_libtpu": "==0.0.42.*"},
            "libtpu",
            "libtpu is 0.0.17, but jax 0.10.2 needs libtpu==0.0.42.*",
        ),
        ({"head": {"address": "h:1", "error": "refused"}}, "head", "cannot reach the swarm's head (Ray, h:1): refused"),
        ({"bucket": {"name": "b", "missing": ["get"], "error": ""}}, "bucket", "gs://b does not allow it get"),
        ({"bucket": {"name": "b", "missing": [], "error": "gone"}}, "bucket", "gs://b does not answer from here: gone"),
        (
            {"bucket": {"name": "b", "missing": [], "error": ""}, "metadata": {"scopes": READ_ONLY}},
            "bucket",
            "its access scopes allow writing to no bucket: https://",
        ),
        ({"metadata": {"preempted": "TRUE"}}, "notice", "a preemption has begun"),
        ({"metadata": {"maintenance": "MIGRATE"}}, "notice", "its metadata announces maintenance: MIGRATE"),
        ({"metadata": {"upcoming": UPCOMING}}, "notice", "its metadata announces scheduled maintenance from 2 to 6"),
        ({"metadata": {"upcoming": '{"error": "no notifications"}'}}, None, ""),
        ({"metadata": {"upcoming": "NONE"}}, None, ""),
        ({"disks": {"free": 1e9}}, "disk", "the disk of /home/me has 0.9 of 93 GiB left"),
        ({"disks": {"inodes": 0}}, "disk", "the disk of /home/me has no inodes left"),
        ({"disks": {"error": "Read-only"}}, "disk", "nothing can be written in /home/me: Read-only"),
        ({"memory": {"MemAvailable": 1e9}}, "memory", "0.9 of 279 GiB of memory are free"),
        ({"memory": {"SwapTotal": 9e9}}, "memory", "8.4 GiB of memory are swapped to disk"),
        ({"files": 1024}, "files", "a process may open at most 1,024 files, fewer than 4,096"),
        ({"clock_skew_s": -300.0}, "clock", "its clock is 300 s behind this computer's"),
        ({"apt": process(command="apt-get")}, "apt", "apt-get (process 7, started 1 min ago) has apt's lock"),
        (
            {"label": "a/0", "age_s": 3601.0, "is_attended": False, "metadata": {"worker": "0"}},
            "idle",
            "it has existed for 1 h, costs $3.50 an hour, and runs nothing",
        ),
        ({"label": "a/0", "age_s": 3601.0, "metadata": {"worker": "0"}}, None, ""),
        ({"age_s": 3601.0, "is_attended": False}, None, ""),
    ],
)
def test_facts_lead_to_one_finding(facts, check, sentence):
    assert judge([checked_host()]) == []
    found = judge([checked_host(**facts)])
    assert [finding.check for finding in found] == ([check] if check else [])
    assert all(sentence in finding.problem and finding.subject.startswith("a/") for finding in found)


PROBES = {
    "list_devices": True, "find_holders_as_root": True, "find_holders": True, "find_requested": True,
    "find_cpu_programs": False, "read_entry": False, "find_locker": False, "read_preload": False, "read_disks": False,
    "read_memory": False, "max_open_files": False, "read_versions": False, "wanted_libtpu": False,
    "read_metadata": False, "find_messages": False,
}  # fmt: skip
"""Each probe of a host, and whether `idle` depends on it."""


@pytest.mark.parametrize("probe", PROBES)
def test_failed_probe_costs_only_its_own_facts(probe, monkeypatch):
    def fail(*arguments):
        raise ValueError("odd")

    monkeypatch.setattr(collect, probe, fail)
    found = collect.collect("", "")
    assert HEALTHY.keys() - found.keys() <= found["lost"].keys() and set(found["lost"].values()) == {"ValueError: odd"}
    idle = {**HEALTHY, "is_attended": False, "metadata": None}
    facts = {name: value for name, value in idle.items() if name in found}
    findings = judge([CheckedHost("a/0", {**facts, "lost": found["lost"]}, 0.0, "v4-32", 1, 0, age_s=1e6)])
    assert {finding.check for finding in findings} == ({"reach"} if PROBES[probe] else {"reach", "idle"})
    assert any("idle" in finding.advice for finding in findings if finding.check == "reach") == PROBES[probe]


def test_checks_without_their_facts_are_named_and_others_are_made():
    facts = {**HEALTHY, "preload": NO_PRELOAD, "lost": {"messages": "odd", "packages": "odd"}}
    del facts["messages"], facts["packages"]
    host = CheckedHost("a/3", facts, 0.0, "v4-32", 1, 3)
    findings = judge([host])
    assert [(finding.check, finding.advice.rpartition("; ")[2]) for finding in findings[:2]] == [
        ("reach", "skipped or incomplete: on-cpu, bad-node, preload, fork"),
        ("reach", "skipped or incomplete: versions, libtpu"),
    ]
    assert [finding.check for finding in findings[2:]] == ["preload"]
    assert judge([host], checks=(BUSY,)) == []
    del facts["holders"]
    facts["lost"]["holders"] = "odd"
    assert [finding.problem for finding in judge([host], checks=(BUSY,))] == ["holders could not be read: odd"]


def test_hosts_with_other_versions_are_named():
    versions = ("0.10.2", "0.9.0", "0.10.2")
    hosts = [CheckedHost(f"a/{n}", {**HEALTHY, "packages": {"jax": version}}) for n, version in enumerate(versions)]
    for count, others in ((2, "a/0"), (3, "most hosts")):
        (found,) = judge(hosts[:count])
        expected = ("a/1", "versions", f"jax is 0.9.0 here, but 0.10.2 on {others}")
        assert (found.subject, found.check, found.problem) == expected


def test_name_of_a_process_may_be_any_bytes():
    line = "import sys; open('/proc/self/comm', 'wb').write(b'\\xff) \\xfe'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        place = Path("/proc", str(child.pid))
        assert b"\xff" in (place / "comm").read_bytes()
        processes.find_requested()
        assert processes.describe_process(place, processes.ROOT)["pid"] == child.pid
        child.communicate(b"")


@pytest.mark.parametrize("python", [sys.executable, *Path("/usr/bin").glob("python3.[0-9]"), "/usr/bin/python3"])
def test_programs_for_hosts_need_python_alone(python, tmp_path):
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    words = [python, "-I", "-c", bootstrap(MODULES[-1])]
    done = subprocess.run(words, input=pack_modules(*MODULES), capture_output=True, env={"HOME": str(tmp_path)})
    assert json.loads(done.stdout)["user"] and not list(tmp_path.iterdir()), done.stderr
    words = [python, "-I", "-c", bootstrap(report.MODULES[-1]), "1", "report"]
    done = subprocess.run(words, input=pack_modules(*report.MODULES), capture_output=True, env={"HOME": str(tmp_path)})
    assert json.loads(done.stdout)["environment"].keys() >= {"HOME"}, done.stderr
    words = [python, "-I", "-c", bootstrap(follow.MODULES[-1]), "0.01"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env={"HOME": str(tmp_path)}, **pipes) as program:
        program.stdin.write(pack_modules(*follow.MODULES))
        program.stdin.flush()
        samples = [json.loads(program.stdout.readline()) for _ in range(2)]
        program.stdout.close()  # nobody reads it: it ends
    assert all({"duty", "used", "total", "owners", "chips"} <= sample.keys() for sample in samples)

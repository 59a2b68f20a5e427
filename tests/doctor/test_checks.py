"""The findings of facts, and the programs for hosts, without a machine."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tpuswarm.doctor import collect, processes
from tpuswarm.doctor.check import Subject
from tpuswarm.doctor.checks import ACROSS, CHECKS
from tpuswarm.doctor.checks.held import BUSY
from tpuswarm.doctor.examine import MODULES, judge
from tpuswarm.doctor.processes import SEEN_BY_ROOT
from tpuswarm.remote.modules import boot, sent
from tpuswarm.watch import follow

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_every_command_that_mends_something_exists():
    from tpuswarm.cli.app import make_app

    root = typer.main.get_command(make_app())
    sentences = [check.mend.replace(r"\|", "|") for check in (*CHECKS, *ACROSS)]
    commands = [command for sentence in sentences for command in re.findall(r"`(tpuswarm [^`]+)`", sentence)]
    assert len(commands) > 6
    for command in commands:
        name, *words = shlex.split(command)[1:]
        context = root.commands[name].make_context(name, words, resilient_parsing=True)
        assert name != "setup" or context.params["target"] is None, command


def test_root_sees_who_has_a_device_open():
    """By the line that is run with sudo, of a device of this computer."""
    line = SEEN_BY_ROOT.replace("/dev/accel[0-9]*", "/dev/zer[o]*")
    with open("/dev/zero", "rb") as file:  # noqa: PTH123
        done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0 and f"/proc/{os.getpid()}/fd/{file.fileno()}" in done.stdout.split()


def test_this_computer_is_checked_and_fixed_without_a_fleet(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUSWARM_ROOT", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "libtpu_lockfile").touch(0o400)
    code, out, _ = typed("doctor")
    assert code == 1 and out.startswith("here  lock: /tmp/libtpu_lockfile is your own, of mode 400, so ")
    assert out.endswith("\n1 host: 1 wrong\n")
    code, out, _ = typed("doctor", "--fix")
    assert code == 0 and out.endswith("1 host: nothing is wrong\n") and not list((tmp_path / "tmp").iterdir())


WELL = {
    "time": 0.0, "user": "me", "devices": ["/dev/accel0"], "holders": [], "lock": None, "logs": None, "preload": {},
    "blind": False, "locker": None, "lost": {},
    "disks": [{"path": "/home/me", "free": 50e9, "size": 100e9, "inodes": 1000, "refused": None}],
    "memory": {"MemTotal": 300e9, "MemAvailable": 200e9, "SwapTotal": 0, "SwapFree": 0}, "files": 4096, "apt": None,
    "packages": {"jax": "0.10.2"}, "wanted_libtpu": None, "worker_id": None, "accelerator": None, "spoken": [],
    "head": None, "bucket": None, "on_cpu": [], "attended": True,
    "metadata": {"worker": "3", "type": "v4-32", "preempted": "FALSE", "maintenance": "NONE", "scopes": None},
}  # fmt: skip


def subject(label="a/3", skew_s=0.0, **facts) -> Subject:
    return Subject(label, {**WELL, **facts}, skew_s, "v4-32", 1, int(label[-1]))


def changed(name: str, **facts) -> dict:
    """A fact of a healthy host with some values changed."""
    fact = WELL[name]
    return {name: [{**fact[0], **facts}] if isinstance(fact, list) else {**fact, **facts}}


FELL_BACK = {"job": "j", "mark": "Falling back to cpu", "line": "W0101 Falling back to cpu."}
CREATES = {"name": "b", "lacks": ["storage.objects.create"], "why": ""}


@pytest.mark.parametrize(
    ("facts", "check", "sentence"),
    [
        ({"skew_s": -300.0}, "clock", "its clock is 300 s behind this computer's"),
        (changed("disks", free=1e9), "disk", "the disk of /home/me has 0.9 of 93 GiB left"),
        (changed("disks", inodes=0), "disk", "the disk of /home/me has no inodes left"),
        (changed("disks", refused="Read-only"), "disk", "nothing can be written in /home/me: Read-only"),
        ({"files": 1024}, "files", "a process may have 1,024 files open at most, fewer than 4,096"),
        (changed("memory", MemAvailable=1e9), "memory", "0.9 of 279 GiB of memory are free"),
        (changed("memory", SwapTotal=9e9), "memory", "8.4 GiB of memory are on the disk"),
        (changed("metadata", worker="1"), "worker", "it is worker 3, and its metadata says '1'"),
        ({"accelerator": "v4-16"}, "worker", "it is a v4-32, and TPU_ACCELERATOR_TYPE says 'v4-16'"),
        (changed("metadata", type="v9"), "worker", "it is a v4-32, and its metadata says 'v9'"),
        ({"bucket": CREATES}, "bucket", "in gs://b it may not do storage.objects.create"),
        ({"spoken": [FELL_BACK]}, "on-cpu", "job j says: W0101 Falling back to cpu."),
        (changed("metadata", preempted="TRUE"), "notice", "it is being preempted"),
    ],
)
def test_finding_of_facts(facts, check, sentence):
    """Others are planted on machines: remote/test_doctor.py."""
    assert judge([subject()]) == []
    (found,) = judge([subject(**facts)])
    assert (found.host, found.check) == ("a/3", check) and sentence in found.wrong.what


PROBES = {
    "devices": True, "holders_of_others": True, "holders": True, "at_work": True, "on_cpu": False, "entry": False,
    "locked": False, "preload": False, "disks": False, "memory": False, "files": False, "packages": False,
    "wanted_libtpu": False, "metadata": False, "spoken": False,
}  # fmt: skip
"""Each probe of a host, and whether `idle` depends on it."""


@pytest.mark.parametrize("probe", PROBES)
def test_failed_probe_costs_only_its_own_facts(probe, monkeypatch):
    def fails(*about):
        raise ValueError("odd")

    monkeypatch.setattr(collect, probe, fails)
    found = collect.collect("", "")
    assert WELL.keys() - found.keys() <= found["lost"].keys() and set(found["lost"].values()) == {"ValueError: odd"}
    well = {**WELL, "attended": False, "metadata": None}
    facts = {name: value for name, value in well.items() if name in found}
    findings = judge([Subject("a/0", {**facts, "lost": found["lost"]}, 0.0, "v4-32", 1, 0, age_s=1e6)])
    assert {finding.check for finding in findings} == ({"reach"} if PROBES[probe] else {"reach", "idle"})
    assert any("idle" in finding.wrong.mend for finding in findings if finding.check == "reach") == PROBES[probe]


def test_checks_without_their_facts_are_named_and_others_are_made():
    facts = {**WELL, "preload": {"/usr/lib/libtcmalloc.so.4": False}, "lost": {"spoken": "odd", "packages": "odd"}}
    alone = subject(**facts)
    del alone.facts["spoken"], alone.facts["packages"]
    findings = judge([alone])
    assert [(finding.check, finding.wrong.mend.rpartition("; ")[2]) for finding in findings[:2]] == [
        ("reach", "not made, or only in part: on-cpu, bad-node, preload, fork"),
        ("reach", "not made, or only in part: versions, libtpu"),
    ]
    assert [finding.check for finding in findings[2:]] == ["preload"]
    assert judge([alone], checks=(BUSY,)) == []
    del alone.facts["holders"]
    alone.facts["lost"]["holders"] = "odd"
    assert [finding.wrong.what for finding in judge([alone], checks=(BUSY,))] == ["holders could not be looked at: odd"]


def test_name_of_a_process_may_be_any_bytes():
    line = "import sys; open('/proc/self/comm', 'wb').write(b'\\xff) \\xfe'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        place = Path("/proc", str(process.pid))
        assert b"\xff" in (place / "comm").read_bytes()
        processes.at_work()
        assert processes.process(place, processes.ROOT)["pid"] == process.pid
        process.communicate(b"")


def test_host_with_other_versions_is_named():
    hosts = [subject(f"a/{n}", packages={"jax": version}) for n, version in enumerate(("0.10.2", "0.9.0"))]
    (found,) = judge([Subject(one.label, one.facts) for one in hosts])
    assert (found.host, found.check, found.wrong.what) == ("a/1", "versions", "jax is 0.9.0 here, and 0.10.2 on a/0")


def test_documentation_lists_every_check():
    cells = [(check.id, check.looks_at, check.why, check.mend) for check in (*CHECKS, *ACROSS)]
    rows = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)
    head = "| check | looks at | why it matters | how it is mended |\n|---|---|---|---|\n"
    before, _, after = PAGE.read_text().partition(head)
    there, end, after = after.partition("\n## ")
    if os.environ.get("TPUSWARM_GOLDEN") == "write":
        PAGE.write_text(before + head + rows + end + after)
    else:
        assert there == rows


@pytest.mark.parametrize("python", [sys.executable, *Path("/usr/bin").glob("python3.[0-9]"), "/usr/bin/python3"])
def test_programs_for_hosts_need_python_alone(python, tmp_path):
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    words = [python, "-I", "-c", boot(MODULES[-1])]
    done = subprocess.run(words, input=sent(*MODULES), capture_output=True, env={"HOME": str(tmp_path)})
    assert json.loads(done.stdout)["user"] and not list(tmp_path.iterdir()), done.stderr
    words = [python, "-I", "-c", boot(follow.MODULES[-1]), "0.01"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env={"HOME": str(tmp_path)}, **pipes) as process:
        process.stdin.write(sent(*follow.MODULES))
        process.stdin.flush()
        samples = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdout.close()  # nobody reads it: it ends
    assert all({"duty", "used", "total", "owners", "chips"} <= sample.keys() for sample in samples)

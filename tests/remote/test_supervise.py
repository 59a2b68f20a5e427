"""The file that runs jobs on a host: with an old Python, through reboots, full disks and clocks that jump."""

import ast
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import until
from tests.web import serve_web
from tpuswarm.remote import supervise
from tpuswarm.remote.sync import receive

THERE = [Path(supervise.__file__), Path(receive.__file__)]
"""Programs for hosts, which need Python 3.10 alone."""
NEWER = {
    "tomllib", "ExceptionGroup", "BaseExceptionGroup", "Self", "StrEnum", "TaskGroup", "timeout_at", "file_digest",
    "UTC", "batched", "override", "walk", "add_note", "LiteralString", "assert_never", "process_cpu_count", "exp2",
}  # fmt: skip
"""Names of the standard library that Python 3.11 and later have brought, as their release notes list them."""


def oldest_python() -> str:
    """Return a Python 3.10 if there is one, else this Python."""
    found = [shutil.which("python3.10"), *sorted(map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")))]
    works = (path for path in found if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode)
    return next(works, sys.executable)


@pytest.mark.parametrize("file", THERE, ids=lambda path: path.name)
def test_programs_for_hosts_are_python_3_10(file):
    nodes = list(ast.walk(ast.parse(file.read_text(), feature_version=(3, 10))))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {getattr(node, "module", name.name) for node in imports for name in node.names}
    assert all(module.partition(".")[0] in sys.stdlib_module_names for module in imported)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} | imported
    assert not names & NEWER


class There:
    def __init__(self, folder: Path):
        self.home, self.python = folder / "home", oldest_python()
        self.home.mkdir()
        self.program = folder / "supervise.py"
        self.program.write_text(THERE[0].read_text())
        self.told = folder / "told"
        for name in ("systemctl", "sudo"):
            (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{self.told}\n')
            (folder / name).chmod(0o755)
        (folder / "run").mkdir()
        (folder / "run/boot").write_text("1")
        self.environment = {
            "HOME": str(self.home), "PATH": f"{folder}:/usr/bin:/bin", "TPUSWARM_ROOT": str(folder), "USER": "me",
            "GCE_METADATA_HOST": "127.0.0.1:9",
        }  # fmt: skip

    def raw(self, *words: str, data: bytes = b"", code: int = 0) -> bytes:
        done = subprocess.run(
            [self.python, self.program, *words], input=data, env=self.environment, capture_output=True
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def start(self, name: str, run: int, line: str, **about) -> dict:
        return json.loads(self.raw("start", name, str(run), data=json.dumps({"line": line, **about}).encode()))

    def state(self, name: str) -> dict:
        return json.loads(self.raw("show", name))

    def ended(self, name: str) -> dict:
        until(lambda: self.state(name)["state"] != "running")
        return self.state(name)

    def power_off(self) -> None:
        while pids := self.pids():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"HOME={self.home}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def there(tmp_path) -> Iterator[There]:
    host = There(tmp_path)
    yield host
    host.power_off()


def test_run_starts_once_and_a_later_one_waits_for_its_end(there):
    line = f"echo one >>{there.home}/runs; sleep 1234"
    first = there.start("train", 1, line)
    assert first["state"] == "running" and there.start("train", 1, line)["pid"] == first["pid"]
    assert until(lambda: (there.home / "runs").exists())
    second = f"echo two >>{there.home}/runs; exit 3"
    assert there.start("train", 2, second)["run"] == 1  # which is asked to end
    assert until(lambda: there.start("train", 2, second)["run"] == 2)
    state = there.ended("train")
    assert (state["run"], state["state"], state["code"]) == (2, "ended", 3)
    assert (there.home / "runs").read_text() == "one\ntwo\n" and not there.pids()


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("step 1\\nValueError: no rows\\nstopping threads\\n", "ValueError: no rows"),
        ("error: no data\\n", "error: no data"),
        ("10%%\\r20%%\\rno space left", "no space left"),
        ("", ""),
    ],
)
def test_failed_run_reports_the_line_that_names_its_error(there, printed, error):
    there.start("train", 1, f"printf '{printed}'; exit 3")
    assert there.ended("train")["error"] == error


def test_nothing_restarts_on_a_machine_that_is_being_preempted(there):
    answers = {"preempted": b"TRUE"}
    with serve_web(lambda path, headers: (200, answers["preempted"])) as there.environment["GCE_METADATA_HOST"]:
        line = f"echo begun >>{there.home}/runs; sleep 1234"
        os.kill(there.start("train", 1, line)["pid"], signal.SIGTERM)  # an ending machine signals all its processes
        assert there.ended("train")["state"] == "lost"
        assert there.start("train", 2, line)["run"] == 1 and not there.pids()
        answers["preempted"] = b"FALSE"  # maintenance: the machine stays
        assert there.start("train", 2, line)["run"] == 2


@pytest.mark.parametrize("ignored", ["", "INT", "INT TERM"])
def test_end_of_a_run_ends_an_earlier_one_too_whatever_signals_it_ignores(there, ignored):
    there.program.write_text(there.program.read_text().replace("KILL_AFTER_S = 20.0", "KILL_AFTER_S = 0.4"))
    there.start("train", 1, f"trap '' {ignored or 'USR1'}; touch {there.home}/up; sleep 1234")
    assert until((there.home / "up").exists)
    there.raw("end", "train", "2")
    assert until(lambda: json.loads(there.raw("end", "train", "2"))["run"] == 2)
    assert there.state("train")["state"] == "asked" and not there.pids()


def test_systemd_restarts_a_job_after_a_reboot(there):
    """Without systemd, and on the workers of a slice, it waits for a keeper, and `again` is false."""
    line = f"echo begun >>{there.home}/$MARK; sleep 1234"
    for name, again in (("own", True), ("slice", False), ("ended", True)):
        there.start(name, 1, line.replace("$MARK", name), again=again)
        assert until((there.home / name).exists)
    unit = (there.home / ".config/systemd/user/tpuswarm-jobs.service").read_text()
    reload, enable = "systemctl --user daemon-reload", "systemctl --user enable --quiet tpuswarm-jobs.service"
    assert there.told.read_text().splitlines() == ["sudo -n loginctl enable-linger me", reload, enable]
    there.power_off()
    (there.home.parent / "run/boot").write_text("2")
    assert {there.state(name)["state"] for name in ("own", "slice", "ended")} == {"lost"}
    there.raw("end", "ended", "1")  # somebody stops it meanwhile
    assert re.search(r"^ExecStartPre=/bin/sleep \d+$", unit, re.M)  # a keeper comes first
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    command = command.replace("/usr/bin/env python3", there.python)
    subprocess.run(["/bin/bash", "-c", command], env=there.environment, check=True, timeout=240)
    assert until(lambda: (there.home / "own").read_text() == "begun\nbegun\n")
    assert (there.state("own")["state"], there.state("own")["run"]) == ("running", 1)
    assert [there.state(name)["state"] for name in ("slice", "ended")] == ["lost", "asked"]
    assert (there.home / "slice").read_text() == (there.home / "ended").read_text() == "begun\n"


def test_followed_log_loses_nothing_when_it_is_rotated(there):
    there.program.write_text(there.program.read_text().replace("64 << 20", "1 << 19").replace("8 << 20", "1 << 17"))
    wait = f"touch {there.home}/half; until [ -e {there.home}/go ]; do sleep 0.05; done"
    there.start("talks", 1, f"seq 40000; {wait}; seq 40001 99999")
    until((there.home / "half").exists)
    heard, place = b"", []

    def hear() -> bool:
        nonlocal heard, place
        head, _, data = there.raw("log", "talks", "100000", *place).partition(b"\n")
        place = [] if head.startswith(b"0 ") else head.decode().split()[::-1]
        heard += data
        return bool(data)

    until(lambda: not hear() and heard.endswith(b"\n40000\n"))
    (there.home / "go").touch()
    there.ended("talks")
    while hear():
        pass
    assert (there.home / ".tpuswarm/jobs/talks/log.1").exists()
    assert heard.split() == [str(n).encode() for n in range(1, 100_000)]


GROWS, ROTATES, BEGINS = range(3)
"""Actions of a log's writer while the log is read: see `Log.write`."""


@pytest.mark.parametrize("done", [GROWS, ROTATES, BEGINS], ids=["grows", "rotates", "begins"])
@pytest.mark.parametrize("follows", [False, True], ids=["tail", "follow"])
@pytest.mark.parametrize("rotated", [False, True], ids=["one-file", "two-files"])
def test_log_that_changes_while_it_is_read_is_printed_once(done, follows, rotated, tmp_path, monkeypatch, capfdbinary):
    """The writer acts before each line of the reader in turn, and finally after the last."""
    monkeypatch.setattr(supervise, "JOBS", tmp_path)
    log, before = tmp_path / "job/log", tmp_path / "job/log.1"

    def write() -> None:
        with log.open("ab") as file:
            file.write(b"two\n")
        if done >= ROTATES:
            log.replace(before)
        if done == BEGINS:
            log.write_bytes(b"three\n")

    def trace(frame, event, arg):
        nonlocal lines_left
        if frame.f_code is not supervise.show_log.__code__:
            return None
        lines_left -= event == "line"
        if event == "line" and lines_left == 0:
            write()
        return trace

    since = b"two\n" + b"three\n" * (done >= ROTATES)
    wanted = [since] if follows else [b"one\n" + since, b"old\none\n" + since][: 1 + rotated]
    tracing, point, lines_left = sys.gettrace(), 0, 0
    while lines_left <= 0:
        point += 1
        shutil.rmtree(log.parent, ignore_errors=True)
        log.parent.mkdir()
        if rotated:
            before.write_bytes(b"old\n")
        log.write_bytes(b"one\n")
        lines_left, place = point, (log.stat().st_size, log.stat().st_ino) if follows else (0, 0)
        sys.settrace(trace)
        try:
            supervise.show_log("job", 9, *place)
        finally:
            sys.settrace(tracing)
        if lines_left > 0:
            write()
        heard = b""
        for look in range(4):
            head, _, data = capfdbinary.readouterr().out.partition(b"\n")
            inode, offset = map(int, head.split())
            heard += data
            if look == 0 and done == ROTATES:
                log.write_bytes(b"three\n")
            supervise.show_log("job", 9, offset, inode)
        assert heard in wanted, f"line {point}"
        capfdbinary.readouterr()
    assert point > 10


def test_full_disk_loses_output_and_not_the_job(there):
    folder = there.home / ".tpuswarm/jobs/full"
    folder.mkdir(parents=True)
    (folder / "log").symlink_to("/dev/full")
    there.start("full", 1, f"seq 100000; touch {there.home}/done")
    assert there.ended("full")["code"] == 0 and (there.home / "done").exists()
    (folder / "state.json.new").mkdir()  # nothing can be written
    said = there.raw("start", "full", "2", data=b'{"line": "true"}', code=1)
    assert b"the state of the job cannot be written: [Errno 21]" in said


SUDO = '#!/bin/sh\nexec env -i PATH=/usr/bin:/bin "$@"\n'
"""Real sudo drops the environment, with it the mark of the job; then only descent tells whose a process is."""


@pytest.mark.parametrize(
    ("line", "is_killed"),
    [
        ("sudo sleep 1234", False),
        ("sudo sleep 1234", True),
        ("sudo sh -c 'setsid sleep 1234 & exit'; sleep 1234", False),  # nobody knows of an orphan without a supervisor
    ],
)
def test_processes_that_sudo_started_end_with_their_job(there, line, is_killed):
    """is_killed: the supervisor is, before the job is to end."""
    sudo = there.home.parent / "sudo"
    sudo.write_text(SUDO)
    state = there.start("train", 1, line)
    children = Path(f"/proc/{state['pid']}/task/{state['pid']}/children")
    assert until(lambda: len(sleepers := descendants(state["pid"], "sleep")) == line.count("sleep") and sleepers)
    started = descendants(state["pid"], "sleep")
    if is_killed:
        os.kill(state["pid"], signal.SIGKILL)
        until(lambda: not children.exists())
    there.raw("end", "train", "1")
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def descendants(pid: int, name: str) -> list[int]:
    found = []
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child] * (Path(f"/proc/{child}/comm").read_text().strip() == name) + descendants(child, name)
    return found


def test_other_users_read_no_job_and_its_own_files_are_as_the_user_wants(there):
    folder = there.home / ".tpuswarm/jobs"
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # by an older version
    before = os.umask(0o027)
    try:
        there.start("train", 1, f"echo secret; touch {there.home}/model")
    finally:
        os.umask(before)
    there.ended("train")
    assert stat.S_IMODE((there.home / "model").stat().st_mode) == 0o640
    found = [folder, *folder.rglob("*")]
    assert len(found) > 4 and not any(path.stat().st_mode & 0o077 for path in found)


def test_job_that_prints_much_does_not_wait_for_us(there):
    interval_s, parts = 10.0, 20
    text = there.program.read_text()
    there.program.write_text(text.replace("POLL_INTERVAL_S = 0.1", f"POLL_INTERVAL_S = {interval_s}"))
    assert there.program.read_text() != text
    begun = time.monotonic()
    there.start("talks", 1, f"for n in $(seq {parts}); do head -c 65537 /dev/zero; done")
    assert there.ended("talks")["code"] == 0
    assert time.monotonic() - begun < parts * interval_s / 2


def test_clock_that_jumps_changes_nothing(there):
    (there.home / "sitecustomize.py").write_text(
        "import itertools, time\nreal, n = time.time, itertools.count()\n"
        "time.time = lambda: real() + 60 * (-1) ** next(n)\n"
    )
    there.environment["PYTHONPATH"] = str(there.home)
    there.start("steady", 1, "for n in 1 2; do echo $n; sleep 0.3; done", alive_s=30)
    there.start("silent", 1, "sleep 1234", alive_s=1.5)
    assert (there.ended("steady")["state"], there.state("steady")["code"]) == ("ended", 0)
    assert there.ended("silent")["state"] == "stalled"
